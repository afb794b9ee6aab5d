"""Models that run some layers several times, each time with keys and values of its own."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from families import _draw_wide_weights, dynamic_cache, prompt_ids, tiny_model
from model_types import OVER, VOCAB, tiny_config, types
from placements import Placement, alike, assert_same_as_dynamic_cache, tiered_cache
from transformers import Cache, PreTrainedModel

from kvtier import BudgetError, Engine, InterruptedStepError, UnsupportedError
from kvtier.hf.models.layers import looped
from kvtier.hf.models.names import CACHE
from kvtier.serving.runners.packed import PackedRunner
from kvtier.serving.runners.runner import Work

#: Layers 1 and 2 of 4 run three times, and write to layers 1, 2 and 4 to 7 of the cache.
_DORY = {
    "n_input_layers": 1,
    "n_recurrent_layers": 2,
    "n_output_layers": 1,
    "n_recurrent_loops": 3,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_INKLING = {
    "loop_layer_index_start": 1,
    "loop_layer_index_end": 3,
    "loop_num_passes": 3,
    "n_layers_per_attn_res_block": 1,
    "unpadded_vocab_size": VOCAB,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "swa_head_dim": 8,
    "layer_types": ["hybrid_sliding", "hybrid"] * 2,
}
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dory": ("dory", "DoryForCausalLM", _DORY),
    "dory_last_loop": ("dory", "DoryForCausalLM", _DORY | {"recurrent_kv_cache_mode": "last_loop"}),
    "inkling": ("inkling2_loop_text", "Inkling2LoopForCausalLM", _INKLING),
}


class Interrupted(Exception):
    pass


pytestmark = pytest.mark.filterwarnings("ignore:No layer of this model:RuntimeWarning")


@functools.cache
def model_of(kind: str) -> PreTrainedModel:
    name, model_class, settings = KINDS[kind]
    if name not in types():
        pytest.skip("not in this Transformers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OVER, name, settings)
        config = tiny_config(name)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).float().eval()
    _draw_wide_weights(model, 1)
    return model


def ids(rows: int = 2, length: int = 21) -> torch.Tensor:
    return prompt_ids(rows=rows, length=length) % VOCAB


def greedy(model: PreTrainedModel, cache: Cache, prompt: torch.Tensor | None = None) -> Any:
    given = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    output = model.generate(ids() if prompt is None else prompt, **{CACHE: cache}, **given)
    return output.sequences, output.logits


@pytest.mark.parametrize("placement", ["host", "device", "smallest", "between"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_runs_layers_again_gets_the_tokens_of_dynamic_cache(kind: str, placement: Placement) -> None:
    model = model_of(kind)
    cache = assert_same_as_dynamic_cache(model, greedy, placement, block_size=4)
    assert len(cache) == (4 if kind == "dory_last_loop" else 8)


def test_a_loop_that_ends_behind_the_last_layer_ends_with_it() -> None:
    """As the model takes a slice of its layers: its defaults are for more of them than a small model has."""
    config = copy.deepcopy(model_of("inkling").config)
    assert looped(config) == [1, 2, 1, 2]
    config.loop_layer_index_end = 18
    assert looped(config) == [1, 2, 3, 1, 2, 3]
    config.loop_layer_index_start = 6
    assert looped(config) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_it_is_copied_and_emptied(kind: str) -> None:
    model = model_of(kind)
    expected, cache = dynamic_cache(model), tiered_cache(model)
    first, _ = greedy(model, expected)
    greedy(model, cache)
    longer = torch.cat([first, ids(length=3)], 1)
    twin = copy.deepcopy(cache)
    logits = greedy(model, expected, longer)
    assert alike(logits, greedy(model, twin, longer))
    assert alike(logits, greedy(model, cache, longer))
    cache.reset()
    assert torch.equal(greedy(model, cache)[0], first)


@pytest.mark.parametrize("kind", ["dory", "inkling"])
@pytest.mark.parametrize("held", [0, 21])
@pytest.mark.parametrize("at", range(1, 8))
def test_a_forward_that_ends_in_one_of_its_rounds_is_noticed(kind: str, held: int, at: int) -> None:
    """The rounds behind the first write to layers with higher numbers than the last one has."""
    model = model_of(kind)
    cache = tiered_cache(model)
    with torch.no_grad():
        if held:
            model(ids(), **{CACHE: cache})
        updates, update = iter(range(100)), cache.update

        def interrupted(*args: Any, **options: Any) -> Any:
            if next(updates) == at:
                raise Interrupted
            return update(*args, **options)

        cache.update = interrupted
        with pytest.raises(Interrupted):
            model(ids(length=2), **{CACHE: cache})
        del cache.update
        with pytest.raises(InterruptedStepError):
            model(ids(length=1), **{CACHE: cache})
        if kind == "dory":
            cache.crop(0)
            assert cache.get_seq_length() == held
            expected = dynamic_cache(model)
            if held:
                model(ids(), **{CACHE: expected})
            new = ids(length=3)
            assert alike(model(new, **{CACHE: expected}).logits, model(new, **{CACHE: cache}).logits)


def test_an_engine_admits_a_step_with_all_layers_that_the_model_writes_to() -> None:
    """Before anything is computed; also where it begins again without layers, as behind an interrupt."""
    with Engine(model_of("dory"), host_budget="100KB", block_size=4) as engine:
        engine.stop()
        runner = engine._runner
        assert isinstance(runner, PackedRunner)
        count, nbytes = len(runner.forward.readers), runner.forward.block_bytes()
        assert count == 8
        assert 15 * nbytes < 100_000 < 30 * nbytes, "half of the layers would fit"
        runner.reset()
        with pytest.raises(BudgetError) as error:
            runner.step([Work(runner.add(), [5] * 120, 0, 120, True)])
        assert error.value.needed >= 30 * nbytes
        assert len(runner.forward.readers) == 1


def test_a_layer_is_not_copied_without_its_cache() -> None:
    cache = tiered_cache(tiny_model("llama"))
    with pytest.raises(UnsupportedError, match="copy the cache"):
        copy.deepcopy(cache.layers[1])
