"""A step that raises at any point: no wrong token, nothing lost, and who did not fail goes on.

KVTIER_TEST_WORKLOADS=100 tries every point, and not one of several.
"""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from workloads import by_generate, model_of

from kvtier import ConversationStore, Engine, TransferError
from kvtier.forward.packed import PackedForward
from kvtier.memory.access.change import ask
from kvtier.serving.steps.step import StepRunner

TIMES = int(os.environ.get("KVTIER_TEST_WORKLOADS", "1"))
NEW = 4
HEAD = tuple(range(3, 73))
PROMPTS = [(5, 6, 7), (*HEAD, 80, 81), (*HEAD, 82), tuple(range(90, 110))]


class Counting:
    """Raises at one of the points that are passed, by number; 0: at none.

    Attributes:
        left: points until then.
        raised: whether it has.
    """

    def __init__(self, left: int) -> None:
        self.left = left
        self.raised = False

    def passed(self, error: type[Exception]) -> None:
        """A point."""
        self.left -= 1
        if not self.left:
            self.raised = True
            ask(self._raise, error)

    @staticmethod
    def _raise(error: type[Exception]) -> None:
        raise error("as told")


class NoRoom(TorchDispatchMode):
    """What torch computes has no room where a count says so."""

    def __init__(self, count: Counting) -> None:
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count.passed(torch.OutOfMemoryError)
        return func(*args, **(kwargs or {}))


def computes(engine: Engine, error: type[Exception] | tuple[type[Exception], ...], steps: int = 400) -> int:
    """Let it compute until there is nothing to do. How many steps have raised."""
    raised = 0
    for _ in range(steps):
        try:
            if not engine.step():
                return raised
        except error:
            raised += 1
    raise AssertionError("it never ends")


def check(engine: Engine, name: str, prompts: list[tuple[int, ...]], names: list[str]) -> int:
    """All have ended, with the tokens of `generate` or an error. How many with an error."""
    outputs = [engine.output(each) for each in names]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.is_finished()
        if output.error is None:
            assert output.generated_tokens == by_generate(name, prompt, NEW)[0]
            assert output.logprobs is None or len(output.logprobs) == len(output.top_logprobs or ()) == NEW
    engine.check_integrity()
    assert engine.runner == "single" or not engine._runner.forward.sequences, "nobody gives them up"  # type: ignore
    return sum(x.error is not None for x in outputs)


def until_none_raises(step: int) -> Iterator[Counting]:
    """A count for no point, and then for one of so many in turn."""
    step = max(step // TIMES, 1)
    for left in itertools.count(0, step):
        count = Counting(left)
        yield count
        if left and not count.raised:
            assert left > step, "there is no point"
            return


@pytest.mark.parametrize(("name", "step"), [("llama", 3), ("qwen3_next", 19), ("falcon", 17)])
def test_a_choice_that_has_no_room_ends_its_own_request_and_gives_no_other_its_token(
    name: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver = StepRunner._deliver
    prompts = [PROMPTS[0], PROMPTS[3]]
    sampled: list[list[int]] = []
    for count in until_none_raises(step):

        def within(*args: Any, mode: NoRoom) -> None:
            with mode:
                deliver(*args)

        monkeypatch.setattr(StepRunner, "_deliver", functools.partialmethod(within, mode=NoRoom(count)))
        engine = Engine(model_of(name), host_budget="8MiB", block_size=4)
        names = [
            engine.add_request(list(p), max_new_tokens=NEW, do_sample=False, top_logprobs=2 * i)
            for i, p in enumerate(prompts)
        ]
        drawn = engine.add_request(list(prompts[0]), max_new_tokens=2, do_sample=True, seed=3, num_return_sequences=2)
        samples = [drawn, f"{drawn}#1"]
        assert not computes(engine, torch.OutOfMemoryError)
        failed = check(engine, name, prompts, names)
        outputs = [engine.output(each) for each in samples]
        if not sampled:
            sampled = [x.generated_tokens for x in outputs]
        for output, tokens in zip(outputs, sampled, strict=True):
            assert output.error is not None or output.generated_tokens == tokens
        failed += sum(x.error is not None for x in outputs)
        assert failed <= 1
        engine.close()


#: What a step calls, by where an engine has it.
CALLED = {
    "_runner": ("add", "fork", "remove", "forwards", "took", "step", "blocks", "held", "cached"),
    "_prefixes": (
        *("watch", "comes", "hold_back", "waits", "part", "begin", "computed", "keep", "there"),
        *("swap", "_go_on", "_hold", "_let_go"),
    ),
    "_prefixes._kept": ("find", "add", "use"),
    "_requests.shares": ("serve",),
    "_steps._scheduler": ("plan",),
    "_costs": ("observe",),
}


#: Of these, what makes a sequence, or nothing.
MAKES = ("add", "fork", "_go_on")


def with_points(engine: Engine, count: Counting) -> None:
    """Every call of a step's is two points: it fails, or its caller does as soon as it is done."""

    def called(call: Callable[..., Any], makes: bool, *args: Any, **kwargs: Any) -> Any:
        count.passed(TransferError)
        found = call(*args, **kwargs)
        if not makes:
            count.passed(TransferError)
        return found

    for place, names in CALLED.items():
        part: Any = functools.reduce(getattr, place.split("."), engine)
        for name in names:
            setattr(part, name, functools.partial(called, getattr(part, name), name in MAKES))


@pytest.mark.parametrize(
    ("name", "step", "options"),
    [
        ("llama", 31, {"host_budget": "8MiB"}),
        ("llama", 31, {"host_budget": "8MiB", "device_budget": 60000, "spill": False, "preemption": "swap"}),
        ("qwen3_next", 61, {"host_budget": "8MiB"}),
    ],
)
def test_wherever_a_step_raises_every_request_has_its_tokens_or_an_error(
    name: str, step: int, options: dict[str, Any]
) -> None:
    for count in until_none_raises(step):
        engine = Engine(model_of(name), block_size=4, max_batch_tokens=48, **options)
        names = [engine.add_request(list(p), max_new_tokens=NEW, do_sample=False) for p in PROMPTS]
        with_points(engine, count)
        raised = computes(engine, (TransferError, AssertionError))
        failed = check(engine, name, PROMPTS, names)
        assert raised + failed <= 1
        engine.close()
        assert engine.memory.closed


def test_what_fails_as_it_is_added_is_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(model_of("llama"), host_budget="8MiB", block_size=4)
    count = Counting(1)
    comes = engine._prefixes.comes
    monkeypatch.setattr(engine._prefixes, "comes", lambda *args: count.passed(OSError) or comes(*args))
    with pytest.raises(OSError, match="as told"):
        engine.add_request([5, 6, 7], request_id="a", max_new_tokens=NEW)
    assert not engine.step()
    assert engine.add_request([5, 6, 7], request_id="a", max_new_tokens=NEW) == "a"
    assert not computes(engine, OSError)
    assert engine.output("a").finish_reason == "length"
    engine.close()


def test_a_criterion_that_fails_behind_a_step_that_did_ends_its_own_request() -> None:
    fails = list[BaseException]()

    def ends(ids: Any, scores: Any) -> bool:
        if fails:
            raise fails.pop(0)
        return False

    engine = Engine(model_of("llama"), host_budget="8MiB", block_size=4)
    bad = engine.add_request([5, 6, 8], max_new_tokens=NEW, stopping_criteria=[ends])
    name = engine.add_request(list(PROMPTS[0]), max_new_tokens=NEW, do_sample=False)
    engine.step()
    fails += [KeyboardInterrupt(), ValueError("a criterion fails")]  # the second one as it is asked again
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert not computes(engine, TransferError)
    assert isinstance(engine.output(bad).error, ValueError)
    assert not check(engine, "llama", PROMPTS[:1], [name])
    engine.close()


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("which", ["logits_processor", "stopping_criteria"])
def test_an_interrupt_in_what_a_request_brings_lets_nobody_else_be_asked_again(which: str, first: bool) -> None:
    seen: dict[str, list[int]] = {"logits_processor": [], "stopping_criteria": []}

    def sees(ids: torch.Tensor, scores: Any) -> Any:
        seen["stopping_criteria" if scores is None else "logits_processor"].append(ids.shape[1])
        return False if scores is None else scores

    def interrupts(ids: torch.Tensor, scores: Any) -> Any:
        if ids.shape[1] == 5 and left:
            left.pop()
            raise KeyboardInterrupt
        return False if scores is None else scores

    left = [1]
    engine = Engine(model_of("llama"), host_budget="8MiB", block_size=4)
    asked: list[dict[str, Any]] = [{which: [interrupts]}, {each: [sees] for each in seen}]
    names = [
        engine.add_request(list(PROMPTS[0]), max_new_tokens=NEW, do_sample=False, **each)
        for each in (asked if first else asked[::-1])
    ]
    with pytest.raises(KeyboardInterrupt):
        computes(engine, TransferError)
    assert not computes(engine, TransferError)
    assert not check(engine, "llama", PROMPTS[:1] * 2, names)
    assert seen == {"logits_processor": [3, 4, 5, 6], "stopping_criteria": [4, 5, 6, 7]}
    engine.close()


def test_behind_an_interrupt_requests_begin_with_what_their_store_keeps() -> None:
    """All layers were given back, and what is kept is in layers of the store's."""
    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        engine = Engine(model_of("llama"), store=store)
        for cached in (0, len(PROMPTS[0]) - 1):
            name = engine.add_request(list(PROMPTS[0]), max_new_tokens=NEW, do_sample=False)
            while engine.step():
                engine.check_integrity()
            assert not check(engine, "llama", PROMPTS[:1], [name])
            assert engine.output(name).cached_tokens == cached
            engine._requests.books.interrupted = True
        engine.close()
        store.check_integrity()


@pytest.mark.parametrize("behind", [True, False])
def test_an_interrupt_while_layers_are_made_for_what_is_kept_is_no_other_error(
    behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PackedForward._empty_layer

    def cut_short(self: PackedForward, *args: Any) -> Any:
        monkeypatch.undo()
        if behind:
            make(self, *args)
        raise KeyboardInterrupt

    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        engine = Engine(model_of("llama"), store=store)
        names = [engine.add_request(list(PROMPTS[0]), max_new_tokens=NEW, do_sample=False)]
        while engine.step():
            pass
        engine._requests.books.interrupted = True
        names.append(engine.add_request(list(PROMPTS[0]), max_new_tokens=NEW, do_sample=False))
        monkeypatch.setattr(PackedForward, "_empty_layer", cut_short)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        while engine.step():
            engine.check_integrity()
        assert not check(engine, "llama", PROMPTS[:1] * 2, names)
        engine.close()
        store.check_integrity()
