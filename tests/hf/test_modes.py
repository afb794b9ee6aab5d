"""Every way in which Transformers generates gives on a tiered cache what it gives on ``DynamicCache``.

A mode is a function ``(model, cache) -> result``. Where Transformers itself refuses a mode, the same refusal is asked.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import PAD, build_model, dynamic_cache, prompt_ids, tiny_model
from placements import ON_HOST, Placement, assert_same_as_dynamic_cache, assert_same_outcome, outcome, tiered_cache
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import Cache, PreTrainedModel, PreTrainedTokenizerFast, pipeline

Mode = Callable[[PreTrainedModel, Cache], Any]

MODES: dict[str, Mode] = {}
BLOCK_SIZE = 4
PLACEMENTS: tuple[Placement, ...] = ("host", "smallest", "between")
FAMILIES = ("llama", "gemma3", "t5")


def mode(function: Mode) -> Mode:
    MODES[function.__name__] = function
    return function


def generate(model: PreTrainedModel, cache: Cache, *, rows: int = 1, **options: Any) -> Any:
    """Tokens, and where they exist the logits, of a generation of 10 tokens from a random prompt of 21."""
    if "input_ids" not in options and "inputs_embeds" not in options:
        options["input_ids"] = prompt_ids(rows=rows, length=21)
    defaults = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    torch.manual_seed(0)
    output = model.generate(past_key_values=cache, **(defaults | options))
    return output.sequences, output.logits


@mode
def greedy(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, rows=3)


@mode
def sampling(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, rows=2, do_sample=True, temperature=1.5, top_k=20)


@mode
def several_return_sequences(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, rows=2, do_sample=True, num_return_sequences=3)


@mode
def beams(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, rows=2, num_beams=4, num_return_sequences=2)


@mode
def beam_sampling(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, num_beams=3, do_sample=True)


@mode
def group_beams_are_custom_code(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, num_beams=4, num_beam_groups=2, diversity_penalty=0.5)


@mode
def contrastive_search_is_custom_code(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, penalty_alpha=0.6, top_k=4)


@mode
def prompt_lookup(model: PreTrainedModel, cache: Cache) -> Any:
    ids = prompt_ids(rows=1, length=12)
    return generate(model, cache, input_ids=torch.cat([ids, ids, ids], dim=1), prompt_lookup_num_tokens=3)


@functools.cache
def assistant(**options: int) -> PreTrainedModel:
    return build_model("llama", "sdpa", **options)


@mode
def assisted_by_another_model(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, assistant_model=copy.deepcopy(assistant(seed=2, num_hidden_layers=1)))


@mode
def assisted_by_an_agreeing_model(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, assistant_model=copy.deepcopy(assistant()))


@mode
def left_padded_batch(model: PreTrainedModel, cache: Cache) -> Any:
    ids = prompt_ids(rows=3, length=21)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    mask[2, :1] = 0
    return generate(model, cache, input_ids=ids.masked_fill(mask == 0, PAD), attention_mask=mask)


@mode
def continuing_on_the_same_cache(model: PreTrainedModel, cache: Cache) -> Any:
    first, logits = generate(model, cache, rows=2)
    longer = torch.cat([first, prompt_ids(rows=2, length=7, seed=3)], dim=1)
    return first, logits, generate(model, cache, input_ids=longer)


@mode
def chunked_prefill(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, rows=2, prefill_chunk_size=5)


@mode
def chunked_prefill_on_a_warm_cache(model: PreTrainedModel, cache: Cache) -> Any:
    first, _ = generate(model, cache, rows=2)
    longer = torch.cat([first, prompt_ids(rows=2, length=7, seed=3)], dim=1)
    return generate(model, cache, input_ids=longer, prefill_chunk_size=5)


@mode
def inputs_embeds(model: PreTrainedModel, cache: Cache) -> Any:
    embeds = model.get_input_embeddings()(prompt_ids(rows=2, length=21))
    return generate(model, cache, inputs_embeds=embeds)


@mode
def a_static_cache_asked_for_as_well(model: PreTrainedModel, cache: Cache) -> Any:
    return generate(model, cache, cache_implementation="static")


@mode
def a_prompt_that_is_covered_already(model: PreTrainedModel, cache: Cache) -> Any:
    sequences, _ = generate(model, cache)
    model(input_ids=sequences[:, -1:], past_key_values=cache)
    return cache.get_seq_length()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", MODES)
def test_every_mode_gives_what_dynamic_cache_gives(name: str, family: str, placement: Placement) -> None:
    model = tiny_model(family)
    assert_same_as_dynamic_cache(model, MODES[name], placement, block_size=BLOCK_SIZE)


@functools.cache
def half_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return build_model(family, "sdpa").to(dtype)


@torch.no_grad()
def given_tokens(model: PreTrainedModel, cache: Cache) -> Any:
    """Logits of tokens that do not depend on them: where they are equal up to rounding only, half precision may not
    tell the likeliest token from the next."""
    lengths = (21, *[1] * 10)
    ids = [prompt_ids(rows=3, length=n, seed=i) for i, n in enumerate(lengths)]
    return [model(input_ids=x, past_key_values=cache).logits for x in ids]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_half_precision_gives_the_bits_of_dynamic_cache(family: str, dtype: torch.dtype, placement: Placement) -> None:
    run = greedy if ON_HOST else given_tokens
    assert_same_as_dynamic_cache(half_model(family, dtype), run, placement, block_size=BLOCK_SIZE)


def attention_weights(model: PreTrainedModel, cache: Cache) -> Any:
    output = model.generate(
        prompt_ids(rows=2, length=21),
        past_key_values=cache,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_attentions=True,
    )
    if model.config.is_encoder_decoder:
        return output.decoder_attentions, output.cross_attentions
    return output.attentions


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "t5"])
def test_attention_weights_are_those_of_dynamic_cache(family: str, placement: Placement) -> None:
    assert_same_as_dynamic_cache(tiny_model(family, "eager"), attention_weights, placement, block_size=BLOCK_SIZE)


def _word_tokenizer(vocabulary: int = 128) -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", unk_token="w0")


def written_by_a_pipeline(model: PreTrainedModel, cache: Cache) -> Any:
    writer = pipeline("text-generation", model=model, tokenizer=_word_tokenizer(), device=model.device)
    prompt = " ".join(f"w{i}" for i in prompt_ids(rows=1, length=21)[0].tolist())
    return writer(prompt, past_key_values=cache, max_new_tokens=10, do_sample=False)


@functools.cache
def model_for_a_pipeline() -> PreTrainedModel:
    return build_model("llama", "sdpa")  # its own, for a pipeline changes generation settings


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_text_generation_pipeline_takes_the_cache(placement: Placement) -> None:
    assert_same_as_dynamic_cache(model_for_a_pipeline(), written_by_a_pipeline, placement, block_size=BLOCK_SIZE)


def test_it_is_never_compiled_as_a_static_cache() -> None:
    model = tiny_model("llama")
    cache = tiered_cache(model)
    assert not cache.is_compileable
    greedy(model, cache)
    assert not cache.is_compileable


def test_early_initialization_is_honoured_or_refused() -> None:
    """It is meant for static caches; afterwards tokens are still right."""
    model = tiny_model("llama")

    def initialise_and_generate(cache: Cache) -> Any:
        cache.early_initialization(batch_size=1, num_heads=2, head_dim=12, dtype=torch.float32, device=model.device)
        return generate(model, cache)

    expected = outcome(lambda: initialise_and_generate(dynamic_cache(model)))
    assert_same_outcome(expected, outcome(lambda: initialise_and_generate(tiered_cache(model))))
