"""The simulated memory finds what it is for: a scheduler that is broken on purpose breaks a rule."""

from __future__ import annotations

import inspect

import pytest
from simulated import random_world

from kvtier.scheduling import scheduler as module
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.scheduler import Scheduler

BREAKS = {
    "a step has no end": ("free, budget = load.free_blocks, load.max_tokens", "free, budget = load.free_blocks, 99"),
    "blocks without end": ("free, budget = load.free_blocks,", "free, budget = load.free_blocks + 1,"),
    "a next token takes no block": ("free -= need\n            budget -= 1", "budget -= 1"),
    "prompts take no block": ("load.chunked else job.left\n", "load.chunked else job.left\n            free += 1\n"),
    "nobody gives way": ("while need > free and", "while False and"),
    "all give way": ("while need > free and", "while need >= free and"),
    "the first gives way": ("last := self._last(running, step, load)", "last := self._last(running[::-1], step, load)"),
    "whoever gives way runs": (
        "if job in step.preempt:\n                continue\n            step.tokens",
        "step.tokens",
    ),
    "prompts before next tokens": ("[job for job in running if job.left == 1]", "running[:0]"),
    "any number runs": ("count >= load.max_running or ", ""),
    "a prompt needs no room": ("_more(job, job.left, size) + count > free", "False"),
    "a prompt that runs needs no room": ("(need > free and count > 1)", "False"),
    "some come while others go": ("bool(step.preempt), 0", "False, 0"),
    "one that waits stops those that run": (
        "closed = True  # nobody behind it passes: else large ones would wait for ever\n                    continue",
        "break",
    ),
    "parts of whole prompts": ("min(job.left, budget) if load.chunked else job.left", "min(job.left, budget)"),
    "whole prompts, any number": ("or not prompts", "or True"),
    "whole prompts fit a step": ("tokens <= budget or not prompts", "tokens <= budget"),
}


def broken(old: str, new: str) -> type[Scheduler]:
    """Fair, with `old` replaced by `new` in the plan."""
    source = inspect.getsource(module)
    changed = source.replace(old, new)
    assert changed != source, f"no {old!r}: renew this mutation"
    names: dict[str, object] = {"__name__": module.__name__}
    exec(compile(changed, "<mutated>", "exec"), names)

    class Mutant(Fair):
        plan = names["Scheduler"].plan  # type: ignore[attr-defined]

    return Mutant


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_scheduler_breaks_a_rule(name: str) -> None:
    mutant = broken(*BREAKS[name])
    for seed in range(2000):
        try:
            random_world(seed, mutant())
        except AssertionError:
            return
    pytest.fail("nothing was noticed")
