"""What a step reads is admitted with what it writes, before anything changes: where one layer's KV must fit as a
tensor, and in the cross-attention of encoder-decoders, which reads what an earlier step wrote."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from families import PAD, build_model, prompt_ids, tiny_model
from placements import ON_HOST
from transformers import (
    EncoderDecoderCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from kvtier import BudgetError, TieredKVCache

pytestmark = pytest.mark.skipif(not ON_HOST, reason="budgets are emulated")

MIB = 2**20


def lengths(cache: TieredKVCache) -> list[int]:
    return [layer.get_seq_length() for layer in cache.layers]


def assert_read_within_budgets(cache: TieredKVCache) -> None:
    """No layer was read through memory that no budget counts."""
    cache.check_integrity()
    stats = cache.stats
    assert "attention" not in stats.dense_fallback_ops
    assert stats.device.peak_bytes <= stats.device.budget
    assert stats.host.peak_bytes <= stats.host.budget


def llama() -> LlamaForCausalLM:
    """2 layers, KV of width 16."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            vocab_size=97,
        )
    ).eval()


@torch.no_grad()
@pytest.mark.parametrize("budget", [2560, 3584, 4095, 4096, 4608, 5120])
def test_a_step_is_read_or_refused_before_it_changes_a_layer(budget: int) -> None:
    model, ids = llama(), torch.randint(0, 97, (1, 19), generator=torch.Generator().manual_seed(0))
    cache = TieredKVCache(model.config, device_budget=budget, block_size=4, host_attention=False)
    done, length = 0, 0
    try:
        for tokens in (19, 1):  # the 20th token takes no new block
            model(ids[:, :tokens], past_key_values=cache)
            length, done = length + tokens, done + 1
    except BudgetError:
        assert done == 0, "what a decode step reads was not admitted with the prompt"
    assert lengths(cache) == [length, length]
    assert_read_within_budgets(cache)


@torch.no_grad()
def test_needed_holds_what_the_forward_takes_beside_its_blocks() -> None:
    """Batch 3 of a tiny gpt2: a workspace that is roomier than needed once took what was promised."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=97, n_positions=64, bos_token_id=None, eos_token_id=None
    )
    model = GPT2LMHeadModel(config).eval()
    forwards = (13, 1, 1, 5)

    def refused(budget: int) -> tuple[int, int] | None:
        cache = TieredKVCache(config, host_budget=budget, block_size=1, host_attention=False)
        rng = torch.Generator().manual_seed(0)
        for i, tokens in enumerate(forwards):
            try:
                model(torch.randint(0, 97, (3, tokens), generator=rng), past_key_values=cache)
            except BudgetError as error:
                assert len(set(lengths(cache))) == 1
                return i, error.needed
        assert_read_within_budgets(cache)
        return None

    budget, step = 1, -1
    while (found := refused(budget)) is not None:
        assert found[0] > step, "the budget that was named does not do"
        assert refused(found[1] - 1) == found, "a smaller one does"
        step, budget = found


FAMILIES = ("t5", "bart", "whisper")


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    if name != "whisper":
        return tiny_model(name)
    torch.manual_seed(0)
    return WhisperForConditionalGeneration(
        WhisperConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=1,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=16,
            decoder_ffn_dim=16,
            num_mel_bins=8,
            max_source_positions=10,
            max_target_positions=20,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
            begin_suppress_tokens=None,
        )
    ).eval()


def decoder_steps(name: str, cache: EncoderDecoderCache) -> Iterator[int]:
    """A first forward of an encoder-decoder and some steps of its decoder."""
    model = model_of(name)
    if name == "whisper":
        frames = 2 * model.config.max_source_positions
        features = torch.randn(2, model.config.num_mel_bins, frames, generator=torch.Generator().manual_seed(0))
        encoded = model.get_encoder()(features)
    else:
        encoded = model.get_encoder()(prompt_ids(length=40))
    for n in range(5):
        ids = prompt_ids(length=3 if n == 0 else 1, seed=n).clamp(min=PAD + 1, max=63)
        model(decoder_input_ids=ids, encoder_outputs=encoded, past_key_values=cache)
        yield n


def halves(name: str, **of_cross: int) -> EncoderDecoderCache:
    config = model_of(name).config
    own = TieredKVCache(config, device_budget=8 * MIB, block_size=4, host_attention=False)
    return EncoderDecoderCache(own, TieredKVCache(config, block_size=4, host_attention=False, **of_cross))


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tier", ["device", "host"])
def test_what_cross_attention_reads_later_is_admitted_with_what_it_writes(name: str, tier: str) -> None:
    budget, refusals = 1, 0
    while True:
        cache = halves(name, **{f"{tier}_budget": budget})
        cross = cache.cross_attention_cache
        steps = decoder_steps(name, cache)
        try:
            next(steps)
        except BudgetError as error:
            assert set(lengths(cross)) == {0}
            assert cross.stats.device.used_blocks == cross.stats.host.used_blocks == 0
            budget, refusals = max(error.needed, budget + 1), refusals + 1
            continue
        assert len(list(steps)) == 4, "a later step, which writes nothing there, is not refused"
        break
    assert refusals == 1, "the first forward says what all of them need"
    assert len(set(lengths(cross))) == 1
    assert_read_within_budgets(cross)
    # One byte less is too little.
    with pytest.raises(BudgetError):
        list(decoder_steps(name, halves(name, **{f"{tier}_budget": budget - 1})))


@torch.no_grad()
def test_reading_copying_and_pickling_make_no_later_step_dearer() -> None:
    """A layer that was made dense once is not dense for good."""
    model, ids = build_model("llama", "sdpa"), prompt_ids(rows=1, length=60)

    def run(budget: int, look: bool) -> TieredKVCache:
        cache = TieredKVCache(model.config, host_budget=budget, block_size=4)
        for n in range(12):
            model(ids if n == 0 else prompt_ids(rows=1, length=1, seed=n), past_key_values=cache)
            if look:
                cache.layers[0].keys.sum()
                cache.layers[1].values.clone()
        return cache

    budget = run(MIB, look=False).stats.host.peak_bytes
    for _ in range(40):
        try:
            run(budget, look=False)
            break
        except BudgetError as error:
            budget = error.needed
    cache = run(budget, look=True)
    assert cache.stats.dense_fallbacks > 0
    assert cache.stats.host.workspace_bytes == 0
    assert_read_within_budgets(cache)


def test_many_queries_outside_of_a_step_read_through_no_memory_that_is_promised_to_others() -> None:
    """The steps had few queries, which need no workspace: open blocks take all of the budget, and none can leave."""
    layers, rows, size, dim, length = 2, 4, 4, 8, 25
    slot = 2 * size * dim * 4
    x = torch.randn(2, rows, 1, length, dim, generator=torch.Generator().manual_seed(0))
    with TieredKVCache(device_budget=(layers * rows + 1) * slot, host_budget=MIB, block_size=size) as cache:
        for start in range(0, length, 9):
            for layer in range(layers):
                cache.update(*x[:, :, :, start : start + 9], layer)
        query, mask = x[0, :, :, -20:], torch.ones(20, length, dtype=torch.bool).tril(length - 20)
        views = cache.layers[0].keys, cache.layers[0].values
        out = F.scaled_dot_product_attention(query, *views, attn_mask=mask)
        torch.testing.assert_close(out, F.scaled_dot_product_attention(query, *x, attn_mask=mask))
        assert cache.stats.device.peak_bytes <= cache.stats.device.budget
        assert cache.stats.dense_fallback_bytes == rows * slot, "one block of each row at a time"
        cache.check_integrity()
