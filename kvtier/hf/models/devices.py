"""`Devices`: where the layers of a model are, which `device_map` may put on several devices."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from kvtier.hf.models.generation import device_of, executes_on, inner


class Devices(NamedTuple):
    """Of a model.

    Attributes:
        model: where it takes its inputs.
        layers: where the attention of each layer is, by index, as far as the model says so.
    """

    model: torch.device
    layers: dict[int, torch.device]

    def of(self, layer: int) -> torch.device:
        """Where a layer's keys and values are."""
        return self.layers.get(layer, self.model)


def devices_of(model: Any) -> Devices:
    """Where a model and its layers are now."""
    model = inner(model)
    text = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers = dict[int, torch.device]()
    for module in text.modules():
        index = getattr(module, "layer_idx", None)
        if isinstance(index, int) and (device := _device(module)) is not None:
            layers[index] = device
    return Devices(device_of(model), layers)


def _device(module: torch.nn.Module) -> torch.device | None:
    """Where a module computes; None: it has no weights."""
    weights = (weight.device for weight in module.parameters() if weight.device.type != "meta")
    return next(weights, None) or executes_on(module)
