"""What runs over the model of streams: a cache under pressure, ways for it to attend and copy, and lost edges."""

from __future__ import annotations

import inspect
import random
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from stream_model import StreamModel
from torch.nn import functional as F

from kvtier import BudgetError, TieredKVCache, TieredMemory
from kvtier.cpu import native
from kvtier.kernels import launch
from kvtier.memory.tiers import fetching
from kvtier.planning import sizing
from kvtier.planning.policy import Policy
from kvtier.testing import with_doubles
from kvtier.transfer import launches
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction

Patch = pytest.MonkeyPatch
LAYERS, HEADS, DIM, BLOCK = 3, 2, 8, 4
SLOT = 2 * HEADS * BLOCK * DIM * 4
STEPS = 40


class Conversation:
    """A cache under pressure, used as a model uses it: update and attention, layer by layer; crops and reorders.

    Args:
        model: of the streams.
        seed: of what is done.
        host_attention: host threads attend to what is not on the device; else it is fetched.
        poison: whatever becomes free is written over at once.
        memory: that others use, too; None: one of its own.
    """

    def __init__(
        self,
        model: StreamModel,
        seed: int,
        *,
        host_attention: bool,
        poison: bool = False,
        memory: TieredMemory | None = None,
    ) -> None:
        self.model = model
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        # Whoever fetches needs room for one layer as one tensor: 2 rows of up to 25 blocks.
        slots = self.random.choice((16, 24, 40) if host_attention and native.available() else (60, 70, 90))
        if memory is None:
            cache = TieredKVCache(
                device_budget=slots * SLOT,
                host_budget=160 * SLOT,  # little more than all of it: host slots are soon used again
                block_size=BLOCK,
                host_attention=host_attention,
                policy=Policy(write_through=self.random.choice((0.0, 0.5, 1.0)), ahead=self.random.choice((1, 2, 4))),
            )
            self.cache = with_doubles(cache, model.engine, poison=poison)
        else:
            self.cache = TieredKVCache(memory=memory, block_size=BLOCK, host_attention=host_attention)
        self._queries: dict[int, torch.Tensor] = {}

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    @property
    def engine(self) -> CudaTransfers:
        """The cache's own."""
        (device,) = self.cache._forward.memory.devices
        assert isinstance(device.engine, CudaTransfers)
        return device.engine

    def forward(self, tokens: int) -> None:
        """So many more tokens for each of two rows. The memory of queries is used again, as in a captured graph."""
        query = self._queries.setdefault(tokens, torch.empty(2, 2 * HEADS, tokens, DIM))
        for i in range(LAYERS):
            keys, values = (torch.randn(2, HEADS, tokens, DIM) for _ in range(2))
            past = self.cache.layers[i].get_seq_length() if i < len(self.cache.layers) else 0
            views = self.cache.update(keys, values, i)
            if past:
                query.normal_()
                F.scaled_dot_product_attention(query, *views, enable_gqa=True)

    def step(self) -> None:
        """One forward, crop or reorder."""
        if self.length > 80:
            self.cache.crop(30 - self.length)
        chosen = self.random.choice(("decode",) * 6 + ("prompt", "crop", "crop", "reorder"))
        try:
            if self.length < 3:
                self.forward(self.random.randint(10, 40))
            elif chosen == "decode":
                self.forward(1)
            elif chosen == "prompt":
                self.forward(self.random.choice((3, 9, 17, 20)))
            elif chosen == "crop":
                self.cache.crop(-self.random.randint(1, min(2 * BLOCK, self.length - 1)))
            else:
                self.cache.reorder_cache(torch.tensor([self.random.randrange(2) for _ in range(2)]))
        except BudgetError:
            self.cache.crop(0)
            self.cache.crop(max(self.length // 2, 1) - self.length)


# Who attends, and what copies


def in_torch(patch: Patch) -> None:
    """Without the native library, host attention is torch's, on the CPU's own thread."""
    patch.setattr(native, "available", lambda: False)


def through_tables(patch: Patch) -> None:
    """The device's part, and long prompts, read blocks where they are, as its kernels do."""
    patch.setattr(launch, "available", lambda device: True)


def by_launch(patch: Patch, least: tuple[int, ...] = (1,) * len(launches.SIZES)) -> None:
    """Blocks are copied by launches, as if so few runs of each of `launches.SIZES` paid for one."""
    patch.setattr(launches, "FEWEST", 1)
    patch.setattr(launches, "least_runs", lambda device, direction: least)


def by_both(patch: Patch) -> None:
    """Single blocks by launches, where there are two or more, longer runs by the copy engine."""
    by_launch(patch, (2, *launches.NEVER[1:]))
    patch.setattr(launches, "SIZES", (SLOT, *launches.SIZES[1:]))


def always_packing(patch: Patch) -> None:
    """Whatever is fetched counts as scattered, so that blocks move within the device all the time."""
    patch.setattr(sizing, "scattered", lambda runs, blocks: True)
    patch.setattr(fetching, "PACK_INTERVAL", 1)


# Lost edges


def rewritten(owner: Any, name: str, old: str, new: str) -> Callable[..., Any]:
    """The function `name` of a class or module with `old` replaced by `new` in its source, which must contain it."""
    function = owner.__dict__[name]
    source = getattr(function, "rewritten", None) or textwrap.dedent(inspect.getsource(function))
    assert source.count(old) >= 1, f"{owner.__name__}.{name} no longer contains {old!r}: renew this mutation"
    names: dict[str, Any] = {}
    source = source.replace(old, new)
    code = compile("from __future__ import annotations\n" + source, f"<mutated {name}>", "exec")
    exec(code, function.__globals__, names)
    names[name].rewritten = source  # for the next mutation of it
    return names[name]


def edit(owner: Any, name: str, old: str, new: str) -> Callable[[Patch], None]:
    """A mutation by rewriting one function."""

    def apply(patch: Patch) -> None:
        patch.setattr(owner, name, rewritten(owner, name, old, new))

    return apply


def begins_at_once(direction: Direction) -> Callable[[Patch], None]:
    """Copies in one direction wait for nothing that the compute stream did."""
    old = "(self.mark(),) if behind is None else behind"
    return edit(CudaTransfers, "_start", old, f"() if transfer.direction is Direction.{direction.name} else ({old})")
