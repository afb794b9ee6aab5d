"""`kvtier store`: what a directory of saved conversations holds, and how it is put in order. Needs no model."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from kvtier.config import format_size, parse_bytes
from kvtier.conversation.disk.keys import UNKNOWN
from kvtier.errors import ConfigError

if TYPE_CHECKING:
    from kvtier.conversation.disk.tools.contents import Contents
    from kvtier.conversation.disk.tools.upkeep import Upkeep

_EXAMPLES = """\
examples:
  kvtier store ls chats
  kvtier store show chats alice
  kvtier store verify chats          # exit status 1 where something is damaged
  kvtier store copy chats backup/chats
  kvtier store rm chats alice --gc
  kvtier store compact chats
  kvtier store drop chats 5.17.0     # what that version of Transformers has computed

ls, show, verify, copy, and gc and drop with --dry-run only read, also while a store has the directory open.
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "store",
        help="list, check and put in order a directory of saved conversations",
        description="Look at a directory of saved conversations, and put it in order. The model is not needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def verb(name: str, run: Any, about: str, **details: Any) -> argparse.ArgumentParser:
        found: argparse.ArgumentParser = verbs.add_parser(name, help=about, **details)
        found.add_argument("directory", metavar="DIR", help="the directory of a store")
        found.set_defaults(run=run)
        return found

    which = verb("ls", ls, "the conversations, with tokens and bytes")
    which.add_argument("--json", action="store_true", help="print JSON")
    which = verb("show", show, "the messages of a conversation, and the files that it is in")
    which.add_argument("name", metavar="NAME", help="of the conversation")
    which.add_argument("--json", action="store_true", help="print JSON")
    which = verb("verify", verify, "read every file and compare every checksum; 1: something is damaged")
    which.add_argument("--repair", action="store_true", help="forget what is damaged: it is computed again")
    which = verb("copy", copy, "copy it as it is at one moment, also while a store has it open")
    which.add_argument("to", metavar="TO", help="a directory that is not there yet, or is empty")
    which = verb("compact", compact, "merge small files that follow each other, and shrink the database")
    which.add_argument("--largest", default="64MiB", help="bytes of a merged file, at the most (64MiB)")
    which = verb("gc", gc, "remove what no conversation refers to, also what `generate` kept without one")
    which.add_argument("--dry-run", action="store_true", help="say what would be removed")
    which = verb("drop", drop, "remove keys and values that other versions of Transformers have computed")
    which.add_argument("versions", metavar="VERSION", nargs="+", help="as `ls` shows them: 5.17.0, or unknown")
    which.add_argument("--dry-run", action="store_true", help="say what would be removed")
    which = verb("rm", rm, "forget a conversation")
    which.add_argument("name", metavar="NAME", help="of the conversation")
    which.add_argument("--yes", action="store_true", help="do not ask")
    which.add_argument("--gc", action="store_true", help="and remove what no conversation refers to then")


# Read


def ls(args: argparse.Namespace) -> int:
    """Print what there is. Returns the exit status."""
    from kvtier.conversation.disk.tools.contents import contents

    found = contents(args.directory)
    rows, rest = conversations(found), unreferred_bytes(found)
    if args.json:
        totals: dict[str, Any] = {"files": len(found.rows), "bytes": found.nbytes, "unreferred_bytes": rest}
        totals["computed_by"] = {version: size for version, _, size in versions(found)}
        print(json.dumps({"model": found.about, "conversations": rows, **totals, "damaged": len(found.damage)}))
        return 0
    wide = max([len("name"), *(len(plain(row["name"])) for row in rows)])
    print(f"{'name':<{wide}} {'turns':>6} {'tokens':>10} {'bytes':>10} {'shared':>10}")
    for row in rows:
        sizes = f"{format_size(row['bytes']):>10} {format_size(row['shared_bytes']):>10}"
        print(f"{plain(row['name']):<{wide}} {row['turns']:>6,} {row['tokens']:>10,} {sizes}")
    print(
        f"\n{count(len(rows), 'conversation')} of {plain(found.about.get('model', '?'))}, "
        f"{format_size(found.nbytes)} in {count(len(found.rows), 'file')}, {format_size(rest)} that no conversation "
        "refers to"
    )
    for version, files, size in versions(found):
        print(f"computed by {_named(version)}: {format_size(size)} in {count(files, 'file')}")
    if found.damage:
        print(f"{len(found.damage)} damaged: `kvtier store verify` tells what", file=sys.stderr)
    return 0


def conversations(found: Contents) -> list[dict[str, Any]]:
    """Each conversation in numbers: its turns, the tokens of its history, the bytes of the files that these are in, and
    of those that others refer to too."""
    referred = found.referred()
    users = Counter(number for numbers in referred.values() for number in numbers)
    return [
        {
            "name": name,
            "turns": turns_of(state),
            "tokens": len(state.get("ids") or ()),
            "bytes": sum(found.rows[n].nbytes for n in referred[name]),
            "shared_bytes": sum(found.rows[n].nbytes for n in referred[name] if users[n] > 1),
        }
        for name, state in found.conversations.items()
    ]


def versions(found: Contents) -> list[tuple[str, int, int]]:
    """What has computed the keys and values, and the files and bytes of each."""
    by = sorted(found.computed_by().items())
    return [(version, len(numbers), sum(found.rows[n].nbytes for n in numbers)) for version, numbers in by]


def unreferred_bytes(found: Contents) -> int:
    """Bytes of files that no conversation refers to."""
    from kvtier.conversation.disk.tools.upkeep import unreferred

    return sum(found.rows[n].nbytes for n in unreferred(found))


def show(args: argparse.Namespace) -> int:
    """Print one conversation. Returns the exit status."""
    from kvtier.conversation.disk.tools.contents import contents, stop_of

    found = contents(args.directory)
    state = found.conversations.get(args.name)
    if state is None:
        raise ConfigError(f"{found.path} has no conversation {args.name!r}: `kvtier store ls` lists them.")
    referred = found.referred()
    users = Counter(number for numbers in referred.values() for number in numbers)
    files: list[dict[str, Any]] = [
        {
            "file": number,
            "continues": found.rows[number].parent,
            "start": found.rows[number].start,
            "stop": stop_of(found.rows[number]),
            "bytes": found.rows[number].nbytes,
            "conversations": users[number],
        }
        for number in sorted(referred[args.name], key=lambda n: (found.rows[n].start, n))
    ]
    messages, tokens = messages_of(state), len(state.get("ids") or ())
    if args.json:
        about = {"name": args.name, "tokens": tokens, "messages": messages, "salt": state.get("salt")}
        print(json.dumps({**about, "files": files}))
        return 0
    for message in messages:
        print(f"{plain(str(message.get('role')))}: {plain(str(message.get('content')), lines=True)}\n")
    print(f"{count(tokens, 'token')}, of which are saved:")
    for each in files:
        shared = f"   in {each['conversations']} conversations" if each["conversations"] > 1 else ""
        span = f"{each['start']:,} to {each['stop']:,}"
        print(f"  {each['file']:012}  {span:>20}  {format_size(each['bytes']):>10}{shared}")
    return 0


def verify(args: argparse.Namespace) -> int:
    """Read every file. Returns the exit status: 1 where something is damaged, or was."""
    from kvtier.conversation.disk.tools.contents import verify

    files, nbytes, damage = verify(args.directory)
    for each in damage:
        print(f"{each.what if each.number is None else f'{each.number:012}'}: {plain(each.why)}")
    print(f"{count(files, 'file')} read, {format_size(nbytes)}; {len(damage) or 'nothing'} damaged")
    if damage and args.repair:
        with _upkeep(args) as upkeep:
            print(f"{upkeep.repair()} forgotten, with what continues them")
    return 1 if damage else 0


def copy(args: argparse.Namespace) -> int:
    """Copy the directory. Returns the exit status: 1 where something is damaged."""
    from kvtier.conversation.disk.tools.copying import copy_folder

    done = copy_folder(args.directory, args.to)
    files = count(done.files, "file")
    print(f"{count(done.conversations, 'conversation')} and {files} copied, {format_size(done.nbytes)}")
    if done.left_out:
        print(f"{count(done.left_out, 'file')} left out: their tokens are computed again", file=sys.stderr)
    if done.damage:
        print(f"{len(done.damage)} damaged: `kvtier store verify` tells what", file=sys.stderr)
    return 1 if done.damage else 0


# Change


def compact(args: argparse.Namespace) -> int:
    """Merge files. Returns the exit status."""
    largest = parse_bytes("--largest", args.largest)
    with _upkeep(args) as upkeep:
        done = upkeep.compact(largest)
    sizes = f"{format_size(done.nbytes)} before, {format_size(done.left)} now"
    print(f"{done.merged} of {count(done.files, 'file')} merged; {sizes}")
    if done.problem:
        print(f"kvtier: {plain(done.problem)}.", file=sys.stderr)
    return 1 if done.problem else 0


def gc(args: argparse.Namespace) -> int:
    """Remove what no conversation refers to. Returns the exit status."""
    if args.dry_run:
        from kvtier.conversation.disk.tools.contents import contents
        from kvtier.conversation.disk.tools.upkeep import unreferred

        found = contents(args.directory)
        gone = unreferred(found)
        nbytes = sum(found.rows[n].nbytes for n in gone)
        print(f"{count(len(gone), 'file')} would be removed, {format_size(nbytes)}")
        return 0
    with _upkeep(args) as upkeep:
        _collect(upkeep)
    return 0


def drop(args: argparse.Namespace) -> int:
    """Remove what versions of Transformers have computed. Returns the exit status."""
    if args.dry_run:
        from kvtier.conversation.disk.tools.contents import contents

        found = contents(args.directory)
        for version in map(_version, args.versions):
            gone = found.chunks_of(version)
            nbytes = sum(found.rows[n].nbytes for n in gone)
            print(f"{_named(version)}: {count(len(gone), 'file')} would be removed, {format_size(nbytes)}")
        return 0
    with _upkeep(args) as upkeep:
        for version in map(_version, args.versions):
            files, nbytes = upkeep.drop_computed_by(version)
            print(f"{_named(version)}: {count(files, 'file')} removed, {format_size(nbytes)}")
    return 0


def _version(given: str) -> str:
    """A version as folders have it; users leave the package out."""
    return given if given == UNKNOWN or given.startswith("transformers ") else f"transformers {given}"


def _named(version: str) -> str:
    return "an unknown version" if version == UNKNOWN else plain(version)


def rm(args: argparse.Namespace) -> int:
    """Forget a conversation. Returns the exit status: 1 where the answer was no."""
    with _upkeep(args) as upkeep:
        if args.name not in upkeep.contents().conversations:
            raise ConfigError(f"{args.directory} has no conversation {args.name!r}: `kvtier store ls` lists them.")
        if not args.yes:
            if not sys.stdin.isatty():
                raise ConfigError("There is no terminal to ask on: `--yes` removes without a question.")
            try:
                answer = input(f"Forget {plain(args.name)!r}? [y/N] ")
            except EOFError:
                answer = ""
            if answer.strip().lower() not in ("y", "yes"):
                print("kept")
                return 1
        upkeep.drop_conversation(args.name)
        if args.gc:
            _collect(upkeep)
    return 0


def _upkeep(args: argparse.Namespace) -> Upkeep:
    from kvtier.conversation.disk.tools.upkeep import Upkeep

    return Upkeep(args.directory)


def _collect(upkeep: Upkeep) -> None:
    files, nbytes = upkeep.collect()
    print(f"{count(files, 'file')} removed, {format_size(nbytes)}")


# What is shown


def messages_of(state: dict[str, Any]) -> list[dict[str, Any]]:
    """The messages of a saved conversation, without what is none."""
    found = state.get("messages")
    return [x for x in found if isinstance(x, dict)] if isinstance(found, list) else []


def turns_of(state: dict[str, Any]) -> int:
    """How many messages of a conversation are the user's."""
    return sum(x.get("role") == "user" for x in messages_of(state))


def count(number: int, what: str) -> str:
    """ "1 file", "2 files"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def plain(text: str, *, lines: bool = False) -> str:
    """Text of others as a terminal may show it: what would move the cursor, or set colours, is written out."""
    return "".join(
        x if x.isprintable() or (lines and x in "\n\t") else x.encode("unicode_escape").decode() for x in text
    )
