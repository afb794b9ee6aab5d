"""A model whose layers are on two devices: a store keeps, saves and loads what each layer holds where the layer is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import build_model
from test_store import GREEDY, fresh, grown, ones, some_ids, store_of
from two_devices import FIRST, SECOND, dispatch, second_device

pytestmark = pytest.mark.usefixtures("_second")


@pytest.fixture
def _second(monkeypatch: pytest.MonkeyPatch) -> None:
    second_device(monkeypatch)


@pytest.mark.parametrize(
    ("name", "device_budget"), [("llama", 60_000), ("gemma3", None), ("qwen3_next", None)], ids=str
)
def test_a_later_store_loads_each_layer_to_where_it_is(name: str, device_budget: int | None, tmp_path: Path) -> None:
    model, ids = dispatch(build_model(name, "sdpa"), 2), some_ids(40)
    for turn in range(2):
        with store_of(model, directory=tmp_path, device_budget=device_budget) as store:
            out = store.generate(**ones(ids), **GREEDY)
            assert torch.equal(out, fresh(model, ones(ids)))
            assert {device.device for device in store.memory.devices} == {FIRST, SECOND}
            assert store.reuse[0].loaded == (ids.shape[1] - 5 if turn else 0)
            store.check_integrity()
        assert store.stats.problem == ""
        ids = grown(out)
