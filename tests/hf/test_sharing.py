"""Rows that are equal bit by bit share their blocks: beams and return sequences hold their prompt once."""

from typing import Any

import pytest
import torch
from families import prompt_ids, tiny_model
from placements import ROOMY, tiered_cache
from transformers import LogitsProcessor, LogitsProcessorList

from kvtier import TieredKVCache

BLOCK_SIZE = 8
PROMPT = prompt_ids(rows=1, length=45)  # ends in a part of a block

FOUR_ROWS = {
    "beams": {"num_beams": 4},
    "beams_returned": {"num_beams": 4, "num_return_sequences": 4},
    "return_sequences": {"num_return_sequences": 4, "do_sample": True},
    "beam_sampling": {"num_beams": 4, "do_sample": True},
}


class StatsAfterPrefill(LogitsProcessor):
    """Keeps the stats of `cache` as they are when the first logits arrive: right after the prefill."""

    def __init__(self, cache: TieredKVCache) -> None:
        self.cache = cache
        self.stats: Any = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.stats is None:
            self.stats = self.cache.stats
        return scores


def prefill_stats(family: str, cache: TieredKVCache, prompt: torch.Tensor = PROMPT, **options: Any) -> Any:
    observer = StatsAfterPrefill(cache)
    torch.manual_seed(0)
    tiny_model(family).generate(
        prompt,
        past_key_values=cache,
        max_new_tokens=6,
        logits_processor=LogitsProcessorList([observer]),
        **({"do_sample": False} | options),
    )
    return observer.stats


def used_blocks(stats: Any) -> int:
    return stats.device.used_blocks + stats.host.used_blocks


@pytest.mark.parametrize("device_budget", [None, ROOMY], ids=["host", "device"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
@pytest.mark.parametrize("several", FOUR_ROWS)
def test_four_rows_of_one_prompt_hold_it_once(several: str, family: str, device_budget: int | None) -> None:
    model = tiny_model(family)
    single = prefill_stats(family, tiered_cache(model, device_budget, block_size=BLOCK_SIZE))
    cache = tiered_cache(model, device_budget, block_size=BLOCK_SIZE)
    four = prefill_stats(family, cache, **FOUR_ROWS[several])
    assert used_blocks(single) > 0
    assert used_blocks(four) == used_blocks(single)
    for tier in ("device", "host"):
        one, all_four = getattr(single, tier), getattr(four, tier)
        assert all_four.bytes - all_four.workspace_bytes <= one.bytes - one.workspace_bytes
    full_blocks = PROMPT.shape[1] // BLOCK_SIZE / -(-PROMPT.shape[1] // BLOCK_SIZE)
    assert used_blocks(cache.stats) <= used_blocks(single) * (full_blocks + 4 * (1 - full_blocks) + 4 / 6)
    cache.check_integrity()


def test_different_prompts_do_not_share() -> None:
    model = tiny_model("llama")
    single = prefill_stats("llama", tiered_cache(model, block_size=BLOCK_SIZE))
    different = prompt_ids(rows=4, length=PROMPT.shape[1], seed=7)
    four = prefill_stats("llama", tiered_cache(model, block_size=BLOCK_SIZE), different)
    assert used_blocks(four) == 4 * used_blocks(single)


def test_repeated_rows_share_until_they_are_written() -> None:
    model = tiny_model("llama")
    cache = tiered_cache(model, block_size=BLOCK_SIZE)
    model(input_ids=PROMPT, past_key_values=cache)
    before = used_blocks(cache.stats)
    cache.batch_repeat_interleave(4)
    assert used_blocks(cache.stats) == before
    model(input_ids=prompt_ids(rows=4, length=1), past_key_values=cache)
    copied_tails = 3 * model.config.num_hidden_layers
    assert used_blocks(cache.stats) == before + copied_tails
    cache.batch_select_indices(torch.tensor([2]))
    assert used_blocks(cache.stats) == before
    cache.check_integrity()
