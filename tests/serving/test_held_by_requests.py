"""What requests hold of what is kept, and what conversations have of their turns."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
from workloads import by_generate, model_of

from kvtier import BudgetError, ClosedError, ConversationStore, Engine, TieredMemory
from kvtier.conversation.index import packed
from kvtier.conversation.kept.kept import Entry
from kvtier.planning.admission import Claim

HISTORY, OTHER = list(range(3, 43)), list(range(60, 90))


def kept(store: ConversationStore, ids: list[int]) -> Entry:
    """What a store keeps of tokens."""
    (found,) = [each for each in store._kept.entries.values() if each.ids.startswith(packed(ids[:16]))]
    return found


@pytest.mark.parametrize("how", ["cancelled", "preempted", "ended"])
def test_a_pinned_conversation_has_its_history_pinned_until_a_turn_has_ended(how: str) -> None:
    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        engine = Engine(model_of("llama"), store=store)
        first = engine.add_request(HISTORY, conversation="alice", max_new_tokens=4, do_sample=False)
        while engine.step():
            pass
        history = HISTORY + engine.output(first).generated_tokens
        chat = store.open("alice", pinned=True)
        assert kept(store, HISTORY).sequence.pinned == len(history) - 1
        name = engine.add_request(OTHER, conversation="alice", max_new_tokens=8, do_sample=False)
        engine.step()
        engine.step()
        requests = engine._requests
        if how == "cancelled":
            engine.cancel(name)
        elif how == "preempted":
            with requests.lock, requests.change:
                requests.preempt(requests.named[name].job)
        if how != "ended":
            assert (kept(store, HISTORY).sequence.pinned, kept(store, OTHER).sequence.pinned) == (len(history) - 1, 0)
        while engine.step():
            engine.check_integrity()
        if how == "cancelled":
            assert chat.ids == history
            assert (kept(store, HISTORY).sequence.pinned, kept(store, OTHER).sequence.pinned) == (len(history) - 1, 0)
        else:
            assert chat.ids == OTHER + engine.output(name).generated_tokens
            assert (kept(store, HISTORY).sequence.pinned, kept(store, OTHER).sequence.pinned) == (0, len(chat.ids) - 1)
        engine.close()


def swapped(engine: Engine) -> Any:
    """A request that waits, whose blocks are on the host until it goes on, and what holds them."""
    name = engine.add_request(HISTORY, max_new_tokens=4, do_sample=False)
    engine.step()
    requests = engine._requests
    with requests.lock, requests.change:
        requests.preempt(requests.named[name].job, "swap")
    ((request, entry),) = engine._prefixes._swapped.items()
    assert request.name == name
    assert entry.sequence.users
    return request, entry


def test_what_waits_on_the_host_for_a_request_is_held_no_longer_when_all_were_given_up() -> None:
    with ConversationStore(model_of("llama"), device_budget="2MiB", host_budget="8MiB", block_size=4) as store:
        engine = Engine(model_of("llama"), store=store, spill=False, preemption="swap")
        request, entry = swapped(engine)
        requests = engine._requests
        with requests.lock:
            requests.books.interrupted = True
            requests.give_up_all(RuntimeError("as told"))
        assert request.output.error is not None
        assert not engine.step()
        assert not entry.sequence.users
        engine.close()


def test_a_request_whose_blocks_are_corrupt_on_the_host_is_computed_again() -> None:
    right = by_generate("llama", tuple(HISTORY), 4)[0]
    memory = TieredMemory(device_budget="2MiB", host_budget="8MiB", audit="full")
    engine = Engine(model_of("llama"), memory=memory, block_size=4, spill=False, preemption="swap")
    request, entry = swapped(engine)
    with memory.lock:
        runs = [run for table in entry.sequence.tables.values() for run in table.resolve() if run.device is None]
        assert runs
        for run in runs:
            run.blocks.pools.host.bytes(run.host, run.count).fill_(1)
    while engine.step():
        pass
    assert request.output.error is None
    assert request.output.generated_tokens == right
    engine.check_integrity()
    engine.close()
    memory.close()


def test_what_a_step_claims_while_a_request_is_added_stays_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To see whether the request can ever fit, the memory is asked, which may let go of its lock."""
    engine = Engine(model_of("llama"), host_budget="8MiB", block_size=4)
    engine.generate_batch([HISTORY], max_new_tokens=2)
    memory, held = engine.memory, engine._runner.forward._held  # type: ignore[attr-defined]
    ((device, before),) = held.owner.claims.items()
    claim, admit = replace(before, held=before.held + 4096), memory._admission._admit

    def claims() -> None:
        with memory.lock, memory.change:
            held.owner.claims[device] = claim
            memory.readers.resume()

    def concedes() -> bool:
        monkeypatch.setattr(memory._admission, "_admit", admit)
        other.start()
        return True

    other = threading.Thread(target=claims)
    monkeypatch.setattr(memory._admission, "_admit", lambda *args, **kwargs: (device.home, 1))
    memory.conceding.append(concedes)
    engine.add_request(HISTORY, max_new_tokens=2)
    other.join(60)
    assert held.owner.claims == {device: claim}
    memory.conceding.remove(concedes)
    while engine.step():
        engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("how", ["request", "call"])
def test_what_was_claimed_before_a_refusal_is_not_claimed_behind_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is kept, more was continued when it was claimed last."""
    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        engine, parked, memory = Engine(store.model, store=store), store.kept.parked, store.memory
        engine.generate_batch([HISTORY], max_new_tokens=2)
        admit = memory.admit

        def refuses(owner: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
            return (device.home, 1) if owner is parked.owner else admit(owner, device, *args, **kwargs)

        monkeypatch.setattr(memory, "admit", refuses)
        parked.owner.claims = {memory.devices[0]: Claim(held=4096)}
        found = kept(store, HISTORY).sequence
        follow = engine._runner.forward.follow  # type: ignore[attr-defined]
        with store.caches.new() as cache, pytest.raises(BudgetError):
            follow(parked, found, 8) if how == "request" else cache._forward.follow(parked, [found], 8)
        monkeypatch.undo()
        assert parked.owner.claims == {}
        engine.close()


def test_a_turn_whose_conversation_cannot_go_on_ends_and_no_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("as told")

    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        monkeypatch.setattr(store.conversations, "went_on", fails)
        engine = Engine(model_of("llama"), store=store)
        name = engine.add_request(HISTORY, conversation="alice", max_new_tokens=4, do_sample=False)
        while engine.step():
            engine.check_integrity()
        assert engine.output(name).finish_reason == "length"
        assert str(engine.output(name).conversation_error) == "as told"
        assert store.open("alice").ids == HISTORY + engine.output(name).generated_tokens
        engine.close()


def test_a_turn_says_whether_its_conversation_was_forgotten_meanwhile() -> None:
    with ConversationStore(model_of("llama"), host_budget="8MiB", block_size=4) as store:
        engine = Engine(model_of("llama"), store=store)
        for forgets in (False, True):
            name = engine.add_request(
                HISTORY, request_id=f"{forgets}", conversation="alice", max_new_tokens=4, do_sample=False
            )
            engine.step()
            if forgets:
                store.forget("alice")
            while engine.step():
                pass
            output = engine.output(name)
            assert output.finish_reason == "length"
            assert output.error is None
            assert isinstance(output.conversation_error, ClosedError) == forgets
        assert "alice" not in store.names
        engine.close()
