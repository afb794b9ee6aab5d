"""Real transfers, memory that is poisoned when nobody owns it, and budgets that hold less than half of what is read.

On a CUDA device the real engine runs, and any of its streams may be far behind the others. On the CPU the device is
emulated, and transfers come as late as they may.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from kvtier import BudgetError, Policy, TieredKVCache, TieredMemory
from kvtier.cpu import native
from kvtier.memory.tiered import EngineFactory, default_engine
from kvtier.testing import held, with_doubles
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction, Transfer

MIB = 2**20
LAYERS, ROWS, HEADS, DIM, BLOCK = 3, 2, 4, 128, 16
#: Operations of one conversation.
STEPS = {"cpu": 20, "cuda": 60}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]


@pytest.fixture(autouse=True)
def _tiny(one_thread: None) -> Iterator[None]:
    """What is on the CPU is said so, whatever the default device."""
    with torch.no_grad():
        yield


def engine_of(device: str, seed: int) -> EngineFactory:
    """What moves blocks."""
    return default_engine if device == "cuda" else held(seed, eagerness=0.2, late=True)


class Conversation:
    """A cache under pressure beside the plain tensors that it should hold.

    Args:
        device: where the model would be.
        budget: bytes of the device tier.
        host_attention: host threads attend to what is not on the device; else it is fetched.
        dtype: of keys, values and queries.
        seed: of what is done.
        slow: a stream of the engine that is always behind; None: now this one, now that one.
        poison: whether what nobody owns is NaN.
        memory: that others use, too; None: one of its own.

    Attributes:
        compared: attentions that were compared with those over plain tensors.
        refused: operations that did not fit.
    """

    def __init__(
        self,
        device: str,
        budget: int,
        *,
        host_attention: bool,
        dtype: torch.dtype,
        seed: int,
        slow: Direction | None = None,
        poison: bool = True,
        memory: TieredMemory | None = None,
    ) -> None:
        self.random, self.delays = random.Random(seed), random.Random(seed)  # the same is done on every device
        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.dtype, self.slow = torch.device(device), dtype, slow
        if memory is None:
            cache = TieredKVCache(
                device_budget=budget,
                host_budget=8 * budget,
                block_size=BLOCK,
                host_attention=host_attention,
                policy=Policy(write_through=0.0),
            )
            # Poison orders every fetch behind the compute stream: without it fetches begin behind their events alone.
            self.cache = with_doubles(cache, engine_of(device, seed), poison=poison)
        else:
            self.cache = TieredKVCache(memory=memory, block_size=BLOCK, host_attention=host_attention)
        self.plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        # Whoever fetches needs room for one layer as one tensor, open blocks and some to spare.
        row = 2 * HEADS * DIM * dtype.itemsize * ROWS
        self.longest = (budget - (LAYERS + 1) * BLOCK * row) * 4 // (5 * row)
        self.compared = self.refused = 0

    @property
    def length(self) -> int:
        """Tokens of each row."""
        return self.plain[0][0].shape[2] if self.plain else 0

    def new(self, heads: int, tokens: int) -> torch.Tensor:
        """Random numbers for so many tokens of each row, the same on every device."""
        x = torch.randn(ROWS, heads, tokens, DIM, generator=self.generator, device="cpu")
        return x.to(self.device, self.dtype)

    def delay(self) -> None:
        """Let a stream fall behind, up to about a millisecond."""
        if self.device.type == "cpu" or (self.slow is None and self.delays.random() < 0.5):
            return
        streams = [torch.cuda.current_stream()]
        for device in self.cache._forward.memory.devices:
            assert isinstance(device.engine, CudaTransfers)
            streams += device.engine._streams.values()
            if self.slow is not None:
                streams = [device.engine._streams[self.slow]]
        with torch.cuda.stream(self.delays.choice(streams)):
            torch.cuda._sleep(2_000_000 if self.slow else self.delays.choice((50_000, 300_000, 2_000_000)))

    def mask(self, tokens: int) -> torch.Tensor | None:
        """What each of so many queries sees; of one, most often everything."""
        total = self.length + tokens
        if tokens > 1:
            at = torch.arange(total - tokens, total, device=self.device)[:, None]
            return (torch.arange(total, device=self.device) <= at).expand(ROWS, 1, tokens, total)
        if self.random.random() < 0.8:
            return None
        seen = torch.rand(ROWS, 1, 1, total, generator=self.generator, device="cpu") < 0.7
        seen[..., 0] = True
        return seen.to(self.device)

    def forward(self, tokens: int) -> None:
        """Update and attention of every layer, then the comparison, which alone waits for the device."""
        mask, past, outs = self.mask(tokens), self.length, []
        grown = []
        for i in range(LAYERS):
            keys, values = self.new(HEADS, tokens), self.new(HEADS, tokens)
            query = 3 * self.new(2 * HEADS, tokens)  # sharp: few tokens make up the answer
            self.delay()
            views = self.cache.update(keys, values, i)
            whole = (keys, values)
            if past:
                whole = (torch.cat([self.plain[i][0], keys], 2), torch.cat([self.plain[i][1], values], 2))
            grown.append(whole)
            if not past:
                continue  # the answer is what was given
            self.delay()
            ours = F.scaled_dot_product_attention(query, *views, attn_mask=mask, enable_gqa=True)
            with sdpa_kernel(SDPBackend.MATH):
                exact = F.scaled_dot_product_attention(
                    query.float(), *(x.float() for x in whole), attn_mask=mask, enable_gqa=True
                )
            outs.append((ours, exact))
        self.plain = grown
        for ours, exact in outs:
            assert ours.dtype is self.dtype
            some = TOLERANCES[self.dtype]
            torch.testing.assert_close(ours.float(), exact, rtol=some, atol=some)
            self.compared += 1

    def read(self) -> None:
        """What a layer holds, bit by bit."""
        i = self.random.randrange(LAYERS)
        self.delay()
        for ours, plain in zip((self.cache.layers[i].keys, self.cache.layers[i].values), self.plain[i], strict=True):
            assert torch.equal(ours.dense(), plain)

    def crop(self, tokens: int) -> None:
        """Drop the last tokens."""
        self.cache.crop(-tokens)
        self.plain = [tuple(x[:, :, : x.shape[2] - tokens] for x in layer) for layer in self.plain]

    def reorder(self) -> None:
        """Rows change places, or one takes the place of the other."""
        order = torch.tensor([self.random.randrange(ROWS) for _ in range(ROWS)], device=self.device)
        self.cache.reorder_cache(order)
        self.plain = [tuple(x[order] for x in layer) for layer in self.plain]

    def step(self) -> None:
        """One operation; afterwards every count agrees with every other."""
        if not self.length:
            self.forward(self.random.randint(self.longest * 3 // 5, self.longest * 4 // 5))
        elif self.length + 40 > self.longest:
            self.crop(self.random.randint(40, 60))
        chosen = self.random.choice(("decode",) * 6 + ("prompt", "prompt", "crop", "reorder", "read"))
        try:
            if chosen == "decode":
                self.forward(1)
            elif chosen == "prompt":
                self.forward(self.random.choice((3, 9, 17, 40)))
            elif chosen == "crop":
                self.crop(self.random.randint(1, min(2 * BLOCK, max(self.length - 1, 1))))
            elif chosen == "reorder":
                self.reorder()
            else:
                self.read()
        except BudgetError:
            self.refused += 1
            self.cache.crop(0)
            assert self.cache.get_seq_length() == self.length
        self.cache.check_integrity()

    def steps(self, count: int) -> None:
        """So many operations."""
        for _ in range(count):
            self.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("budget", [2 * MIB, 4 * MIB, 16 * MIB], ids=lambda n: f"{n // MIB}MiB")
@pytest.mark.parametrize("host_attention", [True, False], ids=["attended", "fetched"])
@pytest.mark.parametrize("device", DEVICES)
def test_every_attention_is_that_over_plain_tensors(
    device: str, host_attention: bool, budget: int, dtype: torch.dtype
) -> None:
    if host_attention and not native.available():
        pytest.skip("the native library is not compiled")
    talk = Conversation(
        device,
        budget,
        host_attention=host_attention,
        dtype=dtype,
        seed=budget // MIB,
        poison=dtype is torch.float32 or budget > 4 * MIB,
    )
    talk.steps(STEPS[device])
    for _ in range(3):
        talk.read()
    stats = talk.cache.stats
    assert talk.compared > 2 * LAYERS * STEPS[device] // 5
    assert talk.refused <= STEPS[device] // 5
    assert stats.evictions > 0
    assert stats.host_attended + stats.host_blocks > 0 if host_attention else stats.block_fetches > 0
    assert stats.device.peak_bytes <= budget
    talk.cache.close()


@pytest.mark.parametrize("host_attention", [True, False], ids=["attended", "fetched"])
@pytest.mark.parametrize("device", DEVICES)
def test_two_caches_of_one_memory_may_be_on_streams_of_their_own(device: str, host_attention: bool) -> None:
    """Each takes room from the other, whose kernels may not have come by yet."""
    if host_attention and not native.available():
        pytest.skip("the native library is not compiled")
    budget = (3 if host_attention else 4) * MIB
    memory = TieredMemory(device_budget=budget, host_budget=48 * MIB, policy=Policy(write_through=0.0))
    with_doubles(memory, engine_of(device, 0), poison=False)
    talks = [
        Conversation(device, 2 * MIB, host_attention=host_attention, dtype=torch.float32, seed=i, memory=memory)
        for i in range(2)
    ]
    streams = [torch.cuda.Stream() if device == "cuda" else contextlib.nullcontext() for _ in talks]
    for _ in range(STEPS[device]):
        for talk, stream in zip(talks, streams, strict=True):
            with torch.cuda.stream(stream) if isinstance(stream, torch.cuda.Stream) else stream:
                talk.step()
    for talk in talks:
        assert talk.compared > 2 * LAYERS * STEPS[device] // 5
        talk.cache.close()
    assert memory.stats.evictions > 0
    memory.close()


#: Whether the host attends, and which calls wait for copies of which direction. `block` comes before `synchronize`.
WAITS = [
    (True, ("wait",), Direction.RESULT),
    (True, ("block", "synchronize"), Direction.QUERY),
    (False, ("wait",), Direction.FETCH),
]


@pytest.mark.parametrize(("host_attention", "names", "direction"), WAITS, ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_without_one_of_its_waits_it_is_wrong(
    device: str, host_attention: bool, names: Sequence[str], direction: Direction, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the conversations above would not notice."""
    if host_attention and not native.available():
        pytest.skip("the native library is not compiled")

    def without(wait: Callable[[Transfer], None], transfer: Transfer) -> None:
        if transfer.direction is not direction:
            wait(transfer)

    for name in names:
        monkeypatch.setattr(
            Transfer, name, functools.partialmethod(functools.partial(without, getattr(Transfer, name)))
        )
    talk = Conversation(device, 2 * MIB, host_attention=host_attention, dtype=torch.float32, seed=0, slow=direction)
    with pytest.raises(AssertionError, match="not close"):
        talk.steps(STEPS["cuda"])
    monkeypatch.undo()
    talk.cache.close()
