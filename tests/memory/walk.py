"""Random walks: several caches on one memory, each compared with a dense model of its own after every operation."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from stepped import Turns
from torch.nn import functional as F
from transformers import LlamaConfig

from kvtier import BudgetError, MismatchError, Policy, StaleViewError, TieredKVCache, TieredMemory, TransferError
from kvtier.memory.blocks import residency
from kvtier.memory.blocks.block import BlockSet, State
from kvtier.memory.storage.slabs import POISON
from kvtier.memory.tiered import EngineFactory, default_engine
from kvtier.memory.tiers.device import ComputeDevice
from kvtier.planning.policy import Candidate, Victims
from kvtier.planning.step import LayerPlan, StepPlan, StepState
from kvtier.tables.parked.sequence import ParkedSequence
from kvtier.tables.parked.sequences import ParkedSequences
from kvtier.testing import failing, with_doubles
from kvtier.transfer.copies import Copy
from kvtier.transfer.doubles import HeldTransfers
from kvtier.transfer.engine import Event, Transfer
from kvtier.transfer.throttled import Link, Moment, ThrottledTransfers

CPU = torch.device("cpu")
#: Tokens at which a cache is cropped, so that walks stay fast.
LONGEST = 56
TOLERANCE = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 5e-2}


class LateMark(Event):
    """A point of the compute stream that passes at any time."""

    def __init__(self, rng: random.Random) -> None:
        self._random, self._passed = rng, False

    def passed(self) -> bool:
        """Whether it has, by now."""
        self._passed = self._passed or self._random.random() < 0.3
        return self._passed

    def settle(self) -> None:
        """Let it pass."""
        self._passed = True


class Watched(HeldTransfers):
    """Raises where somebody changes what a copy of blocks reads before its end is known, or what it writes before it
    came: on a stream it may run at any time until then. What ran settles at some later poll, not always at the next."""

    def poll(self) -> None:
        """Run some, or none; settle some of what ran."""
        self._run_some()
        for transfer in list(self._ran):
            if self._random.random() < 0.5 and not any(earlier.pending for earlier in transfer.after):
                self._synchronize(transfer)

    def _start(self, transfer: Transfer, behind: Sequence[Event] | None) -> None:
        read = [copy.source.bytes() for copy in transfer.copies if isinstance(copy, Copy)]
        transfer.ticket = [(x, x.clone()) for x in read]
        super()._start(transfer, behind)

    def _run(self, transfer: Transfer) -> None:
        if transfer in self._pending:
            for earlier in transfer.after:
                self._run(earlier)
            self._check_source(transfer)
            written = [copy.destination() for copy in transfer.copies if isinstance(copy, Copy)]
            assert all((x == POISON).all() for x in written), "somebody has written where a copy was to write"
        super()._run(transfer)

    def _synchronize(self, transfer: Transfer) -> None:
        self._run(transfer)
        if transfer in self._ran:
            for earlier in list(transfer.after):
                self._synchronize(earlier)
            self._check_source(transfer)
        super()._synchronize(transfer)

    def _settle_all(self) -> None:
        while self._ran:
            self._synchronize(self._ran[0])

    @staticmethod
    def _check_source(transfer: Transfer) -> None:
        assert all(torch.equal(*each) for each in transfer.ticket), "what a copy reads has changed before its end"


class Asynchronous(Watched):
    """As a CUDA device seems to the CPU, though it computes at once."""

    asynchronous = True
    pageable_copies_block = True

    def mark(self) -> Event:
        """A point that passes later."""
        return LateMark(self._random)


class Busy(ThrottledTransfers):
    """Copies that take their time behind a device that is given work whenever somebody asks where it is."""

    def __init__(self, device: torch.device, seed: int) -> None:
        super().__init__(device, Link(100e6, 100e6, 20e-6 * (seed % 4)), poison=True)
        self.clock.running = seed % 2 == 1
        self._random = random.Random(seed)

    def mark(self) -> Moment | None:
        """A point some time from now."""
        self.clock.run(self._random.choice((0.0, 5e-5, 5e-4)))
        return super().mark()


#: Makes the engine of a walk from its seed.
ENGINES: dict[str, Callable[[int], EngineFactory]] = {
    "inline": lambda seed: default_engine,
    "held": lambda seed: lambda device: Watched(device, seed, 0.0),
    "held, any order": lambda seed: lambda device: Watched(device, seed, 0.3),
    "late": lambda seed: lambda device: Watched(device, seed, 0.2, late=True),
    "asynchronous": lambda seed: lambda device: Asynchronous(device, seed, 0.2, late=True),
    "failing": lambda seed: failing(0.1, seed),
    "throttled": lambda seed: lambda device: Busy(device, seed),
}


class RandomPolicy(Policy):
    """Decides whatever a policy may decide.

    Args:
        seed: of the decisions.
        wild: and what it may not: more than there is, less than nothing, what nobody has offered.
    """

    by_rows = True

    def __init__(self, seed: int, *, wild: bool = False) -> None:
        super().__init__()
        self._random, self._wild = random.Random(seed), wild
        self._offered: list[Candidate] = []

    def plan(self, state: StepState) -> StepPlan:
        """Fetch some blocks of some layers, some of them for good; let some leave; move whole rows."""
        layers = [
            LayerPlan(
                self._any(x.spilled),
                self._any(4),
                self._any(x.spilled),
                self._any(x.resident) * self._random.randint(0, 1),
            )
            for x in state.layers
        ]
        rows = range(-1, len(state.row_bytes) + 1) if self._wild else range(len(state.row_bytes))
        on_host = [row for row in rows if self._random.random() < 0.5] if self._random.random() < 0.3 else None
        return StepPlan(layers, self._any(state.device_bytes // 6), on_host)

    def victims(self, candidates: Sequence[Candidate], blocks: int) -> Iterable[Victims]:
        """Blocks of any layer, from either end."""
        if self._wild:
            self._offered = [*self._offered[-20:], *candidates]
            for x in self._random.choices(self._offered, k=3):
                yield Victims(x, self._any(blocks), self._random.random() < 0.4)
        for x in self._random.sample(candidates, len(candidates)):
            yield Victims(x, x.evictable, self._random.random() < 0.4)

    def write_back(self, used_bytes: int, device_bytes: int, sealed: int) -> int:
        """Any number of blocks."""
        return self._any(2 * sealed) if self._wild else self._random.choice((0, 0, sealed, 2 * sealed))

    def _any(self, most: int) -> int:
        """A number up to `most`, or any at all."""
        if self._wild and self._random.random() < 0.4:
            return self._random.choice((-(10**12), -1, most + 1, 10**12))
        return self._random.randint(0, most)


@dataclass(frozen=True)
class Form:
    """What the keys and values of a cache look like, and its options.

    Attributes:
        heads, groups, k_dim, v_dim, dtype, layers: of the model; `groups` query heads share a KV head.
        block_size, host_attention: of the cache.
        known: whether the cache knows the number of layers in advance.
    """

    heads: int
    groups: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    layers: int
    block_size: int
    host_attention: bool
    known: bool

    @classmethod
    def draw(cls, rng: random.Random) -> Form:
        """Any form."""
        k_dim = rng.choice((4, 8))
        return cls(
            heads=rng.choice((1, 2)),
            groups=rng.choice((1, 2)),
            k_dim=k_dim,
            v_dim=rng.choice((k_dim, k_dim, 3, 8)),
            dtype=rng.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16)),
            layers=rng.choice((1, 2, 3)),
            block_size=rng.choice((1, 4, 4, 16)),
            host_attention=rng.random() < 0.6,
            known=rng.random() < 0.5,
        )

    def cache(self, memory: TieredMemory | None, **options: Any) -> TieredKVCache:
        """An empty cache of this form; without a memory, with `options` for its own."""
        config = LlamaConfig(num_hidden_layers=self.layers) if self.known else None
        return TieredKVCache(
            config, memory=memory, block_size=self.block_size, host_attention=self.host_attention, **options
        )


@dataclass
class Counts:
    """What a walk came by."""

    operations: int = 0
    refused: int = 0
    failed: int = 0
    attended: int = 0
    followed: int = 0


class Walk:
    """Caches on one memory, changed at random.

    Args:
        seed: of everything.
        engine: moves blocks.
        device: budgets of the device tier to choose from; None: no device tier.
        host: budgets of the host to choose from.
        members: caches at the beginning.
        private: one cache, with a memory of its own.
        poison: fill free memory with NaN.
        policy: decides; None: any.
        turns: of threads, one for each cache.
        parking: caches park what they hold, and continue what is parked.
    """

    def __init__(
        self,
        seed: int,
        engine: EngineFactory = default_engine,
        *,
        device: Sequence[int | None] = (6_000, 20_000, 60_000),
        host: Sequence[int] = (40_000, 120_000, 10**6),
        members: int = 0,
        private: bool = False,
        poison: bool = True,
        policy: Policy | None = None,
        turns: Turns | None = None,
        parking: bool = False,
    ) -> None:
        self.turns, self.parking = turns, parking
        self.random = random.Random(seed)
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.device, self.host = device, host
        self.counts = Counts()
        if policy is None and self.random.random() < 0.5:
            policy = RandomPolicy(seed, wild=self.random.random() < 0.5)
        budgets: dict[str, Any] = {
            "device_budget": self.random.choice(device),
            "host_budget": self.random.choice(host),
            "policy": policy or Policy(write_through=self.random.choice((0.0, 0.5, 1.0))),
        }
        self.members: list[Member] = []
        #: What is parked, of caches of each form, and the dense model of that.
        self.parked: dict[Form, dict[ParkedSequence, Any]] = {}
        self._parked_in: dict[Form, ParkedSequences] = {}
        if private:
            member = Member(self, None, **budgets)
            self.memory = member.cache._forward.memory
        else:
            self.memory = TieredMemory(**budgets)
        with_doubles(self.memory, engine, poison=poison)
        if turns is not None:
            turns.install(self.memory)
        if private:
            self.members.append(member)
        for _ in range(0 if private else members or self.random.randint(2, 4)):
            self.members.append(Member(self, self.memory))

    def tokens(self, form: Form, batch: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """New keys and values for every layer; often with rows that are equal, wholly or at their beginning, and
        sometimes in later layers less than in the first."""
        found = []
        alike, part = self.random.random() < 0.5, self.random.randint(0, count)
        for i in range(form.layers):
            if i and self.random.random() < 0.2:
                part = self.random.randint(0, part)
            k, v = (self.draw(batch, form.heads, count, dim) for dim in (form.k_dim, form.v_dim))
            for row in range(1, batch if alike else 0):
                k[row, :, :part], v[row, :, :part] = k[row - 1, :, :part], v[row - 1, :, :part]
            found.append((k.to(form.dtype), v.to(form.dtype)))
        return found

    def parked_of(self, form: Form) -> tuple[ParkedSequences, dict[ParkedSequence, Any]]:
        """Where caches of a form park, and what is there."""
        with self.memory.lock:
            if form not in self._parked_in:
                self.parked[form], self._parked_in[form] = {}, ParkedSequences(self.memory)
            parked, known = self._parked_in[form], self.parked[form]
            for sequence in [sequence for sequence in known if not sequence.length]:
                del known[sequence]
            return parked, known

    def draw(self, *shape: int) -> torch.Tensor:
        """Random numbers."""
        return torch.randn(*shape, generator=self.generator, device="cpu")

    def step(self) -> None:
        """One operation of one cache, or one layer of a forward that goes on, or new budgets."""
        self.counts.operations += 1
        if self.random.random() < 0.04:
            self.resize()
        else:
            self.random.choice(self.members).step()
        self.check()

    def run_in_turns(self, steps: int) -> None:
        """So many operations of each cache, each in a thread of its own, and another thread that wants memory."""
        assert self.turns is not None

        def work(member: Member) -> None:
            for _ in range(steps):
                self.counts.operations += 1
                if self.random.random() < 0.02:
                    self.resize()
                member.step()
                self.check(member)
            member.finish()

        def press() -> None:
            for _ in range(3 * steps):
                member = self.members[0]
                for _ in self.random.choice((member.spill, member.fetch, member.cancel, member.make_room))():
                    pass

        self.turns.run([*[partial(work, member) for member in self.members], press])
        self.end()

    def resize(self) -> None:
        """Give other budgets; refused where they are too small, and then nothing is changed."""
        given: dict[str, Any] = {"host_budget": self.random.choice(self.host)}
        if self.device != (None,):
            given["device_budget"] = self.random.choice([x for x in self.device if x])
            if self.random.random() < 0.3:
                del given["host_budget"]
        before = self.limits()
        try:
            self.memory.resize(**given)
        except BudgetError:
            self.counts.refused += 1
            assert self.turns is not None or self.limits() == before  # other threads may have given others
        except TransferError:
            self.counts.failed += 1

    def limits(self) -> list[int]:
        """Bytes of the budgets in use."""
        tiers = [device.slabs for device in self.memory.devices] + [self.memory.host.slabs]
        return [slabs.budget.limit for slabs in tiers if slabs is not None]

    def check(self, mine: Member | None = None) -> None:
        """Every count of the memory and of every cache, or of one: those of other threads are in the midst of it."""
        self.memory.check_integrity()
        for member in self.members if mine is None else (mine,):
            with self.memory.lock:
                forward = member.cache._forward
                for each in (*forward.readers.values(), *forward._schedules.values()):
                    each.check_integrity()
        with self.memory.lock:
            for parked in self._parked_in.values():
                parked.check_integrity()
        stats = self.memory.stats
        for tier in (stats.device, stats.host):
            assert tier.bytes <= tier.budget

    def end(self) -> None:
        """Read everything once more, close all, and find all memory given back."""
        for member in self.members:
            member.finish()
            member.read_all()
            member.cache.close()
        self.members.clear()
        gc.collect(1)
        with self.memory.lock, self.memory.change:
            self.memory.recovery.collect()
            for parked in self._parked_in.values():
                parked.check_integrity()
                parked.close()
        if not self.memory.private:
            self.memory.check_integrity()
            stats = self.memory.stats
            assert (stats.device.used_blocks, stats.host.used_blocks) == (0, 0)
            with self.memory.lock:
                for device in self.memory.devices:
                    device.eviction.cancel()
                self.memory.trim(all_free=True)
            assert self.memory.stats.device.bytes == self.memory.stats.host.bytes == 0
            self.memory.close()


class Member:
    """One cache and its dense model.

    Args:
        walk: that it is part of.
        memory: shared; None: its own, made with `options`.

    Attributes:
        dense: for each layer, keys `[batch, heads, tokens, k_dim]` and values `[..., v_dim]`.
        old: views of what was dropped or reordered.
    """

    def __init__(self, walk: Walk, memory: TieredMemory | None, **options: Any) -> None:
        self.walk = walk
        self.random = walk.random
        self._options = options
        self.form = Form.draw(walk.random)
        self.cache = self.form.cache(memory, **options)
        self.dense: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.old: list[Any] = []
        self.under_way: Iterator[None] | None = None

    @property
    def batch(self) -> int:
        """Rows."""
        return self.dense[0][0].shape[0] if self.dense else 0

    @property
    def length(self) -> int:
        """Tokens per row."""
        return self.dense[0][0].shape[2] if self.dense else 0

    @property
    def layers(self) -> list[Any]:
        """The layers in the memory."""
        return [reader.layer for reader in self.cache._forward.readers.values()]

    def step(self) -> None:
        """An operation; a forward takes several steps, and others may come between its layers."""
        if self.under_way is None:
            self.under_way = self.operation()()
        if next(self.under_way, self) is self:
            self.under_way = None
            if self.length > LONGEST:
                self.crop_to(self.random.randint(0, 20))

    def finish(self) -> None:
        """Bring the operation under way to its end."""
        for _ in self.under_way or ():
            pass
        self.under_way = None

    def operation(self) -> Callable[[], Iterator[None]]:
        """Any operation."""
        anywhere = {self.forward: 9.0, self.decode: 1.5, self.reset: 0.3, self.renew: 0.3, self.drop: 0.2}
        if any(self.walk.parked.values()):
            anywhere |= {self.follow: 0.8, self.unpark: 0.2}
        if not self.length:
            return self.choose(anywhere)
        held = {
            self.crop: 1.5,
            self.reorder: 1.0,
            self.select: 1.0,
            self.repeat: 0.8,
            self.copy: 0.3,
            **({self.park: 0.8} if self.walk.parking else {}),
            self.read: 2.0,
            self.attend: 1.0,
        }
        pressure = {self.spill: 1.0, self.fetch: 1.0, self.make_room: 0.5, self.cancel: 0.7}
        return self.choose(anywhere | held | pressure)

    def choose(self, weights: dict[Callable[[], Iterator[None]], float]) -> Callable[[], Iterator[None]]:
        """One of these, by its weight."""
        return self.random.choices(list(weights), list(weights.values()))[0]

    # Forwards

    def decode(self) -> Iterator[None]:
        """One token after the other; some are taken back, as by speculative decoding."""
        for _ in range(self.random.randint(2, 5)):
            yield from self.forward(1)
            if self.length and self.random.random() < 0.3:
                self.crop_to(self.length - self.random.randint(0, min(self.length, 7)))

    def forward(self, count: int = 0) -> Iterator[None]:
        """New tokens for every layer, which are read as attention reads them; 0: any number."""
        size = self.form.block_size
        count = count or self.random.choice((1, 1, 1, 1, 2, size, size + 1, 9, 20) if self.length else (1, 9, 20, 40))
        new = self.walk.tokens(self.form, self.batch or self.random.randint(1, 4), count)
        try:
            for i, (k, v) in enumerate(new):
                if i and self.random.random() < 0.5:
                    yield
                views = self.update(k, v, i)
                self.attend_to(i, views, new)
        except BudgetError:
            self.walk.counts.refused += 1
            self.unchanged()
            if self.random.random() < 0.5 and self.length:
                self.crop_to(self.random.randint(0, self.length))
        except TransferError:
            self.walk.counts.failed += 1
            self.give_up()
        else:
            self.dense = [self.after(i, new) for i in range(self.form.layers)]
            self.check_old_views()

    def update(self, k: torch.Tensor, v: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What `Cache.update` gives, of the right shapes."""
        given = k.clone(), v.clone()
        keys, values = self.cache.update(*given, layer)
        for x, y in ((keys, k), (values, v)):
            assert x.shape == (*y.shape[:2], self.length + y.shape[2], y.shape[3])
        if self.length:
            for x in given:
                x.fill_(float("nan"))  # the caller keeps its tensors: they were copied
        return keys, values

    def after(self, layer: int, new: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        """The dense model of a layer with the new tokens."""
        if not self.dense:
            return new[layer]
        return tuple(torch.cat(pair, 2) for pair in zip(self.dense[layer], new[layer], strict=True))  # type: ignore

    def attend_to(
        self,
        layer: int,
        views: tuple[torch.Tensor, torch.Tensor],
        new: Sequence[tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        """Read a layer after its update, in one of the ways that models do."""
        how, dense = self.random.random(), self.after(layer, new)
        if not self.length or how < 0.1:
            return  # its own keys and values; or it is not read
        if how < 0.2:
            assert_same([x.contiguous() if type(x) is torch.Tensor else x.dense() for x in views], dense)  # type: ignore
            return
        self.attention(views, dense, new[layer][0].shape[2])

    def attention(self, views: Sequence[torch.Tensor], dense: Sequence[torch.Tensor], queries: int) -> None:
        """Attention over views is that over the dense model."""
        form, tokens = self.form, dense[0].shape[2]
        query = self.walk.draw(self.batch, form.heads * form.groups, queries, form.k_dim).to(form.dtype)
        mask: torch.Tensor | None = None
        if queries > 1:
            mask = torch.ones(queries, tokens, dtype=torch.bool).tril(tokens - queries)[None, None]
        elif self.random.random() < 0.2:
            mask = torch.rand(self.batch, 1, 1, tokens, generator=self.walk.generator) < 0.7
            mask[..., -1] = True
        out = F.scaled_dot_product_attention(query, *views, attn_mask=mask, enable_gqa=form.groups > 1)
        right = F.scaled_dot_product_attention(
            query.double(), *(x.double().repeat_interleave(form.groups, 1) for x in dense), attn_mask=mask
        )
        some = TOLERANCE[form.dtype]
        torch.testing.assert_close(out.double(), right, rtol=some, atol=some)
        self.walk.counts.attended += 1

    def unchanged(self) -> None:
        """After a refusal the cache holds what it held before the forward."""
        for i in range(len(self.cache.layers)):
            assert self.cache.get_seq_length(i) == self.length, f"layer {i} has changed"
        if self.random.random() < 0.3:
            self.read_all()

    def give_up(self) -> None:
        """A transfer failed in the middle of a forward, which is dropped."""
        if self.length:
            self.cache.crop(0)
            # If all layers had been updated, the forward counts as finished.
            self.cache.crop(self.length - self.cache.get_seq_length())
        else:
            self.cache.reset()

    # Rows and length

    def crop(self) -> Iterator[None]:
        """Drop the last tokens."""
        self.crop_to(self.length - self.random.randint(0, min(self.length, 7)))
        if self.random.random() < 0.6:
            yield from self.forward()  # other tokens in their place

    def crop_to(self, length: int) -> None:
        with self.old_views(gone=length < self.length):
            self.cache.crop(length - self.length)
        self.change(lambda x: x[:, :, :length])
        if not length:
            # A cache whose layers are all empty may be given other rows.
            self.dense = []

    def reorder(self) -> Iterator[None]:
        """As beam search does."""
        rows = torch.tensor([self.random.randrange(self.batch) for _ in range(self.batch)])
        with self.old_views(gone=rows.tolist() != list(range(self.batch))):
            self.cache.reorder_cache(rows)
        self.change(lambda x: x[rows])
        yield from ()

    def select(self) -> Iterator[None]:
        """Keep some rows, in any order."""
        rows = torch.tensor(self.random.sample(range(self.batch), self.random.randint(1, self.batch)))
        with self.old_views(gone=rows.tolist() != list(range(self.batch))):
            self.cache.batch_select_indices(rows)
        self.change(lambda x: x[rows])
        yield from ()

    def repeat(self) -> Iterator[None]:
        """Several sequences continue each row."""
        if self.batch <= 2:
            with self.old_views():
                self.cache.batch_repeat_interleave(2)
            self.change(lambda x: x.repeat_interleave(2, 0))
        yield from ()

    @contextlib.contextmanager
    def old_views(self, *, gone: bool = True) -> Iterator[None]:
        """What changes rows or drops tokens: views of before refuse to show what came after, now and later."""
        views = [layer.keys for layer in self.cache.layers] if gone and self.length else []
        yield
        if gone:
            self.old = views
            self.check_old_views()

    def check_old_views(self) -> None:
        """Nobody reads other tokens through a view than those that it was made of."""
        for view in self.old:
            try:
                view.dense()
            except StaleViewError:
                continue
            raise AssertionError("a view shows what was dropped or reordered")

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Let the dense model follow."""
        self.dense = [(change(k), change(v)) for k, v in self.dense]

    # Life

    def reset(self) -> Iterator[None]:
        """Empty the cache."""
        with self.old_views():
            self.cache.reset()
        self.dense = []
        yield from ()

    def renew(self) -> Iterator[None]:
        """Close the cache; another one comes, of another form."""
        if not self.walk.memory.private:
            self.cache.close()
            self._begin_anew()
        yield from ()

    def drop(self) -> Iterator[None]:
        """Nobody holds the cache any more, and nobody closed it."""
        if not self.walk.memory.private:
            self._begin_anew()
            gc.collect(1)  # not all that this process ever made
        yield from ()

    def park(self) -> Iterator[None]:
        """Keep some tokens of a row for caches to come; the cache goes on."""
        if not self.walk.memory.private and len(self.layers) == self.form.layers:
            row, length = self.random.randrange(self.batch), self.random.randint(1, self.length)
            parked, known = self.walk.parked_of(self.form)
            try:
                sequence = self.cache._forward.park(parked, row, length)
            except MismatchError:
                pass  # a layer came to another device or layout
            else:
                known[sequence] = [(k[row : row + 1, :, :length], v[row : row + 1, :, :length]) for k, v in self.dense]
        yield from ()

    def follow(self) -> Iterator[None]:
        """Close the cache; another one continues parked sequences."""
        form = self.random.choice([form for form, sequences in self.walk.parked.items() if sequences])
        parked, known = self.walk.parked_of(form)
        if not known:
            return
        rows = [self.random.choice(list(known)) for _ in range(self.random.choice((1, 1, 2, 3)))]
        self.cache.close()
        self.form, self.cache, self.dense, self.old = form, form.cache(self.walk.memory), [], []
        if not form.known:
            self.cache._add_layers(form.layers - 1)
        length = self.random.randint(1, max(1, *(sequence.length for sequence in rows)))
        try:
            length = self.cache._forward.follow(parked, rows, length)
        except BudgetError:
            self.walk.counts.refused += 1
        else:
            self.walk.counts.followed += length > 0
            dense = [known[sequence] for sequence in rows] if length else []
            self.dense = [
                tuple(torch.cat([row[i][j][:, :, :length] for row in dense]) for j in (0, 1))  # type: ignore[misc]
                for i in range(form.layers if length else 0)
            ]
        yield from ()

    def unpark(self) -> Iterator[None]:
        """A parked sequence is not kept any more, or becomes the last to go."""
        form = self.random.choice([form for form, sequences in self.walk.parked.items() if sequences])
        parked, known = self.walk.parked_of(form)
        if not known:
            return
        sequence = self.random.choice(list(known))
        with self.walk.memory.lock:
            if self.random.random() < 0.5:
                parked.drop(sequence)
            elif self.random.random() < 0.5:
                parked.give(self.random.randint(1, 2000))
            else:
                parked.touch(sequence)
        yield from ()

    def _begin_anew(self) -> None:
        self.form = Form.draw(self.random)
        self.cache = self.form.cache(self.walk.memory)
        self.dense, self.old = [], []

    def copy(self) -> Iterator[None]:
        """Go on with a copy of the cache; the original goes on too, if there are few."""
        if not self.walk.memory.private:
            try:
                made = copy.deepcopy(self.cache)
            except BudgetError:
                self.walk.counts.refused += 1
                self.unchanged()
            except TransferError:
                self.walk.counts.failed += 1
            else:
                original, self.cache, self.old = self.cache, made, []
                if len(self.walk.members) < 4 and self.walk.turns is None:
                    twin = copy.copy(self)
                    twin.cache, twin.under_way, twin.dense, twin.old = original, None, list(self.dense), []
                    self.walk.members.append(twin)
                else:
                    original.close()
        yield from ()

    # Reading

    def read(self) -> Iterator[None]:
        """All that the cache holds is what the dense model holds."""
        self.read_all()
        yield from ()

    def read_all(self) -> None:
        """Compare every bit of it."""
        for i, dense in enumerate(self.dense):
            layer = self.cache.layers[i]
            with self.may_fail():
                assert_same((layer.keys.dense(), layer.values.dense()), dense)

    def attend(self) -> Iterator[None]:
        """Attention over what the cache holds, outside of a forward, by few or many queries."""
        i = self.random.randrange(len(self.dense))
        layer = self.cache.layers[i]
        queries = self.random.choice((1, 1, 2, min(self.length, 5), min(self.length, 20)))
        with self.may_fail():
            self.attention((layer.keys, layer.values), self.dense[i], queries)
        yield from ()

    @contextlib.contextmanager
    def may_fail(self) -> Iterator[None]:
        """A transfer that fails leaves everything as it was."""
        try:
            yield
        except TransferError:
            self.walk.counts.failed += 1

    # Pressure on any cache, as others on the same memory make it

    def spill(self) -> Iterator[None]:
        """Blocks leave the device."""
        with self.pressure() as sets:
            for device, blocks in sets:
                device.evict_from(blocks, self.random.randint(1, 4), latest_first=self.random.random() < 0.3)
        yield from ()

    def fetch(self) -> Iterator[None]:
        """Blocks are fetched that nobody asked for, or copied."""
        with self.pressure() as sets:
            for device, blocks in sets:
                if self.random.random() < 0.3:
                    device.fetching._scattered, device.fetching._until_pack = True, 0  # free slots are to be neighbours
                runs = [run for run in blocks.runs if run.state is State.HOST]
                for run in device.fetch(runs, self.random.randint(1, 5), None, evict=self.random.random() < 0.3):
                    if self.random.random() < 0.3:
                        residency.arrive(run)  # as who reads it does; the copy may go on
                if self.random.random() < 0.3:
                    device.write_back(blocks, 2)
        yield from ()

    def cancel(self) -> Iterator[None]:
        """Fetches under way are given up."""
        with self.pressure() as sets:
            for device, blocks in sets:
                if self.random.random() < 0.5:
                    runs = [run for run in blocks.runs if run.state is State.HOST]
                    device.fetch(runs, self.random.randint(1, 5), None, evict=False)
                if self.random.random() < 0.2:
                    device.eviction.cancel()
                for run in [run for run in blocks.runs if run.state is State.ARRIVING]:
                    residency.evict(run, device.fence(blocks))
        yield from ()

    def make_room(self) -> Iterator[None]:
        """Somebody needs bytes of a tier, or brings blocks up for others."""
        with self.pressure():
            memory, more = self.walk.memory, self.random.randint(1, 1200)
            for _ in range(self.random.choice((0, 0, 1, 3))):
                memory.host._drop_copy(None)
            for device in memory.devices:
                if device.slabs is not None and self.random.random() < 0.5:
                    device.make_room(min(device.slabs.budget.free + more, device.slabs.budget.limit))
                device.promote(None)
            if self.random.random() < 0.5:
                memory.host.make_room(memory.host.slabs.budget.free + more)
            memory.trim(all_free=self.random.random() < 0.5)
        yield from ()

    @contextlib.contextmanager
    def pressure(self) -> Iterator[list[tuple[ComputeDevice, BlockSet]]]:
        """Some sets of blocks; what does not fit does not happen to them."""
        with self.walk.memory.lock:
            found = [(x, blocks) for x in self.walk.memory.devices if x.slabs is not None for blocks in x.sets]
            try:
                yield self.random.sample(found, min(len(found), 3))
            except BudgetError:
                self.walk.counts.refused += 1
            except TransferError:
                self.walk.counts.failed += 1


def assert_same(found: Sequence[torch.Tensor], dense: Sequence[torch.Tensor]) -> None:
    """Bit by bit, whatever NaN there may be."""
    for x, y, name in zip(found, dense, ("keys", "values"), strict=True):
        assert torch.equal(x, y), f"{name} differ"


def walk(seed: int, steps: int, **options: Any) -> Counts:
    """So many operations."""
    trip = Walk(seed, **options)
    for _ in range(steps):
        trip.step()
    trip.end()
    return trip.counts
