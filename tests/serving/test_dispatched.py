"""Engines on models that Accelerate has dispatched: it sends whatever a forward is given to where a layer is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import build_model
from two_devices import FIRST, SECOND, dispatch, second_device
from workloads import stream_of_tokens

from kvtier import ConversationStore, Engine


@pytest.fixture(autouse=True)
def _second(monkeypatch: pytest.MonkeyPatch) -> None:
    second_device(monkeypatch)


@pytest.mark.parametrize(
    ("name", "runner", "device_budget"), [("llama", "packed", 60_000), ("qwen3_next", "ragged", None)]
)
def test_layers_on_two_devices_are_packed_and_loaded(
    name: str, runner: str, device_budget: int | None, tmp_path: Path
) -> None:
    model, prompts = dispatch(build_model(name, "sdpa"), 2), [stream_of_tokens(n)[: 20 * n] for n in (1, 2, 3)]
    for turn in range(2):
        with (
            ConversationStore(
                model,
                directory=tmp_path,
                device_budget=device_budget,
                host_budget="64MiB",
                block_size=4,
                loading="always",
            ) as store,
            Engine(model, store=store) as engine,
        ):
            assert engine.runner == runner
            assert all(store.wake(x).wait(60) for x in prompts)
            outputs = list(engine.generate_batch(prompts, max_new_tokens=6, do_sample=False).values())
            assert [x.cached_tokens > 0 for x in outputs] == [turn > 0] * len(prompts)
            assert {device.device for device in store.memory.devices} == {FIRST, SECOND}
            engine.check_integrity()
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0].tolist()
            assert [*prompt, *output.generated_tokens] == alone
            prompts[i] = [*alone, 7]


def test_layers_that_have_moved_are_refused_and_not_read_where_they_were() -> None:
    model, prompt = dispatch(build_model("llama", "sdpa"), 2), stream_of_tokens(0)[:20]
    with Engine(model, host_budget="64MiB", block_size=4) as engine:
        engine.generate_batch([prompt], max_new_tokens=2)
        dispatch(model, 1)
        (output,) = engine.generate_batch([prompt], max_new_tokens=2).values()
        assert not output.generated_tokens
        assert "Layer 1 is on cpu, but was given keys on cpu:1" in str(output.error)
