"""The programs at work in a cache: the device's part of split attention, and prompts over a long past."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kvtier import TieredKVCache
from kvtier.attention import streaming
from kvtier.kernels import copies, forms, reference
from kvtier.kernels.params import AttentionParams
from kvtier.testing import held, with_doubles

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LAYERS, HEADS, DIM = 2, 1, 16


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Queries of each launch of the programs that attend."""
    seen: list[int] = []
    launch = forms.AttendForm.launch

    def counted(form: forms.AttendForm, query: torch.Tensor, *args: Any) -> Any:
        seen.append(query.shape[2])
        return launch(form, query, *args)

    monkeypatch.setattr(forms.AttendForm, "launch", counted)
    return seen


class Driven:
    """A cache with blocks in both tiers, and what it should hold."""

    def __init__(self, seed: int, device: torch.device, budget_blocks: int) -> None:
        self.rng = random.Random(seed)
        self.device = device
        self.batch = self.rng.choice((1, 2))
        self.size = self.rng.choice((4, 16))
        self.dtype = self.rng.choice((torch.float32, torch.bfloat16))
        self.generator = torch.Generator().manual_seed(seed)
        block = 2 * HEADS * DIM * self.size * self.dtype.itemsize
        cache = TieredKVCache(device_budget=budget_blocks * block, host_budget=2**22, block_size=self.size)
        # On a real device transfers are the real ones.
        self.cache = cache if device.type == "cuda" else with_doubles(cache, held(seed))
        self.held: list[list[torch.Tensor]] = [[], []]
        self.length = 0

    def new(self, heads: int, count: int) -> torch.Tensor:
        """Random numbers for so many tokens."""
        x = torch.randn(self.batch, heads, count, DIM, generator=self.generator, device="cpu")
        return x.to(self.device, self.dtype)

    def step(self, count: int) -> None:
        """Every layer: new tokens, and attention of as many queries over everything."""
        self.length += count
        at = torch.arange(self.length - count, self.length)[:, None]
        mask = (torch.arange(self.length) <= at).to(self.device)[None, None] if count > 1 else None
        before = [torch.cat(parts, 2) if parts else None for parts in self.held]
        for layer in range(LAYERS):
            k, v, q = self.new(HEADS, count), self.new(HEADS, count), self.new(2 * HEADS, count)
            keys, values = self.cache.update(k, v, layer)
            whole = torch.cat([k, v], 0) if before[layer] is None else torch.cat([before[layer], torch.cat([k, v])], 2)
            self.held[layer] = [whole]
            if keys.shape[2] == count:
                continue  # a first prompt is its own answer
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, enable_gqa=True)
            params = AttentionParams(DIM**-0.5, mask=mask)
            exact, _ = reference.attend(q.double(), *whole.double().chunk(2), params)
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=64 * torch.finfo(self.dtype).eps)


@pytest.mark.parametrize("seed", range(4))
def test_decoding_reads_each_block_where_it_is(seed: int, device: torch.device, launches: list[int]) -> None:
    driven = Driven(seed, device, budget_blocks=8)
    driven.step(5 * driven.size + driven.rng.randint(0, driven.size))
    for _ in range(3):
        driven.step(driven.rng.choice((1, 1, 3)))
    cache = driven.cache
    assert launches
    assert cache.stats.host_attended > 0, "some blocks are attended to by the host"
    assert cache.stats.dense_fallbacks == 0
    assert cache.stats.device.workspace_bytes == 0
    cache.check_integrity()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_prompt_over_a_long_past_needs_no_workspace(seed: int, device: torch.device, launches: list[int]) -> None:
    driven = Driven(10 + seed, device, budget_blocks=8 * (1 + seed % 2))
    driven.step(6 * driven.size + 1)
    assert not launches
    driven.step(17 + driven.rng.randint(0, 5))
    assert len(launches) > LAYERS, "what was fetched is attended to apart from what was there"
    assert driven.cache.stats.device.workspace_bytes == 0
    assert driven.cache.stats.bytes_up > 0
    driven.cache.check_integrity()


def test_sinks_count_once_over_what_is_there_and_what_is_fetched(device: torch.device) -> None:
    driven = Driven(3, device, budget_blocks=8)
    driven.step(4 * driven.size + 1)
    driven.step(20)
    reader = driven.cache._forward.readers[0]
    query = driven.new(2, 20)
    params = AttentionParams(0.3, causal=True, window=4 * driven.size, softcap=2.0, sinks=torch.randn(2).to(device))
    out = streaming.attend(reader, driven.length, query, params)
    exact, _ = reference.attend(query.double(), *driven.held[0][0].double().chunk(2), params)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=64 * torch.finfo(driven.dtype).eps)


def test_tokens_of_all_rows_are_written_and_gathered_in_one_launch_each(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"append": 0, "gather": 0}
    for owner, attribute, name in ((copies.PreparedAppend, "__call__", "append"), (copies, "gather", "gather")):
        function = getattr(owner, attribute)

        def counted(*args: Any, name: str = name, function: Any = function) -> None:
            calls[name] += 1
            function(*args)

        monkeypatch.setattr(owner, attribute, counted)
    torch.manual_seed(0)
    cache = TieredKVCache(device_budget=2**20, host_budget=2**20, block_size=4, host_attention=False)
    held: list[torch.Tensor] = []
    for count in (6, 1, 1, 1, 1, 2, 1):
        k, v = (torch.randn(3, 2, count, 8).to(device) for _ in range(2))
        held.append(torch.cat([k, v], 3))
        keys, values = cache.update(k, v, 0)
        whole = torch.cat(held, 2)
        assert torch.equal(torch.cat([keys + 0, values + 0], 3), whole), "bit for bit"
    assert calls["append"] == 2, "every single token behind another one, but those that begin a block"
    assert calls["gather"] > 0
    cache.check_integrity()
