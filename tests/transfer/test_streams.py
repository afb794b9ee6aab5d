"""Who uses a cache may set another stream at any time, and threads of one memory may have a stream each: what is done
on a device is one sequence all the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conversations import SLOT, Conversation, Patch, edit, through_tables
from stream_model import COMPUTE, StreamModel
from transformers import LlamaConfig, LlamaForCausalLM

from kvtier import ConversationStore, Engine, Policy, TieredMemory
from kvtier.conversation.saved.archive import Archive
from kvtier.conversation.saved.tail import Tail
from kvtier.conversation.saved.wake import Waker
from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.memory.tiered import TieredMemory as Memory
from kvtier.memory.tiers.tier import DeviceTier
from kvtier.stats import Counters
from kvtier.testing import with_doubles
from kvtier.transfer.copies import TensorCopy
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction

OTHER = "other"
STEPS = 24
#: Ways in which streams would not be followed, and who races then.
LOST: dict[str, Callable[[Patch], None]] = {
    "the wait for the last stream": edit(
        CudaTransfers, "follow", "stream.wait_event(self._recorded(last).recorded)", "pass"
    ),
    "before blocks are read or changed": edit(Memory, "follow", "device.engine.follow()", "pass"),
}


def talks(model: StreamModel, seed: int, *, host_attention: bool, shared: bool) -> list[Conversation]:
    """One conversation with a memory of its own, or two that share one."""
    if not shared:
        return [Conversation(model, seed, host_attention=host_attention, poison=seed == 0)]
    slots = 48 if host_attention and native.available() else 150
    memory = TieredMemory(device_budget=slots * SLOT, host_budget=400 * SLOT, policy=Policy(write_through=0.5, ahead=2))
    with_doubles(memory, model.engine, poison=seed == 0)
    return [Conversation(model, seed + i, host_attention=host_attention, memory=memory) for i in range(2)]


def play(seed: int, *, host_attention: bool, shared: bool, to_the_end: bool = False) -> StreamModel:
    """Steps on two streams: of one conversation on either by turns, of two on one each. Until something races, or to
    the end."""
    with Patch.context() as patch:
        through_tables(patch)
        with StreamModel(seed, patch, eagerness=0.05, strict=False, streams=True) as model:
            other, found = model.stream(OTHER), talks(model, seed, host_attention=host_attention, shared=shared)
            for number in range(STEPS):
                talk = found[number % len(found)]
                turn = number % 2 if shared else talk.random.randrange(2)
                with model.using(other if turn else model.compute):
                    talk.step()
                if model.races and not to_the_end:
                    break
            for talk in found:
                talk.cache.check_integrity()
                memory = talk.cache._forward.memory
                talk.cache.close()
            memory.close()
    return model


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("host_attention", [False, True])
@torch.no_grad()
def test_streams_that_change_come_one_behind_the_other(host_attention: bool, shared: bool) -> None:
    for seed in range(2):
        model = play(seed, host_attention=host_attention, shared=shared)
        assert not model.races, model.races[0]
        assert {f"{COMPUTE} reads", f"{OTHER} reads", f"{COMPUTE} writes", f"{OTHER} writes"} <= model.accesses.keys()


@pytest.mark.parametrize("lost", LOST)
@torch.no_grad()
def test_where_a_stream_is_not_followed_something_races(lost: str, monkeypatch: Patch) -> None:
    LOST[lost](monkeypatch)
    assert any(
        play(seed, host_attention=host, shared=shared).races
        for seed in range(4)
        for shared in (False, True)
        for host in (True, False)
    )


@pytest.mark.parametrize("lost", [False, True])
def test_an_event_is_behind_what_threads_on_other_streams_have_read_meanwhile(lost: bool, monkeypatch: Patch) -> None:
    """Two attention calls that begin one after the other, and launch in either order: the last event is behind both."""
    if lost:
        edit(CudaTransfers, "mark", "self.follow()", "pass")(monkeypatch)
    with StreamModel(0, monkeypatch, strict=False, streams=True) as model:
        device, host, other = torch.zeros(8), torch.ones(8), model.stream(OTHER)
        model.watch(host, "host buffer")
        engine = model.engine(torch.device("cpu"))
        engine.follow()
        with model.using(other):
            engine.follow()
        device.sum()
        engine.mark()
        with model.using(other):
            device.sum()
            last = engine.mark()
            engine.submit([TensorCopy(host, device)], Direction.FETCH, Counters(), behind=[last])
        engine.close()
    assert (("compute reads", "fetch writes") in model.pairs) == lost


@pytest.mark.parametrize("lost", [False, True])
@torch.no_grad()
def test_memory_of_one_stream_goes_back_when_the_other_has_read_it(lost: bool, monkeypatch: Patch) -> None:
    """A cache is filled on one stream, read on another, and closed: torch has the memory on the first one again."""
    if lost:
        edit(DeviceTier, "__init__", "gives_back=engine.give_back", "")(monkeypatch)
    through_tables(monkeypatch)
    with StreamModel(0, monkeypatch, eagerness=0.0, strict=False, streams=True) as model:
        talk = Conversation(model, 0, host_attention=True)
        talk.forward(8)
        with model.using(model.stream(OTHER)):
            talk.forward(1)
            talk.cache.close()
    assert (("other reads", "compute writes") in model.pairs) == lost
    assert lost or not model.races


@torch.no_grad()
def test_what_is_kept_on_a_device_is_made_again_on_another_stream(monkeypatch: Patch) -> None:
    """Torch hands the memory of tables on in the order of the stream that they were made on."""
    through_tables(monkeypatch)
    with StreamModel(0, monkeypatch, streams=True) as model:
        talk = Conversation(model, 0, host_attention=True)
        reader_of = talk.cache._forward.readers
        talk.forward(5)
        talk.forward(1)
        before = reader_of[0]._partition, reader_of[0].layer._tails
        talk.forward(1)
        assert before == (reader_of[0]._partition, reader_of[0].layer._tails)
        with model.using(model.stream(OTHER)):
            talk.forward(1)
            assert reader_of[0]._partition.device is not before[0].device  # type: ignore[union-attr]
            assert reader_of[0].layer._tails is not before[1]
            talk.cache.close()


@pytest.mark.parametrize("lost", [False, True])
@torch.no_grad()
def test_the_buffer_of_queries_is_written_when_the_last_result_is_read(lost: bool, monkeypatch: Patch) -> None:
    """Calls of one cache on streams by turns: the next query comes down behind the copy of the last result."""
    if not native.available():
        pytest.skip("the native library is not compiled")
    if lost:
        LOST["the wait for the last stream"](monkeypatch)
    pairs = set[tuple[str, str]]()
    for seed in range(3):
        pairs |= play(seed, host_attention=True, shared=False, to_the_end=True).pairs
        if ("result reads", "query writes") in pairs:
            break
    assert (("result reads", "query writes") in pairs) == lost


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("lost", [False, True])
@torch.no_grad()
def test_requests_steps_calls_and_saves_may_be_on_streams_of_their_own(
    lost: bool, monkeypatch: Patch, tmp_path: Path
) -> None:
    """As threads of a store, an engine and their user are, of whom one sets a stream."""
    if lost:
        LOST["the wait for the last stream"](monkeypatch)
    for each in (Archive, Tail, Waker):
        monkeypatch.setattr(each, "background", False)
    through_tables(monkeypatch)
    options = {"do_sample": False, "max_new_tokens": 4}
    with StreamModel(0, monkeypatch, eagerness=0.05, strict=False, streams=True) as model:
        user, saver = model.stream(OTHER), model.stream("saver")
        memory = TieredMemory(device_budget="48KiB", host_budget="4MiB", policy=Policy(write_through=0.5))
        with_doubles(memory, model.engine, poison=False)
        store = ConversationStore(llama(), memory=memory, directory=tmp_path, block_size=4)
        engine = Engine(store.model, store=store, max_batch_tokens=16)
        names, shared = list[str](), [7 * i % 60 + 1 for i in range(9)]
        for turn in range(4):
            with model.using(user):
                names.append(engine.add_request([*shared, *[turn + 1] * turn], **options))
            for _ in range(3):
                engine.step()
            with model.using(saver):
                store.flush()
            with model.using(user):
                store.generate(torch.tensor([[*shared, turn + 10]]), pad_token_id=0, **options)
            if model.races:
                break
        while not lost and engine.step():
            pass
        errors = [engine.output(name).error for name in names]
        for each in (engine, store, memory):
            each.close()
    assert bool(model.races) == lost
    assert lost or errors == [None] * 4
    # A first race may come before anything is saved.
    assert lost or model.accesses.keys() >= {"compute writes", "saver reads", "other reads", "other writes"}


@torch.no_grad()
def test_in_a_process_that_was_forked_no_device_is_asked_for_its_stream(monkeypatch: Patch) -> None:
    """CUDA refuses that there. What needs no device, such as statistics, is there all the same."""
    with StreamModel(0, monkeypatch, streams=True) as model:
        talk = Conversation(model, 0, host_attention=False)
        talk.forward(8)
        memory, blocks = talk.cache._forward.memory, talk.cache.stats.device.used_blocks
        with Patch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda device: 1 / 0)
            patch.setattr(launch, "stream_number", lambda device: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                assert talk.cache.stats
            memory.forked()
            assert talk.cache.stats.device.used_blocks == blocks
        talk.cache.close()
