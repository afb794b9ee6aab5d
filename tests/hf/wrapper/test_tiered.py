"""Within `kvtier.tiered`, every `generate` of a model has a tiered cache and gives its tokens; outside, none has."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, PAD, attentions, build_model, prompt_ids, tiny_model
from placements import ON_HOST
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel, T5Gemma2Config
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import LogitsProcessor

import kvtier
from kvtier import ConfigError, TieredKVCache
from kvtier.hf.models.names import CACHE

NEW_TOKENS = 6
_METHODS = ("generate", "_prepare_cache_for_generation")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    """Whatever a test does, Transformers is as it was when the last model is no longer tiered."""
    before = [vars(GenerationMixin)[name] for name in _METHODS]
    yield
    gc.collect()
    assert [vars(GenerationMixin)[name] for name in _METHODS] == before


def inputs(model: PreTrainedModel, **options: Any) -> dict[str, Any]:
    found = {"input_ids": prompt_ids(), "max_new_tokens": NEW_TOKENS, "do_sample": False}
    if model.config.is_encoder_decoder:
        found["decoder_input_ids"] = prompt_ids(length=10, seed=5)
    return found | options


def tokens(model: PreTrainedModel, **options: Any) -> Any:
    return model.generate(**inputs(model, **options))


@functools.cache
def llama() -> PreTrainedModel:
    return tiny_model("llama")


class CachesOf(LogitsProcessor):
    """Sees, in the middle of a `generate`, which cache it has."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Called behind each forward."""
        frame = inspect.currentframe()
        while frame is not None and "model_kwargs" not in frame.f_locals:
            frame = frame.f_back
        assert frame is not None
        self.seen.append(frame.f_locals["model_kwargs"].get(CACHE))
        return scores


def cache_of(model: PreTrainedModel, **options: Any) -> Any:
    """The cache that a call of `generate` has."""
    spy = CachesOf()
    tokens(model, logits_processor=[spy], **options)
    return spy.seen[0]


# ---------------------------------------------------------------------------------- what it computes


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tiered])
def test_any_model_gives_the_tokens_of_before_and_its_layers_are_tiered(name: str) -> None:
    model = tiny_model(name, attentions(name)[-1])
    expected = tokens(model)
    with kvtier.tiered(model, block_size=4) as used:
        assert torch.equal(tokens(model), expected)
    assert used.calls == 1
    assert used.stats.steps >= NEW_TOKENS
    tier = used.stats.host if ON_HOST else used.stats.device
    assert tier.peak_bytes > 0
    assert tier.bytes == 0, "the cache of the call is closed"


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 3},
        {"prefill_chunk_size": 16},
        {"prompt_lookup_num_tokens": 3, "input_ids": prompt_ids(rows=1)},
        {"attention_mask": torch.tensor([[0] * 7 + [1] * 33, [1] * 40])},
        {"cache_implementation": "dynamic"},
    ],
    ids=lambda x: ",".join(x),
)
def test_every_way_to_decode_gives_the_tokens_of_before(options: dict[str, Any]) -> None:
    model = llama()
    torch.manual_seed(0)
    expected = tokens(model, **options)
    torch.manual_seed(0)
    with kvtier.tiered(model, device_budget="80KiB", block_size=4) as used:
        assert torch.equal(tokens(model, **options), expected)
    assert used.calls == 1
    assert used.left == {}


def test_an_assistant_may_be_tiered_too() -> None:
    model, assistant = llama(), build_model("llama", "sdpa", seed=2)
    options = {"input_ids": prompt_ids(rows=1), "max_new_tokens": 12}
    expected = tokens(model, assistant_model=assistant, **options)
    with kvtier.tiered(model) as used, kvtier.tiered(assistant, block_size=4) as helping:
        assert torch.equal(tokens(model, assistant_model=assistant, **options), expected)
    assert used.calls == 1
    assert helping.calls >= 1


def test_both_attentions_of_an_encoder_decoder_share_one_budget() -> None:
    model = tiny_model("bart")
    with kvtier.tiered(model, host_budget="256KiB", block_size=4) as used:
        cache = cache_of(model)
        assert isinstance(cache, EncoderDecoderCache)
        halves = cache.self_attention_cache, cache.cross_attention_cache
        assert all(type(half) is TieredKVCache for half in halves)
        assert halves[0]._forward.memory is halves[1]._forward.memory
    assert used.stats.host.budget == 256 * 1024


def test_cross_attention_has_no_windows_where_the_decoder_has_them() -> None:
    torch.manual_seed(0)
    text = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    config = T5Gemma2Config(
        encoder={"text_config": text, "vision_config": vision}, decoder=text, decoder_start_token_id=1
    )
    model = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = PAD
    ids = prompt_ids(length=12) % 64
    call = {"input_ids": ids, "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**call)
    with kvtier.tiered(model, block_size=4) as used:
        spy = CachesOf()
        assert torch.equal(model.generate(**call, logits_processor=[spy]), expected)
    cache = spy.seen[0]
    assert type(cache.self_attention_cache) is TieredKVCache
    assert type(cache.cross_attention_cache) is TieredKVCache
    assert used.calls == 1


# -------------------------------------------------------------------------------- what has a cache


def test_what_the_caller_asks_for_is_left_and_counted() -> None:
    model = llama()
    given = DynamicCache(config=model.config)
    with kvtier.tiered(model) as used:
        assert cache_of(model, past_key_values=given) is given
        assert cache_of(model, use_cache=False) is None
        assert type(cache_of(model, cache_implementation="static")) is transformers.StaticCache
        with TieredKVCache(model.config) as mine:
            assert cache_of(model, past_key_values=mine) is mine
        assert type(cache_of(model)) is TieredKVCache
    assert used.left == {"the caller gave a cache": 2, "use_cache=False": 1, "cache_implementation='static'": 1}
    assert used.calls == 1


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if not family.tiered])
def test_a_model_without_a_layer_to_tier_is_left(name: str) -> None:
    model = tiny_model(name)
    expected = tokens(model)
    with pytest.warns(RuntimeWarning, match="keeps its whole past"), kvtier.tiered(model) as used:
        assert torch.equal(tokens(model), expected)
    assert used.calls == 0


def test_other_models_are_left() -> None:
    model, other = llama(), build_model("llama", "sdpa", seed=2)
    with kvtier.tiered(model):
        assert type(cache_of(model)) is TieredKVCache
        assert type(cache_of(other)) is DynamicCache


def test_a_block_in_which_nothing_was_tiered_says_why() -> None:
    model = llama()
    with pytest.warns(RuntimeWarning, match=r"left as they are: cache_implementation='static' \(1 x\)"):  # noqa: SIM117
        with kvtier.tiered(model):
            tokens(model, cache_implementation="static")
    with pytest.warns(RuntimeWarning, match="None was called"), kvtier.tiered(model):
        tokens(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(KeyError), kvtier.tiered(model):
            raise KeyError  # an error of its own is enough


def test_a_generate_that_was_looked_up_before_has_a_tiered_cache_too() -> None:
    model = llama()
    bound = model.generate
    expected = tokens(model)
    with kvtier.tiered(model, block_size=4) as used:
        assert torch.equal(bound(**inputs(model)), expected)
        assert used.calls == 1
        assert used.last is not None
        assert used.last.steps >= NEW_TOKENS
        tier = "host" if ON_HOST else "device"
        assert getattr(used.stats, tier).used_blocks == 0
        kept = bound(**inputs(model, return_dict_in_generate=True)).past_key_values
        assert used.calls == 2
        assert kept.get_seq_length() > 0
        assert getattr(used.stats, tier).used_blocks > 0
        del kept
        assert getattr(used.stats, tier).used_blocks == 0


class Wrapper(torch.nn.Module):
    """As adapters and trainers wrap a model."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.inner = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The inner model's."""
        return self.inner.generate(*args, **kwargs)


def test_a_model_in_a_wrapper_is_found() -> None:
    wrapper = Wrapper(llama())
    with kvtier.tiered(wrapper) as used:
        tokens(llama())
        wrapper.generate(**inputs(llama()))
    assert used.calls == 2


def test_a_compiled_model_is_found() -> None:
    model = build_model("llama", "sdpa")
    expected = tokens(model)
    compiled: Any = torch.compile(model, backend="eager")
    with kvtier.tiered(compiled, block_size=4) as used:
        assert torch.equal(compiled.generate(**inputs(model)), expected)
        model.forward = torch.compile(model.forward, backend="eager")
        assert torch.equal(tokens(model), expected)
    assert used.calls == 2


# ----------------------------------------------------------------------------------- what is returned


def test_a_returned_cache_is_the_callers_and_usable_after_the_block() -> None:
    model = llama()
    expected = tokens(model, return_dict_in_generate=True)
    with kvtier.tiered(model, block_size=4) as used:
        output = tokens(model, return_dict_in_generate=True)
    assert type(output) is type(expected)
    assert torch.equal(output.sequences, expected.sequences)
    assert used.last is not None
    cache = output.past_key_values
    assert type(cache) is TieredKVCache
    assert torch.allclose(cache.layers[0].keys.clone(), expected.past_key_values.layers[0].keys, atol=1e-5)
    more = {"input_ids": output.sequences, "max_new_tokens": 4, "do_sample": False}
    again = model.generate(**more, past_key_values=cache)
    assert torch.equal(again, model.generate(**more, past_key_values=expected.past_key_values))
    memory = cache._forward.memory
    del cache, output
    gc.collect()
    assert memory.stats.host.bytes == 0


def test_statistics_are_of_the_last_call_and_of_all() -> None:
    model = llama()
    with kvtier.tiered(model, device_budget="80KiB", host_budget="1MiB", block_size=4) as used:
        assert used.last is None
        tokens(model)
        first = used.last
        tokens(model, max_new_tokens=3 * NEW_TOKENS)
        assert first is not None
        assert used.last is not None
        assert used.last.steps > first.steps > 0
        assert used.stats.steps == first.steps + used.last.steps
        assert used.stats.bytes_down == first.bytes_down + used.last.bytes_down > 0
        assert used.stats.device.peak_bytes == max(first.device.peak_bytes, used.last.device.peak_bytes) > 0
    after = used.stats
    assert after.steps == first.steps + used.last.steps, "they stay"
    assert (after.device.budget, after.host.budget) == (80 * 1024, 2**20)
    assert after.device.bytes == after.host.bytes == 0


# ------------------------------------------------------------------------------------ begin and end


class Boom(Exception):
    """Raised in the middle of a call."""


def failing(*args: Any) -> torch.Tensor:
    raise Boom


def test_a_call_that_fails_gives_its_cache_back_while_the_error_is_held() -> None:
    model = llama()
    with kvtier.tiered(model) as used:
        with pytest.raises(Boom) as held:
            tokens(model, logits_processor=[failing])
        assert used.stats.host.bytes == 0
        assert used.calls == 1
        tokens(model)
        assert used.calls == 2
    del held


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_blocks_end_in_any_order_and_the_last_one_that_is_open_serves(order: tuple[int, ...]) -> None:
    model = llama()
    blocks = [kvtier.tiered(model, block_size=size) for size in (4, 8, 16)]
    served = [0, 0, 0]
    for each in blocks:
        each.__enter__()
    is_open = {0, 1, 2}
    for ends in order:
        tokens(model)
        served[max(is_open)] += 1
        assert [x.calls for x in blocks] == served
        blocks[ends].__exit__(KeyError, KeyError(), None)
        is_open.remove(ends)
    assert type(cache_of(model)) is DynamicCache


def test_a_block_may_be_entered_again_inside_itself_and_afterwards() -> None:
    model = llama()
    used = kvtier.tiered(model)
    with used:
        with used:
            tokens(model)
        tokens(model)
    with used:
        tokens(model)
    assert used.calls == 3
    assert type(cache_of(model)) is DynamicCache


def test_tier_is_undone_by_untier_and_by_itself() -> None:
    model = llama()
    first = kvtier.tier(model, block_size=4)
    second = kvtier.tier(model, block_size=8)
    tokens(model)
    assert (first.calls, second.calls) == (0, 1), "the second call replaces the first"
    with kvtier.tiered(model) as inner:
        tokens(model)
        kvtier.untier(model)
        tokens(model)
    assert (inner.calls, second.calls) == (2, 1), "a block ends by itself"
    assert type(cache_of(model)) is DynamicCache
    kvtier.untier(model)  # nothing
    with kvtier.tier(model) as used:
        tokens(model)
    assert used.calls == 1
    assert type(cache_of(model)) is DynamicCache


def test_it_ends_also_with_an_error() -> None:
    model = llama()
    with pytest.raises(Boom), kvtier.tiered(model):
        raise Boom
    assert type(cache_of(model)) is DynamicCache


def test_a_wrapper_around_ours_is_kept_and_ours_does_nothing_then(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = llama(), []
    before = GenerationMixin.generate
    with kvtier.tiered(model) as used:
        ours = GenerationMixin.generate

        def theirs(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(self)
            return ours(self, *args, **kwargs)

        GenerationMixin.generate = theirs
        tokens(model)
    assert type(cache_of(model)) is DynamicCache
    assert len(seen) == 2
    with kvtier.tiered(model) as again:
        tokens(model)
        assert again.calls == 1
        GenerationMixin.generate = ours  # they end
    assert GenerationMixin.generate is before
    assert used.calls == 1


# ------------------------------------------------------------------------------------- the model


def test_a_tiered_model_is_copied_pickled_and_saved_as_ever(tmp_path: Any) -> None:
    model = build_model("llama", "sdpa")
    before, names = type(model), set(vars(model))
    with kvtier.tiered(model) as used:
        tokens(model)
        assert set(vars(model)) == names
        assert type(model) is before
        twin = copy.deepcopy(model)
        assert type(cache_of(twin)) is DynamicCache
        stream = io.BytesIO()
        torch.save(model, stream)
        assert b"kvtier" not in stream.getvalue()
        model.save_pretrained(tmp_path)
    assert used.calls == 1
    assert (tmp_path / "config.json").exists()
    with pytest.raises(ConfigError):
        copy.copy(used)


def test_a_model_that_nobody_holds_is_collected_while_it_is_tiered() -> None:
    model = build_model("llama", "sdpa")
    used = kvtier.tier(model)
    tokens(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert used.calls == 1
    used.untier()


# --------------------------------------------------------------------------------------- threads


def test_threads_have_caches_of_their_own_in_one_budget() -> None:
    model = llama()
    lengths = [10, 20, 30, 40]
    expected = [tokens(model, input_ids=prompt_ids(length=n)) for n in lengths]
    found: dict[int, list[torch.Tensor]] = {n: [] for n in lengths}
    failures: list[BaseException] = []

    def work(n: int) -> None:
        try:
            for _ in range(5):
                with expected[0].device:  # a thread has a default device of its own
                    found[n].append(tokens(model, input_ids=prompt_ids(length=n)))
        except BaseException as error:
            failures.append(error)

    with kvtier.tiered(model, device_budget="256KiB", host_budget="2MiB", block_size=4) as used:
        threads = [threading.Thread(target=work, args=(n,)) for n in lengths]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert used.stats.device.bytes <= 256 * 1024
            assert used.stats.steps <= 20 * (NEW_TOKENS + 1)
            threads[0].join(0.01)
        for thread in threads:
            thread.join()
    assert failures == []
    assert all(torch.equal(each, x) for x, n in zip(expected, lengths, strict=True) for each in found[n])
    assert used.calls == 20
    assert used.stats.steps >= 20 * NEW_TOKENS


def test_a_block_may_end_while_another_thread_generates() -> None:
    model = llama()
    expected = tokens(model)
    inside, go_on, result = threading.Event(), threading.Event(), []

    def wait(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inside.set()
        assert go_on.wait(60)
        return scores

    def generate() -> None:
        with expected.device:  # a thread has a default device of its own
            result.append(tokens(model, logits_processor=[wait]))

    with kvtier.tiered(model) as used:
        thread = threading.Thread(target=generate)
        thread.start()
        assert inside.wait(60)
    assert type(cache_of(model)) is DynamicCache
    go_on.set()
    thread.join()
    assert torch.equal(result[0], expected)
    assert used.calls == 1
    assert used.stats.host.bytes == 0


# ---------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"device_budget": "8 gigs"}, "device_budget"),
        ({"block_size": 0}, "block_size"),
        ({"policy": "fastest"}, "policy"),
        ({"memory": 3}, "TieredMemory"),
    ],
)
def test_an_option_that_is_wrong_is_an_error_at_once(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        kvtier.tiered(llama(), **options)
    with pytest.raises(ConfigError, match=match):
        kvtier.tier(llama(), **options)
    assert type(cache_of(llama())) is DynamicCache


def test_what_is_no_model_is_an_error_that_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="not an object of str"):
        kvtier.tiered("llama")
    with pytest.raises(ConfigError, match="generates"):
        kvtier.tiered(torch.nn.Linear(1, 1))
    pipe = type("Pipe", (), {"model": llama()})()
    with pytest.raises(ConfigError, match=r"\.model"):
        kvtier.tiered(pipe)


def test_a_memory_that_is_given_stays_its_owners() -> None:
    model = llama()
    with kvtier.TieredMemory(host_budget="2MiB") as memory:
        with kvtier.tiered(model, memory=memory, block_size=4) as used:
            tokens(model)
        tokens(model, past_key_values=TieredKVCache(model.config, memory=memory))
        assert used.stats.steps < memory.stats.steps
        assert used.calls == 1


def test_budgets_of_what_is_free_are_found_out_again_when_no_call_is_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvtier.memory.storage import system

    model, budgets = llama(), []
    with kvtier.tiered(model, host_budget=0.5) as used:
        for free in (2**30, 2**31):
            monkeypatch.setattr(system, "free_host_memory", lambda free=free: free)
            tokens(model)
            assert used.last is not None
            budgets.append(used.last.host.budget)
    assert budgets == [2**29, 2**30]


@pytest.mark.parametrize("kind", ["Mamba", "FalconMamba", "Mamba2"])
@torch.no_grad()
def test_a_model_of_recurrent_layers_alone_generates(kind: str) -> None:
    more = {"num_heads": 4, "head_dim": 16, "n_groups": 1} if kind == "Mamba2" else {}
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8, **more
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    ids, options = prompt_ids(rows=1, length=9), {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    want = model.generate(ids, cache_params=DynamicCache(config=config), **options)
    assert torch.equal(model.generate(ids, cache_params=TieredKVCache(config), **options), want)
