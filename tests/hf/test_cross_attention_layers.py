"""Models with cross-attention, whose keys and values have a length and a batch of their own, as on ``DynamicCache``."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import prompt_ids, tiny_model
from mllama import an_image, mllama
from placements import assert_same_as_dynamic_cache
from transformers import Cache, PreTrainedModel

from kvtier import BudgetError, InterruptedStepError, TieredKVCache, TransferError
from kvtier.forward.forward import dispatch


def fails(*_: Any, **__: Any) -> Any:
    """In the middle of a forward."""
    raise TransferError("a copy failed")


def test_an_image_has_an_effect() -> None:
    """Else nothing here would notice that the wrong one is attended to."""
    other = an_image() | {"pixel_values": an_image()["pixel_values"] + 1.0}
    with torch.no_grad():
        for layers in ((1, 2), (0, 2), (3,)):
            one, two = (mllama(layers)(**given).logits[:, -1] for given in (an_image(), other))
            assert float((one - two).abs().max()) > 0.1


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
@pytest.mark.parametrize("placement", ["host", "smallest"])
def test_an_image_is_described_in_any_way(options: dict[str, Any], placement: Any) -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        torch.manual_seed(0)
        return model.generate(**an_image(), past_key_values=cache, max_new_tokens=8, **({"do_sample": False} | options))

    assert_same_as_dynamic_cache(mllama(), run, placement, block_size=4)


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_image_goes_on(way: Callable[[Any], Any]) -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        with torch.no_grad():
            found = [model(**an_image(), past_key_values=cache).logits]
            made = way(cache)
            found += [model(input_ids=torch.tensor([[30 + i]]), past_key_values=made).logits for i in range(3)]
        return found

    assert_same_as_dynamic_cache(mllama(), run, "host", block_size=4)


@pytest.mark.parametrize("name", ["bart", "t5"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("placement", ["host", "device"])
def test_many_rows_are_decoded_from_one_encoding(name: str, attention: str, placement: Any) -> None:
    """Torch lets one row of keys stand for all rows of queries."""

    def run(model: PreTrainedModel, cache: Cache) -> Any:
        ids = prompt_ids(rows=1, length=9)
        with torch.no_grad():
            given = {"encoder_outputs": model.get_encoder()(ids), "attention_mask": torch.ones_like(ids)}
            decoded = [prompt_ids(rows=3, length=n, seed=n) for n in (4, 1, 1)]
            return [model(**given, decoder_input_ids=x, past_key_values=cache).logits for x in decoded]

    model = tiny_model(name, attention)
    assert_same_as_dynamic_cache(model, run, placement, block_size=4, host_attention=True)


@pytest.mark.parametrize("layers", [(0, 2), (3,)], ids=str)
@pytest.mark.parametrize("placement", ["host", "smallest"])
def test_cross_attention_is_in_any_layers(layers: tuple[int, ...], placement: Any) -> None:
    """A forward without an image passes them over, also where the first layer is one of them, or the last."""

    def run(model: PreTrainedModel, cache: Cache) -> Any:
        return model.generate(**an_image(), past_key_values=cache, max_new_tokens=6, do_sample=False)

    assert_same_as_dynamic_cache(mllama(layers), run, placement, block_size=4)


def test_text_goes_on_without_cross_attention_in_the_last_layer() -> None:
    def run(model: PreTrainedModel, cache: Cache) -> Any:
        first = model.generate(prompt_ids(rows=1), past_key_values=cache, max_new_tokens=4, do_sample=False)
        both = torch.cat([first, prompt_ids(rows=1, length=5, seed=2)], 1)
        return model.generate(both, past_key_values=cache, max_new_tokens=4, do_sample=False)

    assert_same_as_dynamic_cache(mllama((1, 3)), run, "host", block_size=4)


def test_an_image_may_come_behind_text() -> None:
    """Its forward begins at the first layer, which the one before has passed over."""

    def run(model: PreTrainedModel, cache: Cache) -> Any:
        with torch.no_grad():
            found = [model(input_ids=prompt_ids(rows=1, length=9), past_key_values=cache).logits]
            positions = {"position_ids": torch.arange(9, 22)[None]}  # of a first layer, its length would be asked
            found.append(model(**an_image(), **positions, past_key_values=cache).logits)
            if isinstance(cache, TieredKVCache):
                assert list(cache._forward.steps.began) == [0, 1, 2, 3]
        return found

    assert_same_as_dynamic_cache(mllama((0, 2)), run, "host", block_size=4)


def test_an_image_without_room_in_the_last_layer_leaves_nothing() -> None:
    model, cache = mllama((3,)), TieredKVCache(mllama((3,)).config, block_size=4)
    append = cache._forward.append

    def refused(index: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        if index == 3:
            raise BudgetError("no room", tier="host", needed=2, budget=1)
        return append(index, keys, values)

    cache._forward.append = refused  # type: ignore[method-assign]
    with pytest.raises(BudgetError):
        model(**an_image(), past_key_values=cache)
    assert cache.get_seq_length() == 0
    given = torch.zeros(1, 2, 3, 12)
    for layer in range(3):
        cache.update(given, given, layer)
    with pytest.raises(BudgetError):  # of a caller that shows no image
        cache.update(given, given, 3)
    cache._forward.append = append  # type: ignore[method-assign]
    assert cache.get_seq_length() == 0
    again, right = (model(**an_image(), past_key_values=x).logits for x in (cache, None))
    assert torch.allclose(again, right, atol=1e-4)


@pytest.mark.parametrize("text", [0, 9])
@pytest.mark.parametrize(
    ("layers", "stop"), [((3,), 3), ((2, 3), 2), ((2, 3), 3), ((1, 2), 2), ((0,), 1), ((0, 2), 1), ((0, 1), 2)], ids=str
)
def test_a_forward_with_an_image_that_ends_anywhere_is_not_gone_on_with(
    layers: tuple[int, ...], stop: int, text: int
) -> None:
    """Neither by the same one nor by one without an image, which passes over the layers that hold it."""
    model = mllama(layers)
    cache, right = (TieredKVCache(model.config, block_size=4) for _ in range(2))
    # The mask is of all tokens, as `generate` gives it: the oldest Transformers looks its own up in it.
    mask = torch.ones(1, 64, 1, 1, dtype=torch.long)
    image = an_image() | {"position_ids": torch.arange(text, text + 13)[None], "cross_attention_mask": mask}
    one: dict[str, Any] = {"input_ids": torch.tensor([[30]]), "position_ids": torch.tensor([[text]])}
    with torch.no_grad():
        for each in (cache, right):
            if text:
                model(input_ids=prompt_ids(rows=1, length=text), past_key_values=each)
        with model.model.language_model.layers[stop].register_forward_pre_hook(fails), pytest.raises(TransferError):
            model(**image, past_key_values=cache)
        for given in (one, image):
            with pytest.raises(InterruptedStepError, match=r"of 4 layers .* `crop\(0\)`"):
                model(**given, past_key_values=cache)
        with pytest.raises(InterruptedStepError):
            copy.copy(cache)
        cache.crop(0)
        assert [x.get_seq_length() for x in cache.layers] == [x.get_seq_length() for x in right.layers]
        for given in (image, one | {"position_ids": torch.tensor([[text + 13]])}):
            found, wanted = (model(**given, past_key_values=each).logits for each in (cache, right))
            assert torch.allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("layers", [(2, 3), (3,)], ids=str)
def test_an_image_that_cannot_be_read_in_the_last_layer_leaves_an_unfinished_forward(
    layers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward without an image updates no layer there that it would lack."""
    model = mllama(layers)
    cache = TieredKVCache(model.config, block_size=4)
    attend = dispatch.attend
    with torch.no_grad():
        model(**an_image(), past_key_values=cache)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "attend", lambda r, *a, **k: (fails if r.layer.index == 3 else attend)(r, *a, **k))
            with pytest.raises(TransferError):
                model(input_ids=torch.tensor([[30]]), past_key_values=cache)
        with pytest.raises(InterruptedStepError, match="did not finish"):
            model(input_ids=torch.tensor([[30]]), past_key_values=cache)
        cache.crop(0)
        assert cache.get_seq_length() == 13
        model(input_ids=torch.tensor([[30]]), past_key_values=cache)
        assert cache.get_seq_length() == 14


def test_a_caller_that_does_not_show_whether_there_is_an_image_goes_on_behind_the_first_layers() -> None:
    cache = TieredKVCache(mllama((0,)).config, block_size=4)
    given = torch.zeros(1, 2, 3, 12)
    for layer in (0, 1, 2, 3):
        cache.update(given, given, layer)
    assert cache.get_seq_length(1) == 3
