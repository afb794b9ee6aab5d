"""`python -m benchmarks [SCENARIO ...]`: measure, print tables, append records to benchmarks/results/."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import pkgutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch
import transformers

from benchmarks import scenarios
from benchmarks.contenders import contender
from benchmarks.harness import Bench, Settings
from benchmarks.models import SHAPES, ModelError
from benchmarks.records import RESULTS
from benchmarks.trees import Tree, TreeError
from kvtier import KVTierError


def all_scenarios() -> dict[str, ModuleType]:
    """The scenarios by name: modules with `SUMMARY`, `run(bench)` and, if it has parts, `CASES`."""
    names = sorted(module.name for module in pkgutil.iter_modules(scenarios.__path__))
    return {name: importlib.import_module(f"benchmarks.scenarios.{name}") for name in names}


def parse_tokens(text: str) -> int:
    """`8k` or `8192`."""
    text = text.strip().lower()
    value = int(text.removesuffix("k")) * (1024 if text.endswith("k") else 1)
    if value < 1:
        raise ValueError(text)
    return value


def cases_of(module: ModuleType) -> tuple[str, ...]:
    """The parts of a scenario that can be run alone."""
    return getattr(module, "CASES", ())


def measures_trees(module: ModuleType) -> bool:
    """Whether a scenario can measure another source tree."""
    return getattr(module, "AGAINST_CONTENDERS", None) is not None


def parse_args(argv: Sequence[str] | None, known: Mapping[str, ModuleType]) -> tuple[argparse.Namespace, Settings]:
    """Read the command line; ends the program with status 2 if it is wrong."""

    def contexts(text: str) -> tuple[int, ...]:
        return tuple(parse_tokens(part) for part in text.split(","))

    def count(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{text} is not a positive number")
        return value

    def names(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(","))
        try:
            for name in found:
                contender(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return found

    def counts(text: str) -> tuple[int, ...]:
        return tuple(count(part) for part in text.split(","))

    def tree(text: str) -> Tree:
        try:
            return Tree.at(Path(text))
        except TreeError as error:
            raise argparse.ArgumentTypeError(f"{text}: {error}") from error

    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all; see --list")
    parser.add_argument("--list", action="store_true", help="list the scenarios and end")
    parser.add_argument(
        "--cases",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        metavar="NAME,NAME",
        help="only these parts of the scenarios; see --list",
    )
    parser.add_argument(
        "--model", help=f"pylm (the example model), {', '.join(SHAPES)} (random weights), a folder, or a hub model"
    )
    parser.add_argument("--contexts", type=contexts, metavar="N,N", help="tokens of context, such as 1k,8k,32k")
    parser.add_argument("--contenders", type=names, metavar="NAME,NAME", help="such as dynamic,kvtier,kvtier@25%%")
    parser.add_argument("--rounds", type=count, default=0, metavar="N", help="turns of each contender")
    parser.add_argument("--new-tokens", type=count, default=0, metavar="N", help="tokens decoded in one turn")
    parser.add_argument(
        "--block-size", type=count, default=0, metavar="N", help="tokens per block (default: the cache's)"
    )
    parser.add_argument(
        "--batch", type=count, default=1, metavar="N", help="sequences that decode together (default: 1)"
    )
    parser.add_argument(
        "--threads",
        type=counts,
        metavar="N,N",
        help="CPU threads of every contender (default: as torch chooses); with several numbers all runs once for each",
    )
    parser.add_argument(
        "--against",
        type=tree,
        metavar="PATH",
        help="another checkout of this project, its native library compiled: its tiered caches are measured too, each "
        f"contender in a process of its own ({', '.join(name for name in known if measures_trees(known[name]))})",
    )
    parser.add_argument("--device", default="cuda" if cuda else "cpu", help="default: cuda if there is one")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: float32 on a CPU")
    parser.add_argument(
        "--no-cudnn-attention",
        action="store_true",
        help="keep torch's attention off cuDNN, which makes a new plan for every length of the keys",
    )
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that everything runs")
    parser.add_argument(
        "--out",
        type=Path,
        help="a folder, or one .jsonl file (default: benchmarks/results; with --quick a new temporary one)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="PATH", help="eviction, serving_*: a Mooncake trace, a .jsonl file"
    )
    parser.add_argument("--time-limit", type=float, metavar="S", help="begin no further case after S seconds")
    parser.add_argument("--emulated", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    unknown = sorted(set(args.scenarios) - set(known))
    if unknown:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(known)}")
    if args.against:
        refused = [name for name in args.scenarios if not measures_trees(known[name])]
        if refused:
            parser.error(f"argument --against: not possible in {', '.join(refused)}")
        args.scenarios = args.scenarios or [name for name in known if measures_trees(known[name])]
    parts = {case for name in args.scenarios or known for case in cases_of(known[name])}
    unknown = sorted(set(args.cases or ()) - parts)
    if unknown:
        parser.error(f"argument --cases: no {', '.join(unknown)} here; there are {', '.join(sorted(parts)) or 'none'}")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        parser.error(f"argument --device: {str(error).splitlines()[0]}")
    if device.type not in ("cpu", "cuda"):
        parser.error(f"argument --device: {args.device}: benchmarks run on cpu and cuda")
    if device.type == "cuda" and device.index is None and cuda:
        device = torch.device("cuda", torch.cuda.current_device())  # as tensors name it
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        parser.error(f"argument --device: {args.device}: torch sees {torch.cuda.device_count() or 'no'} CUDA devices")
    settings = Settings(
        model=args.model,
        contexts=args.contexts,
        contenders=args.contenders,
        rounds=args.rounds,
        new_tokens=args.new_tokens,
        block_size=args.block_size,
        cases=args.cases,
        batch=args.batch,
        against=args.against,
        device=device,
        dtype=getattr(torch, args.dtype or ("float32" if device.type == "cpu" else "bfloat16")),
        # Figures of small sizes are not among those that the project reports.
        out=args.out or (RESULTS if args.list or not args.quick else Path(tempfile.mkdtemp(prefix="kvtier-quick-"))),
        quick=args.quick,
        deadline=time.monotonic() + args.time_limit if args.time_limit else float("inf"),
        emulated=args.emulated,
        terminal=sys.stdout.isatty(),
        trace=args.trace,
    )
    return args, settings


def main(argv: Sequence[str] | None = None) -> int:
    """Run scenarios. Returns 0; 1 if a contender failed; 2 for a wrong option; 130 after Ctrl-C."""
    found = all_scenarios()
    args, settings = parse_args(argv, found)
    if args.list:
        width = max(map(len, found))
        for name, module in found.items():
            print(f"  {name:<{width}}  {module.SUMMARY}")
            if cases_of(module):
                print(f"  {'':<{width}}    cases: {', '.join(cases_of(module))}")
        return 0
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if args.no_cudnn_attention:
        # cuDNN makes a plan for each length of the keys. The dense caches would pay for one at each step and split
        # attention would not, which would flatter kvtier.
        torch.backends.cuda.enable_cudnn_sdp(False)
    failed = 0
    try:
        for threads in args.threads or (torch.get_num_threads(),):
            torch.set_num_threads(threads)
            with contextlib.closing(Bench(settings)) as bench, torch.inference_mode():
                for name in args.scenarios or found:
                    found[name].run(bench)
                failed += bench.failed
    except KeyboardInterrupt:
        print(f"\nInterrupted. Finished cases are recorded in {settings.out}.")
        return 130
    except (ModelError, KVTierError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    print(f"Recorded in {settings.out}.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
