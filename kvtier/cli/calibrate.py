"""`kvtier calibrate`: what this machine does in how many seconds, measured once and stored for every later process."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvtier import profile
from kvtier.cli.config import read_config
from kvtier.errors import ConfigError

_ABOUT = """\
Measure what kvtier otherwise estimates on this machine: copies between device and host, by size, each way and both at
once; attention on the host, by bytes, threads and queries; with MODEL, also the time of its layers and of a prefill; on
a CUDA device also attention there, the tiles of its kernels, and when a launch copies faster than the copy engine.

The result is stored in ~/.cache/kvtier, or the folder that KVTIER_PROFILE names, for every later process:
policy="adaptive" begins with it, and `kvtier plan MODEL --profile this` reckons with it. It takes up to a minute, and
nothing else should use the machine meanwhile. Ctrl-C ends it; what was measured before is stored.
"""
_EXAMPLES = """\
examples:
  kvtier calibrate                                           # of this machine, for common shapes
  kvtier calibrate Qwen/Qwen3-0.6B                           # and of a model
  kvtier calibrate Qwen/Qwen3-0.6B --output profile.json     # and as a file, for `kvtier plan` on another machine

exit status: 0: all was measured; 1: something could not be measured; 2: an error; 130: Ctrl-C
"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, and store its profile",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder, or a name on the model hub (none)")
    parser.add_argument("--device", help="such as cuda:1 or cpu (the current CUDA device, if there is one)")
    parser.add_argument(
        "--dtype", help="of the model, such as bfloat16 (what it is saved in; on the CPU float32); needs MODEL"
    )
    parser.add_argument("--block-size", type=int, help="tokens per block (the cache's)")
    parser.add_argument("--output", metavar="FILE", help="also write all that is known of machine and model, as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out the command. Returns the exit status."""
    if args.dtype is not None and args.model is None:
        raise ConfigError("--dtype is of a model: give a MODEL.")
    if args.output is not None:
        _write(args.output, None)  # said before anything is measured
    try:
        from kvtier.calibration.run import calibrate

        model = None
        if args.model is not None:
            profile.checked_folder()  # said before a model is loaded, which takes minutes
            from kvtier.hf.models.checkpoint.loading import model_of, quiet

            with quiet():
                read_config(args.model, loaded=True)  # its errors say what is not there
                model = model_of(args.model, args.dtype, args.device)
        found = calibrate(model, device=args.device, block_size=args.block_size)
    except KeyboardInterrupt:
        print("kvtier: interrupted; what was measured before is stored, all else is as it was", file=sys.stderr)
        return 130
    print(found.summary())  # each result was told on stderr when it was there
    if args.output is not None:
        _write(args.output, found.profile.to_json() + "\n")
        print(f"profile: {args.output}")
    return 1 if found.failures else 0


def _write(name: str, text: str | None) -> None:
    """Write a file under another name and rename it; None: only see whether that is possible."""
    path = Path(name)
    if path.is_dir():
        raise ConfigError(f"--output {name}: this is a folder.")
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text or "", encoding="utf-8")
        if text is not None:
            os.replace(part, path)
    except OSError as error:
        raise ConfigError(f"--output {name} cannot be written: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)
