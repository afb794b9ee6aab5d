"""The simulated memory finds what it is for: a scheduler that is broken on purpose breaks a rule."""

from __future__ import annotations

import inspect

import pytest
from simulated import random_world

from kvtier.scheduling import scheduler as module
from kvtier.scheduling.fair import Fair
from kvtier.scheduling.scheduler import Scheduler

BREAKS = {
    "a step has no end": ("self.budget = load.max_tokens", "self.budget = 99"),
    "blocks without end": ("self.free = load.free_blocks", "self.free = load.free_blocks + 1"),
    "a next token takes no block": ("self._compute(job, 1, need)", "self._compute(job, 1, 0)"),
    "prompts take no block": ("self._compute(job, tokens, need)", "self._compute(job, tokens, 0)"),
    "nobody gives way": ("while need > self.free and", "while False and"),
    "all give way": ("while need > self.free and", "while need >= self.free and"),
    "the first gives way": ("in reversed(self._running)", "in self._running"),
    "whoever gives way runs": ("return False\n        return True", "return True\n        return True"),
    "prompts before next tokens": ("if job.left != 1 or", "if True or"),
    "any number runs": ("count >= load.max_running or ", ""),
    "a prompt needs no room": ("need + count + kept > self.free", "False"),
    "a prompt takes the room of another": ("need + count + kept > self.free", "need + count > self.free"),
    "a prompt that runs needs no room": ("(need > self.free and count > 1)", "False"),
    "some come while others go": ("closed, first = bool(step.preempt), True", "closed, first = False, True"),
    "one that waits stops those that run": (
        "if closed:\n                    continue",
        "if closed:\n                    break",
    ),
    "parts of whole prompts": (
        "min(job.left, self.budget) if load.chunked else job.left",
        "min(job.left, self.budget)",
    ),
    "whole prompts, any number": ("or first\n", "or True\n"),
    "whole prompts fit a step": ("tokens <= self.budget or first", "tokens <= self.budget"),
}


def broken(old: str, new: str) -> type[Scheduler]:
    """Fair, with `old` replaced by `new` in what makes the plan."""
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
