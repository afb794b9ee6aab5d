"""A token in the middle of a step that decodes takes the short way; anything else takes the ordinary one."""

from __future__ import annotations

import inspect
import textwrap
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from kvtier import ConcurrentUseError, InterruptedStepError, TieredKVCache
from kvtier.cpu import native
from kvtier.forward.token import NextToken

pytestmark = pytest.mark.skipif(not native.available(), reason="tokens are written by the native library")

LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 8


def tokens(count: int = 1, rows: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, HEADS, count, DIM), torch.randn(rows, HEADS, count, DIM)


class Decoding:
    """A cache that has decoded, in the middle of a step: its first layer has the new token, the others have not."""

    def __init__(self, past: int = 10, **options: Any) -> None:
        self.cache = TieredKVCache(block_size=BLOCK, **options)
        for count in (past, 1, 1):
            for layer in range(LAYERS):
                self.cache.update(*tokens(count), layer)
        self.cache.update(*tokens(), 0)

    @property
    def steps(self) -> Any:
        return self.cache._forward.steps

    def token(self, layer: int = 1) -> NextToken:
        found = self.cache.layers[layer]._token
        assert found is not None
        return found

    def takes(self, keys: torch.Tensor | None = None, layer: int = 1) -> bool:
        """Whether a layer takes a token the short way."""
        new = tokens()
        before = self.cache.layers[layer].get_seq_length()
        taken = self.token(layer)(new[0] if keys is None else keys, new[1])
        assert self.cache.layers[layer].get_seq_length() == before + taken
        return taken


def test_it_takes_a_token_and_what_is_held_is_what_was_given() -> None:
    torch.manual_seed(1)
    cache, given = TieredKVCache(block_size=BLOCK), [torch.empty(2, HEADS, 0, DIM)] * LAYERS
    taken = []
    call = NextToken.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NextToken, "__call__", lambda *args: taken.append(call(*args)) or taken[-1])
        for count in (5, *[1] * 30):
            for layer in range(LAYERS):
                keys, values = tokens(count, rows=2)
                given[layer] = torch.cat([given[layer], keys], 2)
                cache.update(keys, values, layer)
    for layer in range(LAYERS):
        assert torch.equal(cache.layers[layer].keys.clone(), given[layer])
    cache.check_integrity()
    assert cache.stats.steps == 31
    # Tokens 2 to 6 of each block, but for the first layer's, in which the step begins.
    assert sum(taken) == sum(2 <= length % BLOCK < BLOCK - 1 for length in range(7, 35)) * (LAYERS - 1)


def cropped(at: Decoding) -> bool:
    at.steps.end()
    return at.takes()


def updated_twice(at: Decoding) -> bool:
    at.cache.update(*tokens(), 1)
    return at.takes()


def last_of_a_block(at: Decoding) -> bool:
    while (at.cache.layers[1].get_seq_length() + 1) % BLOCK:
        for layer in (1, 2, 0):
            at.cache.update(*tokens(), layer)
    return at.takes()


def not_decoding(at: Decoding) -> bool:
    at.cache.update(*tokens(), 1)
    at.cache.update(*tokens(), 2)
    at.cache.update(*tokens(2), 0)
    return at.takes()


def begun_by_a_state(at: Decoding) -> bool:
    for layer in (1, 2):
        at.cache.update(*tokens(), layer)
    at.steps._first.clear()
    at.steps.touch((0, "conv", 0))
    at.steps.touch((0, "conv", 0))
    return at.takes()


def looked_at(at: Decoding) -> bool:
    at.steps.pending = lambda: None
    return at.takes()


def torn(at: Decoding) -> bool:
    at.steps.tear()
    return at.takes()


def replaced(at: Decoding) -> bool:
    old = at.token()
    at.cache._forward.readers[1] = at.cache._forward.readers[2]
    return old(*tokens())


def with_graph(at: Decoding) -> bool:
    with torch.enable_grad():
        return at.takes(tokens()[0].requires_grad_())


def with_a_tangent(at: Decoding) -> bool:
    with forward_ad.dual_level():
        return at.takes(forward_ad.make_dual(tokens()[0], tokens()[0]))


def moved(at: Decoding) -> bool:
    at.cache._forward.readers[1].layer.blocks.version += 1
    return at.takes()


def of_another_thread(at: Decoding) -> bool:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(at.takes()))
    thread.start()
    thread.join()
    return found[0]


def in_use(at: Decoding) -> bool:
    at.steps.guard.holder[0] = [-1]
    try:
        return at.takes()
    finally:
        at.steps.guard.holder.clear()


def cut_short(at: Decoding) -> bool:
    at.steps.break_off()
    return at.takes()


def with_garbage(at: Decoding) -> bool:
    at.cache._forward.memory.recovery.interrupted = True
    return at.takes()


CHANGES: dict[str, tuple[Callable[[Decoding], bool], str]] = {
    "cropped": (cropped, "or not began"),
    "updated twice": (updated_twice, "or index in began"),
    "the last of a block": (last_of_a_block, "or not 0 < offset < self._block_size - 1"),
    "not decoding": (not_decoding, "or not forward._decoding"),
    "begun by a state": (begun_by_a_state, "or forward._step != steps.count"),
    "to be looked at": (looked_at, "or steps.pending is not None"),
    "torn": (torn, "or steps._torn"),
    "replaced": (replaced, "or forward.readers.get(index) is not self.reader"),
    "with a graph": (with_graph, "or keys.requires_grad"),
    "with a tangent": (with_a_tangent, "or level._current_level >= 0"),
    "moved": (moved, ""),
    "of another thread": (of_another_thread, "steps.owner != me[0] or"),
    "in use": (in_use, "or holder.setdefault(0, me) is not me"),
    "cut short": (cut_short, "if guard.broken:"),
    "with garbage": (with_garbage, "and not memory.recovery.has_garbage"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_anything_else_takes_the_ordinary_way(change: str) -> None:
    at = Decoding()
    assert at.takes(layer=2), "the short way is not taken at all"
    assert not CHANGES[change][0](Decoding())


@pytest.mark.parametrize("change", [name for name, (_, condition) in CHANGES.items() if condition])
def test_each_condition_is_needed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    act, condition = CHANGES[change]
    source = textwrap.dedent(inspect.getsource(NextToken.__call__))
    assert condition in source, "the condition is no longer there: renew this test"
    instead = "if False:" if condition.startswith("if ") else ""
    names: dict[str, Any] = {}
    code = "from __future__ import annotations\n" + source.replace(condition, instead)
    exec(compile(code, "<without a condition>", "exec"), NextToken.__call__.__globals__, names)
    monkeypatch.setattr(NextToken, "__call__", names["__call__"])
    assert act(Decoding()), "nothing depends on the condition"


def test_an_interrupt_leaves_a_cache_that_says_so() -> None:
    at = Decoding()
    token = at.token()
    token._layer._tails.last.repeat  # noqa: B018 - it is what is cut short

    class Cut:
        def repeat(self, *args: object) -> bool:
            raise KeyboardInterrupt

    token._layer._tails.last = Cut()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        at.cache.update(*tokens(), 1)
    with pytest.raises(InterruptedStepError):
        at.cache.update(*tokens(), 1)
    at.cache.reset()
    at.cache.update(*tokens(), 0)
    at.cache.check_integrity()


def test_another_thread_in_the_middle_of_a_step_is_refused_before_it_changes_anything() -> None:
    at, found = Decoding(), []

    def other() -> None:
        try:
            at.cache.update(*tokens(), 1)
        except ConcurrentUseError as error:
            found.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found
    assert at.cache.layers[1].get_seq_length() == 12
    at.cache.update(*tokens(), 1)
    at.cache.update(*tokens(), 2)
    at.cache.check_integrity()
