"""A load, served by an engine of a model on this machine."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

from kvtier.cli.bench.loads import block_of, load_of
from kvtier.cli.bench.report import Found
from kvtier.cli.chat.command import check_budgets
from kvtier.cli.config import read_config
from kvtier.errors import BudgetError, ConfigError
from kvtier.scheduling.names import scheduler_of
from kvtier.scheduling.simulation.outcome import Outcome, Request


def measured(args: argparse.Namespace) -> Found:
    """Measure. Raises ConfigError: what is asked for cannot be."""
    # What is wrong is said before weights are read.
    check_budgets(args)
    for name in args.scheduler:
        scheduler_of(name)
    requests, load = load_of(args)
    from kvtier.hf.models.checkpoint.loading import model_of, quiet
    from kvtier.hf.models.positions import count_of_positions

    with quiet():
        read_config(args.measure, loaded=True)
        model = model_of(args.measure, args.dtype, args.device)
    most = max(x.prompt + x.output for x in requests)
    positions = count_of_positions(model)
    if positions is not None and most > positions:
        raise ConfigError(
            f"The longest request has {most:,} tokens, and the model was made for {positions:,}. {_shorter(args)}"
        )
    outcomes, facts = dict[str, Outcome](), dict[str, Any]()
    with _errors_alone():
        for name in args.scheduler:
            outcomes[name], facts = _served(args, model, name, requests)
    heading = [
        f"Measured: {args.measure} on {facts['device']}, {facts['dtype']}, {facts['runner']}; {len(requests)} "
        f"requests, {load}.",
        f"KV: {_room(facts)}.",
    ]
    return Found(heading, {"simulated": False, "load": load, "requests": len(requests)} | facts, outcomes)


@contextlib.contextmanager
def _errors_alone() -> Iterator[None]:
    """Without kvtier's warnings, which come between lines of progress."""
    log = logging.getLogger("kvtier")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _served(
    args: argparse.Namespace, model: Any, scheduler: str, requests: list[Request]
) -> tuple[Outcome, dict[str, Any]]:
    """By an engine of its own, with one scheduler; and what engine that was."""
    from kvtier.serving.engine import Engine
    from kvtier.serving.replay import replay
    from kvtier.serving.runners.runner import NO_LIMIT

    shown = sys.stderr.isatty()

    def progress(ended: int, count: int) -> None:
        if shown:
            print(f"\r\x1b[Kkvtier: {scheduler}: {ended} of {count} requests", end="", file=sys.stderr, flush=True)

    budgets = {"device_budget": args.device_budget, "host_budget": args.host_budget}
    options = {"max_batch_tokens": args.max_batch_tokens, "block_size": args.block_size, "preemption": args.preempt}
    waiting = 8 + len(requests)  # all of them may wait: none is refused
    with Engine(model, scheduler=scheduler_of(scheduler), max_waiting=waiting, **budgets, **options) as engine:
        try:
            outcome = replay(
                engine, requests, block_size=block_of(args), stateful=args.stateful, seed=args.seed, progress=progress
            )
        except BudgetError as error:
            raise ConfigError(f"{error} {_shorter(args)}") from error
        finally:
            if shown:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        facts = {
            "model": args.measure,
            "device": str(model.device),
            "dtype": str(model.dtype).removeprefix("torch."),
            "runner": engine.runner,
            "blocks": None if engine.load.total_blocks >= NO_LIMIT else engine.load.total_blocks,
            "block_size": args.block_size,
        }
    return outcome, facts


def _room(facts: dict[str, Any]) -> str:
    """What an engine has for keys and values."""
    if facts["blocks"] is None:
        return "a cache for each request"
    return f"{facts['blocks']:,} blocks of {facts['block_size']} tokens"


def _shorter(args: argparse.Namespace) -> str:
    """How a load comes to shorter requests."""
    if args.azure or args.mooncake:
        return "A smaller --length-scale makes requests shorter."
    return "A smaller --prompt or --output makes requests shorter."
