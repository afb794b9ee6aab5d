"""The audit: bytes of host memory that are not those that were written reach no result.

Random caches are damaged at random: whatever is read then is an error, or what the cache held.
"""

from __future__ import annotations

import os
import random
from array import array
from typing import Literal

import pytest
import torch
import torch.nn.functional as F

from kvtier import ConfigError, CorruptionError, TieredKVCache, TieredMemory
from kvtier.config import AUDITS
from kvtier.cpu import loader
from kvtier.cpu.checksum import _in_torch, checksums
from kvtier.memory.blocks.audit import Audit, agree
from kvtier.memory.blocks.block import Run, State
from kvtier.tables.parked.sequences import ParkedSequences
from kvtier.testing import held, with_doubles

#: Damages of each kind of cache.
DAMAGES = int(os.environ.get("KVTIER_TEST_DAMAGES", "160"))
SEED = int(os.environ.get("KVTIER_TEST_SEED", "0"))
HEADS, DIM, SIZE = 2, 8, 4
BLOCK = 2 * HEADS * SIZE * DIM * 4
LAYERS = 2


# ------------------------------------------------------------------------------------ checksums


def sum_of(data: torch.Tensor, seed: int = 7) -> int:
    return checksums(data.data_ptr(), 1, data.numel(), seed)[0]


@pytest.mark.parametrize("nbytes", [8, 64, 4096 - 64, 4096, 4096 + 64, 3 * 4096 + 8])
def test_every_changed_word_changes_the_checksum(nbytes: int) -> None:
    random_bytes = torch.Generator().manual_seed(SEED + nbytes)
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=random_bytes)
    whole, draw = sum_of(data), random.Random(SEED)
    for _ in range(200):
        at, flip = draw.randrange(nbytes), draw.randrange(1, 256)
        data[at] ^= flip
        assert sum_of(data) != whole
        data[at] ^= flip
    assert sum_of(data) == whole != sum_of(data, 8)


@pytest.mark.parametrize("bit", range(64))
def test_one_bit_that_flips_in_two_words_changes_the_checksum(bit: int) -> None:
    """Products carry upwards: in a plain sum the flipped signs of two numbers would cancel."""
    words = torch.randint(-(2**62), 2**62, (1024,), generator=torch.Generator().manual_seed(SEED + bit))
    data, draw = words.view(torch.uint8), random.Random(SEED + bit)
    whole = sum_of(data)
    flip = (1 << bit) - (1 << 64 if bit == 63 else 0)
    for _ in range(40):
        pair = draw.sample(range(len(words)), 2)
        words[pair] ^= flip
        assert sum_of(data) != whole
        words[pair] ^= flip
    words ^= flip
    assert sum_of(data) != whole, "the sign of every second number"


@pytest.mark.parametrize("name", ["avx512_bf16", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("nbytes", [64, 192, 4096, 5 * 4096 + 320])
def test_every_instruction_set_and_torch_give_one_checksum(name: str, nbytes: int) -> None:
    if not loader.available():
        pytest.skip("there is no native library")
    before, data = loader.instruction_set(), torch.randint(0, 256, (3 * nbytes,), dtype=torch.uint8)
    try:
        loader.use_instruction_set(name)
    except ConfigError:
        pytest.skip(f"this CPU has no {name}")
    try:
        assert checksums(data.data_ptr(), 3, nbytes, 5) == _in_torch(data.data_ptr(), nbytes, 5, array("Q", bytes(24)))
    finally:
        loader.use_instruction_set(before)


def test_blocks_that_are_swapped_or_shifted_have_other_checksums() -> None:
    data = torch.randint(0, 256, (2, 3 * 4096), dtype=torch.uint8)
    whole = sum_of(data[0])
    assert sum_of(data[0].view(3, 4096)[[1, 0, 2]].flatten()) != whole
    assert sum_of(data[0].view(torch.int64).roll(1).view(torch.uint8)) != whole
    assert sum_of(data[0, :4096]) != whole


# -------------------------------------------------------------------------------------- a scene


class Scene:
    """A cache of two layers, and dense tensors of the same."""

    def __init__(self, seed: int, tiers: str, audit: Literal["off", "sampled", "full"]) -> None:
        self.draw = random.Random(seed)
        self.randoms = torch.Generator().manual_seed(seed)
        rows = self.draw.choice((1, 1, 2))
        budget = (
            None
            if tiers == "host"
            else self.draw.randrange(*((24, 30) if tiers == "fetched" else (14, 22))) * BLOCK * rows
        )
        attends = tiers != "fetched"
        self.memory = TieredMemory(device_budget=budget, host_budget="64MiB", audit=audit)
        if tiers == "held":
            with_doubles(self.memory, held(seed, 0.3))
        self.cache = TieredKVCache(memory=self.memory, block_size=SIZE, host_attention=attends)
        self.rows = rows
        self.misplaced: tuple[Run, int] | None = None
        self.pasts = [[torch.zeros(rows, HEADS, 0, DIM) for _ in range(2)] for _ in range(LAYERS)]
        for tokens in (self.draw.randrange(50, 70), 1, 1):
            self.step(tokens)

    def random(self, tokens: int) -> torch.Tensor:
        return torch.randn(self.rows, HEADS, tokens, DIM, generator=self.randoms)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def read(self) -> None:
        for layer in self.cache.layers:
            layer.dense("check")

    def step(self, tokens: int = 1) -> None:
        """A forward of the two; AssertionError where they differ."""
        for i, past in enumerate(self.pasts):
            new = [self.random(tokens) for _ in past]
            query = self.random(tokens)
            keys, values = self.cache.update(*new, i)
            whole = [torch.cat(pair, 2) for pair in zip(past, new, strict=True)]
            causal = tokens > 1 and past[0].shape[2] == 0
            out = F.scaled_dot_product_attention(query, keys, values, is_causal=causal)
            expected = F.scaled_dot_product_attention(query, *whole, is_causal=causal)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
            self.pasts[i] = whole
            past[:] = whole

    def on_host(self) -> list[Run]:
        """Runs whose bytes are read in host memory, or will be."""
        self.memory._drain()
        found = []
        for reader in self.cache._forward.readers.values():
            found += [run for run in reader.layer.runs() if run.state is State.HOST and run.sums is not None]
        return found

    def bytes_of(self, run: Run, index: int) -> torch.Tensor:
        assert run.host is not None
        return run.blocks.pools.host.bytes(run.host + index, 1)

    def put_back(self) -> None:
        """Undo a slot number that is wrong: who gives up slots must not give up another's."""
        if self.misplaced is not None:
            run, slot = self.misplaced
            for part in run.leaves():
                part.host = None if part.host is None else slot
                slot += part.count

    def damage(self) -> str:
        """Damage one block; "" where there is none."""
        runs = self.on_host()
        if not runs:
            return ""
        run = self.draw.choice(runs)
        index = self.draw.randrange(run.count)
        mine = self.bytes_of(run, index)
        kind = self.draw.choice(("flip", "flip", "stale", "overwritten", "moved", "layer", "layout"))
        other = self.draw.choice(runs)
        theirs = self.bytes_of(other, self.draw.randrange(other.count))
        if kind == "flip":
            mine[self.draw.randrange(len(mine))] ^= 1 << self.draw.randrange(8)
        elif kind == "stale":
            if torch.equal(mine, theirs):
                return ""
            mine.copy_(theirs.clone())
        elif kind == "overwritten":
            mine[: self.draw.randrange(1, len(mine))] = self.draw.randrange(256)
        elif kind in ("moved", "layer"):  # a slot number that is wrong: any other's, or a block's of the other layer
            if kind == "moved":
                slab = next(iter(run.blocks.pools.host.slabs))
                slot = slab.base + self.draw.randrange(max(slab.slots - run.count, 1))
            else:
                readers = list(self.cache._forward.readers.values())
                there = [x for x in readers[1 - run.blocks.layer].layer.runs() if x.state is State.HOST]
                slot = there[0].host if there and there[0].count >= run.count else run.host
            if slot == run.host:
                return ""
            self.misplaced = (run, run.host)
            run.host = slot
            run.blocks.changed()
        else:  # tokens and heads change places
            before = mine.clone()
            keys = mine.view(torch.float32).view(2, HEADS, SIZE, DIM)
            keys.copy_(keys.clone().view(2, SIZE, HEADS, DIM).transpose(1, 2))
            if torch.equal(before, mine):
                return ""
        return kind


@pytest.mark.parametrize("tiers", ["host", "attended", "fetched", "held"])
def test_under_a_full_audit_no_damaged_byte_reaches_a_result(tiers: str) -> None:
    done, seed, kinds = 0, SEED, set()
    while done < DAMAGES // 4:
        scene = Scene(seed, tiers, "full")
        seed += 1
        assert seed < SEED + 4 * DAMAGES + 40, "these scenes leave nothing on the host"
        with scene.cache:
            scene.steps(scene.draw.randrange(3))
            kind = scene.damage()
            if not kind:
                continue
            done += 1
            kinds.add(kind)
            try:
                with pytest.raises(CorruptionError):
                    scene.steps(6)
            except BaseException:
                print(f"seed {seed - 1}: {kind}")
                raise
            with pytest.raises(CorruptionError):
                scene.read()
            scene.put_back()
            scene.cache.reset()
            for past in scene.pasts:
                past[:] = [x[:, :, :0] for x in past]
            scene.step(9)  # without a prefill's mask of its own
            scene.step()
    assert DAMAGES < 100 or len(kinds) == 6, kinds


def test_what_is_sampled_is_found_within_as_many_calls_as_are_said() -> None:
    scene = Scene(SEED, "host", "sampled")
    with scene.cache:
        for run in scene.on_host():
            for i in range(run.count):
                scene.bytes_of(run, i)[0] ^= 1
        with pytest.raises(CorruptionError):
            scene.steps(AUDITS["sampled"] // LAYERS + 1)


@pytest.mark.parametrize("pattern", [(1,), (64,), (63, 2), (7, 130), (500,)])
def test_one_block_in_each_window_is_compared_and_every_place_has_its_turn(pattern: tuple[int, ...]) -> None:
    audit, moved, chosen, places = Audit(64), 0, list[int](), set()
    while moved < 64 * 2000:
        for count in pattern:
            found = audit._chosen(count)
            assert all(0 <= x < count for x in found)
            chosen += [moved + x for x in found]
            moved += count
    windows = [x // 64 for x in chosen]
    assert windows == list(range(moved // 64)) or windows == list(range(moved // 64 + 1))
    places = {x % 64 for x in chosen}
    assert len(places) == 64


def test_an_audit_that_is_off_compares_nothing() -> None:
    scene = Scene(SEED, "host", "off")
    with scene.cache:
        assert scene.memory.audit is None
        assert not scene.on_host()
        assert scene.cache.stats.audited_blocks == 0
    with pytest.raises(ConfigError, match="audit='always'"):
        TieredKVCache(audit="always")  # type: ignore[arg-type]
    with TieredMemory() as memory, pytest.raises(ConfigError, match="audit"):
        TieredKVCache(memory=memory, audit="full")


def test_what_was_compared_is_counted() -> None:
    scene = Scene(SEED, "host", "full")
    with scene.cache:
        before, blocks = scene.cache.stats.audited_blocks, sum(run.count for run in scene.on_host())
        scene.step()
        assert scene.cache.stats.audited_blocks - before == blocks
        assert scene.cache.stats.corrupt_blocks == 0
        run = scene.on_host()[0]
        scene.bytes_of(run, 0)[3] ^= 4
        with pytest.raises(CorruptionError):
            scene.step()
        assert scene.cache.stats.corrupt_blocks == 1


# ----------------------------------------------------------------------------- parked sequences


@pytest.fixture
def memory() -> TieredMemory:
    return TieredMemory(host_budget="64MiB", audit="full")  # never closed: what is in its tables is not theirs any more


def park(memory: TieredMemory, parked: ParkedSequences, tokens: int) -> tuple[TieredKVCache, torch.Tensor]:
    x = torch.randn(1, HEADS, tokens, DIM)
    with TieredKVCache(memory=memory, block_size=SIZE) as cache:
        for i in range(LAYERS):
            cache.update(x, x, i)
        return cache._forward.park(parked, 0, tokens), x  # type: ignore[return-value]


@pytest.mark.parametrize("where", ["sequences", "layers", "runs", "bytes", "nothing"])
def test_parked_tables_that_came_to_be_others_are_not_continued(memory: TieredMemory, where: str) -> None:
    parked = ParkedSequences(memory)
    one, _ = park(memory, parked, 3 * SIZE + 1)
    two, _ = park(memory, parked, 3 * SIZE + 1)
    if where == "sequences":
        one.tables[1], two.tables[1] = two.tables[1], one.tables[1]  # type: ignore[attr-defined]
    elif where == "layers":
        one.tables[0], one.tables[1] = one.tables[1], one.tables[0]  # type: ignore[attr-defined]
    elif where == "runs":
        a, b = one.tables[0], two.tables[0]  # type: ignore[attr-defined]
        a.runs, b.runs = b.runs, a.runs
    elif where == "bytes":
        run = one.tables[1].runs[0]  # type: ignore[attr-defined]
        run.blocks.pools.host.bytes(run.host, 1)[5] ^= 16
    with TieredKVCache(memory=memory, block_size=SIZE) as cache:
        cache._add_layers(LAYERS - 1)
        if where == "nothing":
            assert cache._forward.follow(parked, [one], 10**6) == 3 * SIZE + 1  # type: ignore[list-item]
            return
        with pytest.raises(CorruptionError):
            cache._forward.follow(parked, [one], 10**6)  # type: ignore[list-item]
        assert cache.get_seq_length() == 0


def test_blocks_that_are_known_to_be_corrupt_are_not_parked(memory: TieredMemory) -> None:
    parked = ParkedSequences(memory)
    x = torch.randn(1, HEADS, 5 * SIZE, DIM)
    with TieredKVCache(memory=memory, block_size=SIZE) as cache:
        for i in range(LAYERS):
            cache.update(x, x, i)
        run = next(iter(cache._forward.readers[1].layer.runs()))
        assert run.host is not None
        run.blocks.pools.host.bytes(run.host, 1)[5] ^= 16
        with pytest.raises(CorruptionError):
            cache.layers[1].dense("check")
        with pytest.raises(CorruptionError):
            cache._forward.park(parked, 0, 5 * SIZE)
        assert not parked.sequences


def test_checksums_agree_as_far_as_both_are_known() -> None:
    assert agree(array("Q", [1, 2, 3]), array("Q", [1, 0]))
    assert agree(array("Q"), array("Q", [1]))
    assert not agree(array("Q", [1, 2]), array("Q", [0, 3]))
