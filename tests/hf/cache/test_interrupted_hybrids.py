"""A forward of a model with recurrent layers that ends in the middle: the next one is right, or refused until `reset`.

Their states change in place, some of them behind the cache's back, and cannot be taken back.
"""

import copy
import functools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from families import FAMILIES, Family, attentions, build_model, dynamic_cache, prompt_ids
from placements import assert_same_outcome, outcome
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import Cache, DynamicCache, PreTrainedModel

from kvtier import InterruptedStepError, TieredKVCache
from kvtier.hf.cache import recurrent
from kvtier.hf.models.generation import cache_argument

# Some of these types keep all KV next to something else: that the cache then saves nothing is told elsewhere.
pytestmark = [pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning"), pytest.mark.sampled(3)]

IDS = prompt_ids(rows=2, length=24)
_LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MLA = {"num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 16}
_MOE = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_KDA = {"num_heads": 4, "head_dim": 12, "short_conv_kernel_size": 4, "kda_layers": [1, 3], "full_attn_layers": [2, 4]}
_HEADS = {"mamba_n_heads": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_d_head": 12, "mamba_d_ssm": 96}
_NGRAMS = {
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 48,
    "ngram_vocab_size_base": 64,
    "make_ngram_vocab_size_divisible_by": 8,
    "heads_per_ngram": 2,
    "split_ngram_parts": 4,
    "eos_token_id": 127,
}
_WINDOWS = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
#: More kinds of recurrent layers than the families have.
KINDS = {
    # Convolutions only: such a model can be cropped, and so assisted.
    "lfm2": ("Lfm2", {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}),
    # Attention and recurrence in every layer.
    "falcon_h1": ("FalconH1", _HEADS),
    # These do not say when they are about to change a state, the second in 5.17 only.
    "kimi_linear": ("KimiLinear", _LINEAR | _MLA | _MOE | {"linear_attn_config": _KDA}),
    "olmo_hybrid": ("OlmoHybrid", _LINEAR),
    # Several states in a layer; in the second, not all of one kind.
    "inkling": ("InklingText", _MOE | _WINDOWS | {"num_hidden_layers": 2, "head_dim": 16}),
    "qwen4_exp": (
        "Qwen4ExpText",
        _LINEAR | _MOE | _NGRAMS | _INDEXER | {"head_dim": 16, "hc_count": 2, "indexer_compress_ratio": 4},
    ),
    # No attention at all.
    "mamba": ("Mamba", {"vocab_size": 128, "hidden_size": 48, "state_size": 8, "num_hidden_layers": 3}),
}


@functools.cache
def model_of(name: str) -> PreTrainedModel:
    if name == "jamba_last":
        return build_model("jamba", "sdpa", attn_layer_period=4)  # recurrent, attention, recurrent, recurrent
    kinds = {
        kind: Family(f"{prefix}Config", f"{prefix.removesuffix('Text')}ForCausalLM", settings, kind != "mamba")
        for kind, (prefix, settings) in KINDS.items()
    }
    with patch.dict(FAMILIES, kinds):
        return build_model(name, attentions(name)[-1])


def forward(model: PreTrainedModel, cache: Cache, begin: int, end: int) -> torch.Tensor:
    return model(input_ids=IDS[:, begin:end], **{cache_argument(model): cache}).logits


def forwards(model: PreTrainedModel, cache: Cache, *ends: int, begin: int = 0) -> list[torch.Tensor]:
    """Logits of forwards that end at these tokens, each after the one before."""
    return [forward(model, cache, a, b) for a, b in zip((begin, *ends), ends, strict=False)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    """Within what attention on the host may differ by; a state too old or too new is off by far more."""
    return all(torch.allclose(a, b, rtol=0, atol=1e-3) for a, b in zip(ours, theirs, strict=True))


class Scenario:
    """A cache that has seen some forwards; one that is cut short; and what may follow."""

    def __init__(self, name: str, before: tuple[int, ...], length: int) -> None:
        self.model = model_of(name)
        self.before = before
        self.begin = max(before, default=0)
        self.end = self.begin + length
        self._oracle = functools.cache(self._logits)

    def _logits(self, begins: tuple[int, ...], ends: tuple[int, ...]) -> list[torch.Tensor]:
        cache = dynamic_cache(self.model)
        return [forward(self.model, cache, a, b) for a, b in zip(begins, ends, strict=True)]

    def check(self, cut: Callable[[], AbstractContextManager[Any]], *, tokens: int) -> str:
        """Cut the forward short, then go on with forwards of `tokens` tokens and of one. What became of them."""
        cache = TieredKVCache(self.model.config, block_size=4)
        forwards(self.model, cache, *self.before)
        try:
            with cut():
                forward(self.model, cache, self.begin, self.end)
        except (PulledThePlug, KeyboardInterrupt):
            pass
        else:
            return "not cut"
        # What is raised after the last layer has changed is raised after the forward, for all that a cache can see.
        length = self._length(cache)
        at = self.end if length >= self.end else self.begin
        ends = (at + tokens, at + tokens + 1)
        try:
            logits = forwards(self.model, cache, *ends, begin=at)
        except InterruptedStepError:
            self._check_refused_until_reset(cache, ends)
            return "refused"
        histories = [self.before] * (length < self.end) + [(*self.before, self.end)] * (not 0 <= length < self.end)
        assert any(same(logits, self._after(history, at, ends)) for history in histories), "silently wrong"
        return "right"

    def _after(self, history: tuple[int, ...], at: int, ends: tuple[int, ...]) -> list[torch.Tensor]:
        return self._oracle((0, *history[:-1], at, *ends[:-1]) if history else (at, *ends[:-1]), (*history, *ends))[-2:]

    def _length(self, cache: TieredKVCache) -> int:
        try:
            return cache.get_seq_length()
        except ValueError:
            return -1  # no attention layers: it cannot be known

    def _check_refused_until_reset(self, cache: TieredKVCache, ends: tuple[int, ...]) -> None:
        refused: list[Callable[[], Any]] = [
            lambda: cache.crop(0),
            lambda: cache.crop(-1),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: copy.deepcopy(cache),
            lambda: forward(self.model, cache, self.begin, ends[0]),
            lambda: forward(self.model, cache, self.begin, self.begin + 1),
        ]
        for use in refused:
            with pytest.raises(InterruptedStepError, match=r"reset\(\)"):
                use()
        cache.reset()
        assert same(forwards(self.model, cache, 5, 6), self._oracle((0, 5), (5, 6)))
        cache.check_integrity()


class PulledThePlug(Exception):
    """Not an error that any library would catch."""


@contextmanager
def at_module(module: nn.Module, when: str) -> Iterator[None]:
    def pull(*_: Any) -> None:
        raise PulledThePlug

    handle = module.register_forward_pre_hook(pull) if when == "before" else module.register_forward_hook(pull)
    try:
        yield
    finally:
        handle.remove()


class AtOperation(TorchFunctionMode):
    """`KeyboardInterrupt` in the place of the n-th operation, of the model or of the cache."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.left = n

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.left == 0:
            raise KeyboardInterrupt
        self.left -= 1
        return func(*args, **(kwargs or {}))


def modules_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Every decoder layer and every module of it; of what holds no state only the outermost."""
    for layer in getattr(model, "backbone", model.base_model).layers:
        for path, module in layer.named_modules():
            if not any(f"{stateless}." in path for stateless in ("mlp", "feed_forward")):
                yield module


@contextmanager
def as_on_an_accelerator() -> Iterator[None]:
    """Torch counts changes made by its own kernels, but not by fused ones: it must be found out which ones run."""
    with torch.no_grad(), patch.object(recurrent._State, "opaque", property(lambda self: not self.absent)):
        yield


PHASES = {"prefill": ((), 5), "decode": ((5, 6), 1), "chunk": ((5, 6), 3)}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "jamba_last", "mamba"])
@torch.no_grad()
def test_whichever_module_raises_the_next_forward_is_right_or_refused_until_reset(name: str, phase: str) -> None:
    scenario = Scenario(name, *PHASES[phase])
    # What happens between two modules is cut at operations, too: see below.
    whens = {"prefill": ("before",), "decode": ("before", "after"), "chunk": ("after",)}[phase]
    outcomes = [
        scenario.check(lambda module=module, when=when: at_module(module, when), tokens=1 + 2 * (n % 2))
        for n, module in enumerate(modules_of(scenario.model))
        for when in whens
    ]
    assert {"right", "refused"} <= set(outcomes), "the law was put to the test"


COUNTED = [
    (name, torch.no_grad) for name in ("qwen3_next", "jamba", "jamba_last", "lfm2", "kimi_linear", "olmo_hybrid")
]
#: Of the others, nothing tells how far their first or last recurrent layer got.
NOT_COUNTED = [
    (name, mode) for name in ("qwen3_next", "jamba") for mode in (torch.inference_mode, as_on_an_accelerator)
]


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("name", "mode"), COUNTED + NOT_COUNTED)
def test_a_signal_between_any_two_operations_leaves_the_next_forward_right_or_refused_until_reset(
    name: str, mode: Callable[[], AbstractContextManager[None]], phase: str
) -> None:
    scenario = Scenario(name, *PHASES[phase])
    with mode():
        every = AtOperation(10**6)
        assert scenario.check(lambda: every, tokens=1) == "not cut"
        operations = 10**6 - every.left
        # Prime, so that equal layers end at different operations.
        step = next(p for p in (37, 71, 149, 293, 587) if operations / p < 14)
        outcomes = {scenario.check(lambda n=n: AtOperation(n), tokens=1 + n % 2) for n in range(0, operations, step)}
    assert outcomes == {"right", "refused"}, "the law was put to the test"


def decode_and_chunks(model: PreTrainedModel, cache: Cache) -> Any:
    return forwards(model, cache, 5, 6, 7, 10, 11, 12, 16)


def with_gradients_off_in_two_ways(model: PreTrainedModel, cache: Cache) -> Any:
    logits = forwards(model, cache, 5, 6)
    with torch.inference_mode():
        return [*logits, *(x.clone() for x in forwards(model, cache, 7, 8, 11, begin=6))]


def on_an_accelerator(model: PreTrainedModel, cache: Cache) -> Any:
    with as_on_an_accelerator():
        return decode_and_chunks(model, cache)


def in_inference_mode(model: PreTrainedModel, cache: Cache) -> Any:
    with torch.inference_mode():
        return [x.clone() for x in decode_and_chunks(model, cache)]


def with_beams(model: PreTrainedModel, cache: Cache) -> Any:
    if model.config.model_type == "mamba":
        return None
    return model.generate(IDS, past_key_values=cache, num_beams=3, max_new_tokens=6, do_sample=False)


def in_a_thread(act: Callable[[], Any]) -> Any:
    """What `act` returns or raises in a thread of its own."""
    with torch.no_grad(), ThreadPoolExecutor(1) as threads:
        return threads.submit(lambda: outcome(torch.no_grad()(act))).result(120)


def in_threads_by_turns(model: PreTrainedModel, cache: Cache) -> Any:
    steps = ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11))
    return [in_a_thread(lambda step=step: forward(model, cache, *step)) for step in steps]


def with_reordered_rows(model: PreTrainedModel, cache: Cache) -> Any:
    logits = forwards(model, cache, 5, 6, 7)
    cache.reorder_cache(torch.tensor([1, 0]))
    return logits + forwards(model, cache, 8, 11, 12, begin=7)


def with_a_copy(model: PreTrainedModel, cache: Cache) -> Any:
    forwards(model, cache, 5, 6)
    clone = copy.deepcopy(cache)
    return [*forwards(model, cache, 7, 8, begin=6), *forwards(model, clone, 9, 10, begin=6)]


def assisted(model: PreTrainedModel, cache: Cache) -> Any:
    if model.config.model_type == "mamba":
        return None
    ids = IDS[:1, :8].repeat(1, 3)
    return model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, max_new_tokens=8, do_sample=False)


def assisted_in_inference_mode(model: PreTrainedModel, cache: Cache) -> Any:
    with torch.inference_mode():
        return assisted(model, cache)


def with_states_edited_between_forwards(model: PreTrainedModel, cache: Cache) -> Any:
    """Some users put an earlier state back themselves."""
    logits = []
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11)):
        logits.append(forward(model, cache, begin, end))
        for layer in cache.layers:
            for states in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {})):
                for number, state in states.items():
                    if state is not None:
                        state.mul_(0.5)
                        states[number] = state.clone()
    return logits


def with_questions_between_forwards(model: PreTrainedModel, cache: Cache) -> Any:
    logits = []
    for begin, end in ((0, 5), (5, 6), (6, 7), (7, 10), (10, 11)):
        for index, layer in enumerate(cache.layers):
            if hasattr(layer, "conv_states"):
                cache.has_previous_state(index)
                if hasattr(DynamicCache, "get_conv_state"):  # newer than 5.17
                    cache.get_conv_state(index)
                    cache.is_recording_past(index)
        cache.has_previous_state()
        logits.append(forward(model, cache, begin, end))
    return logits


WAYS: dict[str, Callable[[PreTrainedModel, Cache], Any]] = {
    way.__name__: way
    for way in (
        decode_and_chunks,
        with_gradients_off_in_two_ways,
        on_an_accelerator,
        in_inference_mode,
        with_beams,
        in_threads_by_turns,
        with_reordered_rows,
        with_a_copy,
        assisted,
        assisted_in_inference_mode,
        with_states_edited_between_forwards,
        with_questions_between_forwards,
    )
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3_next", "jamba", "jamba_last", *KINDS])
@torch.no_grad()
def test_forwards_that_end_are_never_taken_for_interrupted(name: str, way: str) -> None:
    if (name, way) == ("qwen4_exp", "with_a_copy") and not hasattr(DynamicCache, "get_conv_state"):
        pytest.skip("in 5.17 this model keeps positions on the cache object, which a copy does not have")
    model = model_of(name)
    expected = outcome(lambda: WAYS[way](model, dynamic_cache(model)))
    cache = TieredKVCache(model.config, block_size=4)
    actual = outcome(lambda: WAYS[way](model, cache))
    if isinstance(expected, list):
        assert same(actual, expected)
    else:
        assert_same_outcome(expected, actual)
    if way == "decode_and_chunks":
        assert cache.stats.steps == 7
