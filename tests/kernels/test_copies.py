"""Copies by address against the plainest models of them; all other bytes stay what they are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from paged_problems import GAP

from kvtier.errors import MismatchError
from kvtier.kernels import copies, tables
from kvtier.kernels.tables import AddressTable
from kvtier.memory.storage.layout import BlockLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
FILL = 0xA5


class Area:
    """Blocks of a layout in random order, with a guard between them."""

    def __init__(self, layout: BlockLayout, blocks: int, device: torch.device, seed: int) -> None:
        self.layout, self.device = layout, device
        step = layout.nbytes + GAP
        self.memory = torch.randint(0, 127, (blocks * step + GAP,), dtype=torch.uint8, device=device)
        self.offsets = [i * step + GAP for i in range(blocks)]
        random.Random(seed).shuffle(self.offsets)
        self.addresses = [self.memory.data_ptr() + offset for offset in self.offsets]

    def split(self, memory: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys `[heads, block_size, dim]` and values of a block in a copy of the memory."""
        offset = self.offsets[block]
        k, v = self.layout.split(memory[offset : offset + self.layout.nbytes])
        return k[0], v[0]


def layouts() -> list[BlockLayout]:
    made = []
    for number, dtype in enumerate(DTYPES * 2):
        r = random.Random(number)
        k_heads = r.choice((1, 2, 3))
        v_heads = k_heads if number % 3 else r.choice((1, 2, 4))
        k_dim = r.choice((1, 8, 17, 64, 80))
        v_dim = k_dim if number % 2 else r.choice((5, 16, 96))
        made.append(BlockLayout(k_heads, v_heads, k_dim, v_dim, r.choice((1, 3, 16, 24)), dtype))
    return made


def dense(layout: BlockLayout, rows: int, tokens: int, device: torch.device, spread: bool) -> list[torch.Tensor]:
    """Random keys and values `[rows, heads, tokens, dim]`, of any bits; slices of something larger if `spread`."""
    found = []
    for heads, dim in ((layout.k_heads, layout.k_dim), (layout.v_heads, layout.v_dim)):
        shape = (rows, tokens + 2, heads, dim + 3) if spread else (rows, tokens, heads, dim)
        x = torch.randint(0, 127, (*shape[:-1], shape[-1] * layout.dtype.itemsize), dtype=torch.uint8, device=device)
        x = x.view(layout.dtype)
        found.append((x[:, 1:-1, :, 2:-1] if spread else x).transpose(1, 2))
    return found


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x.dtype}-{x.k_dim}-{x.v_dim}-{x.block_size}")
@pytest.mark.parametrize("module", [copies, tables], ids=["triton", "torch"])
def test_new_tokens_are_written_into_their_blocks_and_nowhere_else(
    module: Any, layout: BlockLayout, device: torch.device
) -> None:
    size = layout.block_size
    for number, tokens in enumerate((1, 2, size, size + 1, 2 * size + 1, 19)):
        r = random.Random(number)
        rows, width = 3, -(-(tokens + size - 1) // size)
        area = Area(layout, rows * width, device, number)
        starts = [r.randrange(size) for _ in range(rows)] if number % 2 else [r.randrange(size)] * rows
        table = torch.tensor(area.addresses, dtype=torch.int64).view(rows, width)
        table[1] = 0 if number % 3 == 0 else table[1]  # a row whose blocks another row writes
        keys, values = dense(layout, rows, tokens, device, spread=number % 2 == 1)
        right = area.memory.clone()
        for row in range(rows):
            for token in range(tokens):
                block, inner = divmod(starts[row] + token, size)
                if table[row, block]:
                    k, v = area.split(right, row * width + block)
                    k[:, inner], v[:, inner] = keys[row, :, token], values[row, :, token]
        told = torch.tensor(starts, device=device) if number % 2 else starts[0]
        module.append(keys, values, table.to(device), layout, told)
        assert torch.equal(area.memory, right), (tokens, starts)


def packed_into(
    area: Area, table: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, counts: list[int], starts: list[int]
) -> torch.Tensor:
    """The area's memory with the tokens of each row written, one by one; block `[row, i]` is number row * width + i."""
    right, done, size, width = area.memory.clone(), 0, area.layout.block_size, table.shape[1]
    for row, count in enumerate(counts):
        for token in range(count):
            block, inner = divmod(starts[row] + token, size)
            if table[row, block]:
                k, v = area.split(right, row * width + block)
                k[:, inner], v[:, inner] = keys[done + token], values[done + token]
        done += count
    return right


@pytest.mark.parametrize("size", [1, 16, 19])
@pytest.mark.parametrize("module", [copies, tables], ids=["triton", "torch"])
def test_rows_with_their_own_numbers_of_tokens_are_written_where_they_belong(
    module: Any, size: int, device: torch.device
) -> None:
    for number, counts in enumerate(
        [
            [1],
            [0, 1, 0],
            [3, 0, 1, 2 * size + 1],
            [1] * 9,
            [0] * 4 + [20, 0, 0, 5] + [0] * 3,
            [size, size - 1, size + 1, 0],
        ]
    ):
        for dtype in (torch.bfloat16, torch.float32):
            r = random.Random(f"{number} {size} {dtype}")
            layout = BlockLayout(r.choice((1, 2)), r.choice((1, 3)), r.choice((8, 17)), r.choice((16, 5)), size, dtype)
            rows = len(counts)
            # At the begin of a block, at its end, and within.
            starts = [r.choice((0, size - 1, size, r.randrange(2 * size))) for _ in range(rows)]
            width = max(-(-(a + n) // size) for a, n in zip(starts, counts, strict=True)) or 1
            area = Area(layout, rows * width, device, number)
            table = torch.tensor(area.addresses, dtype=torch.int64).view(rows, width)
            if rows > 1:
                table[r.randrange(rows)] = 0  # a row whose blocks another row writes
                table[r.randrange(rows), r.randrange(width)] = 0
            # Behind the last row, tokens that belong to none.
            total = sum(counts) + r.choice((0, 3))
            keys, values = (x[0].transpose(0, 1) for x in dense(layout, 1, total, device, spread=number % 2 == 0))
            right = packed_into(area, table, keys, values, counts, starts)
            ends = torch.tensor([sum(counts[:i]) for i in range(rows + 1)], dtype=torch.int32, device=device)
            kind = r.choice((torch.int32, torch.int64))
            told = torch.tensor(starts, dtype=kind, device=device)
            module.append(keys, values, table.to(device), layout, told, cu_tokens=ends)
            assert torch.equal(area.memory, right), (counts, starts)
            if len({*starts}) == 1:
                module.append(keys, values, table.to(device), layout, starts[0], cu_tokens=ends)
                assert torch.equal(area.memory, right), (counts, starts)


def test_more_rows_than_are_searched_at_a_time(device: torch.device) -> None:
    layout = BlockLayout(1, 1, 4, 4, 4, torch.float32)
    r = random.Random(0)
    for rows in (127, 128, 129, 300):
        counts = [r.choice((0, 0, 1, 2)) for _ in range(rows)]
        starts = [r.randrange(4) for _ in range(rows)]
        area = Area(layout, rows * 2, device, rows)
        table = torch.tensor(area.addresses, dtype=torch.int64).view(rows, 2)
        keys, values = (x[0].transpose(0, 1) for x in dense(layout, 1, sum(counts), device, spread=False))
        right = packed_into(area, table, keys, values, counts, starts)
        ends = torch.tensor([sum(counts[:i]) for i in range(rows + 1)], dtype=torch.int32, device=device)
        copies.append(keys, values, table.to(device), layout, torch.tensor(starts, device=device), cu_tokens=ends)
        assert torch.equal(area.memory, right), rows


@pytest.mark.parametrize("module", [copies, tables], ids=["triton", "torch"])
def test_packed_and_padded_tokens_are_written_alike(module: Any, device: torch.device) -> None:
    layout = BlockLayout(2, 2, 8, 8, 16, torch.float16)
    area = Area(layout, 9, device, 0)
    table = torch.tensor(area.addresses, device=device).view(3, 3)
    keys, values = dense(layout, 3, 5, device, spread=False)
    starts = torch.tensor([0, 15, 27], device=device)
    before = area.memory.clone()
    module.append(keys, values, table, layout, starts)
    padded = area.memory.clone()
    assert not torch.equal(padded, before)
    area.memory.copy_(before)
    ends = torch.arange(0, 16, 5, dtype=torch.int32, device=device)
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (keys, values)]
    module.append(*packed, table, layout, starts, cu_tokens=ends)
    assert torch.equal(area.memory, padded)


@pytest.mark.parametrize("layout", layouts(), ids=lambda x: f"{x.dtype}-{x.k_dim}-{x.v_dim}-{x.block_size}")
@pytest.mark.parametrize("module", [copies, tables], ids=["triton", "torch"])
def test_tokens_are_gathered_to_where_they_stand(module: Any, layout: BlockLayout, device: torch.device) -> None:
    size, rows = layout.block_size, 2
    for number, tokens in enumerate((1, size - 1 or 1, 2 * size, 2 * size + 1, 35)):
        r = random.Random(number)
        width = -(-tokens // size) + 1  # blocks wholly behind the destination are left out
        area = Area(layout, rows * width, device, number)
        table = torch.tensor(area.addresses, dtype=torch.int64).view(rows, width)
        chosen = [sorted(r.sample(range(width), r.randint(1, width))) for _ in range(rows)]
        if number % 2:
            chosen = [[*range(width - (row + number) % 2)] for row in range(rows)]
        counts = torch.tensor([len(some) for some in chosen], dtype=torch.int32, device=device)
        addresses, positions = table.clone(), torch.zeros_like(table, dtype=torch.int32)
        for row, some in enumerate(chosen):
            addresses[row, : len(some)] = table[row, some]
            addresses[row, len(some) :] = 0
            positions[row, : len(some)] = torch.tensor(some, dtype=torch.int32)
        keys, values = dense(layout, rows, tokens, device, spread=number % 2 == 0)
        right = [keys.clone(), values.clone()]
        for row, some in enumerate(chosen):
            for index in some:
                for x, block in zip(right, area.split(area.memory, row * width + index), strict=True):
                    n = max(0, min(size, tokens - index * size))
                    x[row, :, index * size : index * size + n] = block[:, :n]
        told = None if number % 2 else positions.to(device)
        module.gather(AddressTable(addresses.to(device), counts, told), layout, keys, values)
        for x, y in zip((keys, values), right, strict=True):
            assert torch.equal(bits(x), bits(y)), (tokens, chosen)


@pytest.mark.parametrize("nbytes", [16, 48, 4096, 16384, 16384 + 64])
@pytest.mark.parametrize("call", [copies.copy_blocks, tables.copy_blocks], ids=["triton", "torch"])
def test_blocks_are_copied_whole_and_alone(call: Callable[..., None], nbytes: int, device: torch.device) -> None:
    n = 7
    memory = torch.randint(0, 256, (2 * n * (nbytes + GAP) + GAP,), dtype=torch.uint8, device=device)
    starts = [i * (nbytes + GAP) + GAP for i in range(2 * n)]
    random.Random(nbytes).shuffle(starts)
    right = memory.clone()
    for source, target in zip(starts[:n], starts[n:], strict=True):
        right[target : target + nbytes] = memory[source : source + nbytes]
    addresses = torch.tensor(starts, dtype=torch.int64, device=device) + memory.data_ptr()
    call(addresses[:n], addresses[n:], nbytes)
    assert torch.equal(memory, right)
    call(addresses[:0], addresses[:0], nbytes)


@pytest.mark.parametrize("programs", [1, 3, 64])
def test_any_number_of_programs_copies_all_blocks(programs: int, device: torch.device) -> None:
    source = torch.randint(0, 256, (5, 32768 + 16), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    addresses = [x.data_ptr() + torch.arange(5, device=device) * x.stride(0) for x in (source, target)]
    copies.copy_blocks(*addresses, source.shape[1], most_programs=programs)
    assert torch.equal(target, source)


def seen_on(device: torch.device) -> torch.Tensor:
    """Three numbers on the host that say that they are on a device."""
    return torch.zeros(3, dtype=torch.int64).as_subclass(type("Seen", (torch.Tensor,), {"device": device}))


def test_a_device_may_be_named_without_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    current, used = torch.device("cuda", 1), []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.index)
    monkeypatch.setattr(copies, "available", lambda device: False)
    monkeypatch.setattr(tables, "copy_blocks", lambda *_, device: used.append(device))
    some, host, other = (seen_on(x) for x in (current, torch.device("cpu"), torch.device("cuda", 0)))
    copies.copy_blocks(some, some, 16, device=torch.device("cuda"))
    copies.copy_blocks(host, host, 16, device=torch.device("cuda"))
    assert used == [current] * 2
    with pytest.raises(MismatchError):
        copies.copy_blocks(other, other, 16, device=torch.device("cuda"))


@pytest.mark.cuda
def test_blocks_in_page_locked_memory_are_copied_by_the_device() -> None:
    host = torch.randint(0, 256, (9, 65536), dtype=torch.uint8).pin_memory()
    back, there = torch.zeros_like(host).pin_memory(), torch.zeros((9, 65536), dtype=torch.uint8, device="cuda")
    rows = torch.arange(9, device="cuda") * 65536
    copies.copy_blocks(host.data_ptr() + rows, there.data_ptr() + rows, 65536)
    copies.copy_blocks(there.data_ptr() + rows, back.data_ptr() + rows, 65536)
    torch.cuda.synchronize()
    assert torch.equal(back, host)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    layout = BlockLayout(2, 2, 8, 8, 16, torch.float32)
    area = Area(layout, 4, device, 0)
    addresses = torch.tensor(area.addresses, device=device).view(2, 2)
    keys, values = dense(layout, 2, 3, device, spread=False)
    copies.append(keys, values, addresses, layout, 29)
    for arguments in (
        (keys[:, :1], values, addresses, layout, 0),
        (keys, values[:, :, :2], addresses, layout, 0),
        (keys.double(), values.double(), addresses, layout, 0),
        (keys, values, addresses[:1], layout, 0),
        (keys, values, addresses.int(), layout, 0),
        (keys, values, addresses, layout, 30),
        (keys, values, addresses, layout, -1),
        (keys, values, addresses, layout, torch.zeros(3, dtype=torch.int64, device=device)),
    ):
        with pytest.raises(MismatchError):
            copies.append(*arguments)
    packed, other = (x[0].transpose(0, 1) for x in (keys, values))
    ends = torch.tensor([0, 1, 3], dtype=torch.int32, device=device)
    copies.append(packed, other, addresses, layout, 29, cu_tokens=ends)
    for arguments, cu_tokens in (
        ((packed, other, addresses, layout, 0), None),
        ((keys, values, addresses, layout, 0), ends),
        ((packed[:, :1], other, addresses, layout, 0), ends),
        ((packed, other[:2], addresses, layout, 0), ends),
        ((packed, other, addresses, layout, 0), ends[:2]),
        ((packed, other, addresses, layout, 0), ends.long()),
        ((packed, other, addresses, layout, torch.zeros(3, dtype=torch.int64, device=device)), ends),
        ((packed, other, addresses, layout, -1), ends),
        ((packed, other, addresses, layout, 33), ends),
    ):
        with pytest.raises(MismatchError):
            copies.append(*arguments, cu_tokens=cu_tokens)
    with pytest.raises(MismatchError):
        copies.gather(AddressTable(addresses), layout, keys[:1], values)
    some = addresses.flatten()
    for copied in ((some, some[:3], 64), (some.int(), some.int(), 64), (some, some, 40), (some[::2], some[::2], 64)):
        with pytest.raises(MismatchError):
            copies.copy_blocks(*copied)
