"""New tokens into blocks: every byte where it belongs, and no other byte touched."""

from __future__ import annotations

import random
import sys
import threading

import pytest
import torch

from kvtier.cpu import native
from kvtier.errors import KVTierError

pytestmark = pytest.mark.usefixtures("kernel")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.float8_e4m3fn)


class Blocks:
    """Slots in memory whose every byte is known, as the library writes them and as plain indexing does."""

    def __init__(self, appender: native.Appender, slots: int, pad: int, seed: int, gap: int = 0) -> None:
        shape, self.appender = appender.shape, appender
        size = shape.block_size * shape.dtype.itemsize
        self.values = shape.kv_heads * shape.k_dim * size + gap
        self.stride = self.values + appender.v_heads * shape.v_dim * size + pad
        g = torch.Generator().manual_seed(seed)
        self.memory = torch.randint(0, 256, (slots, self.stride), dtype=torch.uint8, generator=g)
        self.expected = self.memory.clone()

    def address(self, slot: int) -> int:
        return self.memory[slot].data_ptr()

    def write(self, slot: int, offset: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys `[k_heads, tokens, k_dim]`, values the same with v_heads and v_dim."""
        shape = self.appender.shape
        for start, x in ((0, keys), (self.values, values)):
            heads, tokens, dim = x.shape
            size = heads * shape.block_size * dim * shape.dtype.itemsize
            raw = self.expected[slot, start : start + size].view(heads, shape.block_size, -1)
            raw[:, offset : offset + tokens] = x.contiguous().view(torch.uint8).view(heads, tokens, -1)

    def right(self) -> bool:
        return torch.equal(self.memory, self.expected)


def random_tensor(r: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bytes `[rows, heads, tokens, dim]`, in one of the layouts that models produce."""
    rows, heads, tokens, dim = shape

    def numbers(*sizes: int) -> torch.Tensor:
        return torch.randint(0, 256, (*sizes[:-1], sizes[-1] * dtype.itemsize), dtype=torch.uint8).view(dtype)

    return r.choice(
        (
            lambda: numbers(rows, heads, tokens, dim),
            lambda: numbers(rows, tokens, heads, dim).transpose(1, 2),
            lambda: numbers(rows, tokens, heads + 3, dim)[:, :, 2:-1].transpose(1, 2),
            lambda: numbers(rows, heads, tokens, dim + 2)[..., 1:-1],
            lambda: numbers(1, heads, tokens, dim).expand(rows, -1, -1, -1),
        )
    )()


def random_appender(r: random.Random, dtype: torch.dtype, gap: int) -> native.Appender:
    shape = native.Shape(dtype, r.choice((1, 2, 5)), r.choice((1, 8, 33)), r.choice((1, 8, 17)), r.choice((1, 4, 16)))
    v_heads = r.choice((None, 1, 3))
    key_bytes = shape.kv_heads * shape.block_size * shape.k_dim * dtype.itemsize
    return native.Appender(shape, v_heads=v_heads, values_offset=key_bytes + gap if gap else None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tokens_are_written_where_their_spans_say_and_nowhere_else(dtype: torch.dtype) -> None:
    for seed in range(40):
        r = random.Random(seed)
        torch.manual_seed(seed)
        gap = r.choice((0, 24))
        appender = random_appender(r, dtype, gap)
        shape = appender.shape
        rows, packed = r.randint(1, 4), r.random() < 0.4
        counts = [r.randint(0, 3 * shape.block_size) for _ in range(rows)]
        total = sum(counts) if packed else max(counts)
        sizes = (1 if packed else rows, total)
        keys = random_tensor(r, (sizes[0], shape.kv_heads, sizes[1], shape.k_dim), dtype)
        values = random_tensor(r, (sizes[0], appender.v_heads, sizes[1], shape.v_dim), dtype)
        blocks = Blocks(appender, 5 * rows, r.choice((0, 40)), seed, gap)
        free, first, spans = list(range(5 * rows)), 0, []
        r.shuffle(free)
        for row, count in enumerate(counts):
            token, offset, some = 0, r.randrange(shape.block_size), []
            while token < count:
                slot, n = free.pop(), min(count - token, shape.block_size - offset)
                at = first + token if packed else token
                some.append((blocks.address(slot), offset, at, n))
                source = 0 if packed else row
                blocks.write(slot, offset, keys[source, :, at : at + n], values[source, :, at : at + n])
                token, offset = token + n, 0
            spans.append(some)
            first += count
        appender.append(keys, values, spans)
        assert blocks.right(), (seed, shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_a_token_of_each_row_is_written_whatever_changes_between_two_steps(dtype: torch.dtype) -> None:
    r = random.Random(0)
    appender = native.Appender(native.Shape(dtype, 2, 8, 5, 4), v_heads=3)
    blocks = Blocks(appender, 12, 8, 0)
    for _ in range(400):
        rows, packed = r.choice((1, 1, 2, 3)), r.random() < 0.3
        sizes = (1, rows) if packed else (rows, 1)
        keys = random_tensor(r, (sizes[0], 2, sizes[1], 8), dtype)
        values = random_tensor(r, (sizes[0], 3, sizes[1], 5), dtype)
        slots = r.sample(range(12), rows)
        offsets = r.choice(([r.randrange(4)] * rows, [r.randrange(4) for _ in range(rows)]))
        same = len(set(offsets)) == 1 and r.random() < 0.7
        appender.append_token(keys, values, [blocks.address(x) for x in slots], offsets[0] if same else offsets)
        for row, (slot, offset) in enumerate(zip(slots, offsets, strict=True)):
            source, token = (0, row) if packed else (row, 0)
            blocks.write(slot, offset, keys[source, :, token : token + 1], values[source, :, token : token + 1])
        assert blocks.right()


def test_what_does_not_fit_is_refused_and_nothing_is_written() -> None:
    appender = native.Appender(native.Shape(torch.float32, 2, 8, 4, 4))
    blocks = Blocks(appender, 4, 0, 0)
    keys, values, address = torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 4), blocks.address(0)
    good = (address, 0, 0, 1)

    def refused(keys: torch.Tensor, values: torch.Tensor, spans: list[list[tuple[int, int, int, int]]]) -> None:
        with pytest.raises(KVTierError, match="Appending"):
            appender.append(keys, values, spans)

    for span in (
        *((address, 4, 0, 1), (address, 2, 0, 3), (address, -1, 0, 1), (address, 0, 0, -1)),
        *((address, 0, 3, 1), (address, 0, 1, 3), (address, 0, -1, 1), (address, 2**63 - 1, 0, 1)),
    ):
        refused(keys, values, [[good], [span]])
    refused(keys, values, [[good]])
    refused(keys, values, [[good]] * 3)
    refused(keys[:, :1], values, [[good], []])
    refused(keys, values[:, :1], [[good], []])
    refused(keys[..., :4], values, [[good], []])
    refused(keys, values[:, :, :2], [[good], []])
    refused(keys.double(), values.double(), [[good], []])
    refused(keys, values.double(), [[good], []])
    refused(keys.mT.contiguous().mT, values, [[good], []])
    refused(keys.to("meta"), values.to("meta"), [[good], []])
    one = keys[:, :, :1], values[:, :, :1]
    for _ in range(2):
        for tensors, addresses, offsets in (
            *((one, [address] * 2, 4), (one, [address] * 2, [0, -1]), (one, [address], 0), (one, [address] * 3, 0)),
            *(((keys, values), [address] * 2, 0), ((one[0].double(), one[1].double()), [address] * 2, 0)),
            # Strides as before.
            *(((one[0][:, :1], one[1]), [address] * 2, 0), ((one[0], one[1].view(torch.int32)), [address] * 2, 0)),
        ):
            with pytest.raises(KVTierError, match="Appending"):
                appender.append_token(*tensors, addresses, offsets)
            appender.append_token(*one, [blocks.address(2), blocks.address(3)], 0)
    blocks.write(2, 0, one[0][0], one[1][0])
    blocks.write(3, 0, one[0][1], one[1][1])
    assert blocks.right()
    appender.append(keys, values, [[], []])
    appender.append_token(*one, [address, blocks.address(1)], 0)
    blocks.write(0, 0, one[0][0], one[1][0])
    blocks.write(1, 0, one[0][1], one[1][1])
    assert blocks.right()


def test_threads_append_through_one_appender() -> None:
    appender = native.Appender(native.Shape(torch.float32, 2, 8, 8, 4))
    blocks = Blocks(appender, 4, 0, 0)
    tensors = [(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8)) for _ in range(4)]

    start = threading.Barrier(4)

    def work(slot: int) -> None:
        start.wait()
        for turn in range(10_000):
            appender.append_token(*tensors[slot], [blocks.address(slot)], turn % 4)

    threads, interval = [threading.Thread(target=work, args=(slot,)) for slot in range(4)], sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    for slot, (keys, values) in enumerate(tensors):
        for offset in range(4):
            blocks.write(slot, offset, keys[0], values[0])
    assert blocks.right()
