"""The first tokens of a cache: what the model gets back for them, and how often the rows of a batch are compared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import prompt_ids, tiny_model

from kvtier import TieredKVCache
from kvtier.tables import sharing


def test_first_tokens_are_read_from_the_callers_tensors_and_the_cache_keeps_a_copy() -> None:
    """As it is documented: a model that writes into its keys between the update and attention reads what it wrote."""
    keys, values = torch.randn(2, 2, 2, 9, 8, generator=torch.Generator().manual_seed(0))
    given = keys.clone(), values.clone()
    cache = TieredKVCache(block_size=4)
    got = cache.update(*given, 0)
    assert got[0] is given[0]
    assert got[1] is given[1]
    strided = TieredKVCache().update(keys.mT, values.mT, 0)
    assert all(x.is_contiguous() for x in strided), "kernels round as on the product of a concatenation"
    for x in given:
        x.fill_(7)
    assert torch.equal(cache.layers[0].keys.dense(), keys)
    assert torch.equal(cache.layers[0].values.dense(), values)
    assert "the arguments, contiguous, where there is no past" in " ".join((cache.update.__doc__ or "").split())


@pytest.mark.parametrize(("alike", "layers"), [(0, 0), (9, 0), (16, 1), (40, 1)])
def test_rows_of_different_prompts_are_compared_once_in_a_forward(
    alike: int, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each comparison waits for the device. Rows that share whole blocks are compared where they are shared: in every
    layer, for each has keys of its own."""
    compared: list[int] = []
    equal_tokens = sharing._equal_tokens

    def counted(keys: torch.Tensor, *more: Any) -> list[int]:
        compared.append(keys.shape[2])
        return equal_tokens(keys, *more)

    monkeypatch.setattr(sharing, "_equal_tokens", counted)
    model = tiny_model("llama")
    ids = prompt_ids(rows=3, length=40)
    ids[1:, :alike] = ids[:1, :alike]
    cache = TieredKVCache(model.config, block_size=16)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache)
        assert compared == [40] * (model.config.num_hidden_layers if layers else 1)
        compared.clear()
        for n in range(3):
            model(input_ids=prompt_ids(rows=3, length=1, seed=n), past_key_values=cache)
        model(input_ids=prompt_ids(rows=3, length=7, seed=9), past_key_values=cache)
    assert compared == []


def test_a_prefill_synchronises_as_often_as_it_compares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that reads a tensor's numbers on the CPU, only the comparison is called by the cache."""
    model, ids = tiny_model("llama"), prompt_ids(rows=3, length=40)
    calls: list[str] = []

    def prefill(cache: Any) -> int:
        calls.clear()
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache)
        return len(calls)

    for name in ("tolist", "item", "__bool__", "__int__", "__float__", "cpu", "numpy"):
        true = getattr(torch.Tensor, name)

        def counted(x: torch.Tensor, *args: Any, true: Any = true, name: str = name, **kwargs: Any) -> Any:
            calls.append(name)
            return true(x, *args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, counted)
    own = prefill(None)
    assert prefill(TieredKVCache(model.config, block_size=16)) <= own + 1
