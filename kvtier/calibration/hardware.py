"""The measurements that make a `HardwareProfile`: which there are, how they share the time, and what they say."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from kvtier.calibration.job import Job, Value
from kvtier.calibration.measurements import attention, link
from kvtier.calibration.measurements import model as models
from kvtier.calibration.shapes import Shape
from kvtier.memory import measured
from kvtier.planning.hardware.predictors import Curve, Linear, Prefill

#: Of the time for all measurements, what each of these takes.
LINK, HOST, LINEAR, PREFILL = 0.1, 0.3, 0.1, 0.4


def jobs(
    device: torch.device, shape: Shape, block_size: int, seconds: float, model: torch.nn.Module | None
) -> list[Job]:
    """What there is to measure on a device.

    Args:
        device: where attention runs.
        shape: of attention.
        block_size: tokens per block.
        seconds: for all measurements.
        model: to be timed; None: none.
    """
    layout = attention.layout_of(shape, block_size)
    host = partial(_host, shape, block_size, device, HOST * seconds)
    found = [
        Job(measured.LINK, partial(_link, device, LINK * seconds)),
        Job(measured.host_name(layout), host, measured.HOST),
    ]
    if device.type == "cuda":
        on_device = partial(_device, shape, block_size, device)
        found.append(Job(measured.device_name(layout), on_device, measured.DEVICE))
    if model is not None:
        found.append(Job(measured.model_name(model.config), partial(_model, model, block_size, seconds)))
    return found


def _link(device: torch.device, seconds: float) -> tuple[Value, str]:
    found = link.measure(device, seconds)
    up, down = Curve.fit(found.up), Curve.fit(found.down)
    value = {
        "up": _part(up.as_json(), link.error_of(found.up)),
        "down": _part(down.as_json(), link.error_of(found.down)),
        "together": _part(found.together, None),
    }
    return value, (
        f"up {_rate(up)}, down {_rate(down)}; while both are busy each keeps {found.together:.0%} of its rate; "
        f"error {_percent(link.error_of(found.up))} up, {_percent(link.error_of(found.down))} down"
    )


def _host(shape: Shape, block_size: int, device: torch.device, seconds: float) -> tuple[Value, str]:
    found = attention.measure_host(attention.layout_of(shape, block_size), shape.group, device, seconds)
    fitted, error = found.fitted(), found.error()
    value = {"host": _part(fitted.as_json(), error)}
    if device.type == "cpu":  # an emulated device attends by the same code, on all threads
        value["device"] = _part(fitted.curve().as_json(), error)
    rates = ", ".join(f"{_rate(curve)} on {n} thread{'s' if n > 1 else ''}" for n, curve in fitted.threads)
    return value, (
        f"{rates}; {fitted.queries[-1][1]:.1f} x as long for {fitted.queries[-1][0]:.0f} queries; "
        f"{fitted.lost:.0%} less while the link is busy; error {_percent(error)}"
    )


def _device(shape: Shape, block_size: int, device: torch.device) -> tuple[Value, str]:
    points = attention.measure_device(shape, block_size, device)
    curve, error = Curve.fit(points), attention.device_error(points)
    return {"device": _part(curve.as_json(), error)}, f"{_rate(curve)}; error {_percent(error)}"


def _model(model: Any, block_size: int, seconds: float) -> tuple[Value, str]:
    # Without a device tier a cache chooses larger blocks.
    trial = models.Trial(model, None if model.device.type == "cpu" else block_size)
    try:
        tokens = models.measure_linear(trial, LINEAR * seconds)
        sizes = models.measure_prefill(trial, PREFILL * seconds)
    finally:
        trial.close()
    linear, prefill = Linear.fit(tokens), Prefill.fit(sizes)
    value = {
        "linear": _part(linear.as_json(), models.linear_error(tokens)),
        "prefill": _part(prefill.as_json(), models.prefill_error(sizes)),
    }
    longest, took = max(sizes, key=lambda x: (x[0].new * (x[0].new + x[0].past), x[0].new))
    return value, (
        f"{trial.layers * linear.seconds(1) * 1e3:.3g} ms for one token; {took * 1e3:.3g} ms for {longest.new} tokens "
        f"on {longest.past} cached ones; error {_percent(models.linear_error(tokens))} by tokens, "
        f"{_percent(models.prefill_error(sizes))} prefill"
    )


def _part(value: Any, error: float | None) -> dict[str, Any]:
    """As `HardwareProfile.with_stored` takes it."""
    return {"value": value, "error": error}


def _rate(curve: Curve) -> str:
    return f"{curve.line()[1] / 1e9:.3g} GB/s"


def _percent(error: float | None) -> str:
    return "unknown" if error is None else f"{error:.1%}"
