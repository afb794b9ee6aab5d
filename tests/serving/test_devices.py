"""An engine's thread, whose current device and stream are not those of whoever made the model and the requests."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from families import build_model

from kvtier import Engine, TieredMemory
from kvtier.hf.models import generation
from kvtier.hf.models.devices import Devices
from kvtier.kernels import launch
from kvtier.serving.runners import packed
from kvtier.testing import with_doubles
from kvtier.transfer.doubles import HeldTransfers

PROMPT = list(range(1, 12))
OPTIONS: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}


def expected(model: Any) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), pad_token_id=0, **OPTIONS)[0, len(PROMPT) :].tolist()


@pytest.mark.parametrize("background", [False, True])
def test_every_forward_runs_where_the_models_device_is_the_current_one(
    background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that a model brings are launched on the current device, and not on that of their tensors."""
    model = build_model("llama", "sdpa")
    current, seen = threading.local(), list[Any]()

    @contextlib.contextmanager
    def on(device: torch.device) -> Iterator[None]:
        before = getattr(current, "device", None)
        current.device = device
        yield
        current.device = before

    want = expected(model)
    monkeypatch.setattr(launch, "on", on)
    model.register_forward_pre_hook(lambda *_: seen.append(getattr(current, "device", None)))
    engine = Engine(model, host_budget="8MiB")
    if background:
        engine.start()
    (output,) = engine.generate_batch([PROMPT], **OPTIONS).values()
    trial = engine.runner
    engine.close()
    assert output.generated_tokens == want
    assert trial == "packed"
    assert len(seen) > len(want)
    assert set(seen) == {model.device}


def test_a_step_comes_behind_what_whoever_adds_a_request_is_doing_on_a_stream() -> None:
    """Such as what makes the tensors of a processor."""
    told = list[tuple[str, str]]()

    class Told(HeldTransfers):
        def follow(self) -> None:
            told.append(("follow", threading.current_thread().name))

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        told.append(("read", threading.current_thread().name))
        return scores

    model, me = build_model("llama", "sdpa"), threading.current_thread().name
    memory = with_doubles(TieredMemory(device_budget="1MiB", host_budget="8MiB"), Told, poison=False)
    engine = Engine(model, memory=memory)
    add = engine._requests.add

    def adding(*args: Any) -> Any:
        told.append(("add", me))
        return add(*args)

    engine._requests.add = adding  # type: ignore[method-assign]
    told.clear()
    name = engine.add_request(PROMPT, logits_processor=[processor], **OPTIONS)
    assert ("follow", me) in told[: told.index(("add", me))]
    told.clear()
    engine.start()
    assert engine.wait(name).error is None
    assert told[0] == ("follow", "kvtier-engine")
    assert ("read", "kvtier-engine") in told
    engine.close()
    memory.close()


def test_a_model_on_two_devices_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate brings tensors among the arguments of a forward to its first device: a number that selects rows of the
    last hidden states, which are on another one, is no tensor."""
    model = build_model("llama", "sdpa")
    want, given = expected(model), list[Any]()
    elsewhere = Devices(model.device, {0: model.device, 1: torch.device("meta")})
    monkeypatch.setattr(packed, "devices_of", lambda model: elsewhere)
    model.register_forward_pre_hook(lambda _, args, named: given.append(named.get("logits_to_keep")), with_kwargs=True)
    engine = Engine(model, host_budget="8MiB", runner="packed")
    given.clear()
    (output,) = engine.generate_batch([PROMPT], **OPTIONS).values()
    engine.close()
    assert output.generated_tokens == want
    assert given[0] == [len(PROMPT) - 1]
    assert not any(isinstance(x, torch.Tensor) for x in given)


def test_all_devices_of_a_model_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = list[torch.device]()
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    weights = [SimpleNamespace(device=x) for x in (first, second, torch.device("cpu"), torch.device("meta"), second)]
    model = SimpleNamespace(device=first, parameters=lambda: iter(weights))
    generation.synchronize(model)
    assert sorted(waited, key=str) == [first, second]
