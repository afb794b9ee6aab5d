"""What is stored of a machine as a `HardwareProfile`: the names of its parts in the profile, and how they are read.

`kvtier.calibrate` stores each part under its name; a part that is not there, damaged, or of other versions is replaced
by a stated estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvtier import profile
from kvtier.config import DEVICE_BLOCK
from kvtier.cpu import native
from kvtier.errors import ConfigError
from kvtier.kernels import launch
from kvtier.memory.storage.layout import BlockLayout
from kvtier.planning.hardware import machines
from kvtier.planning.hardware.machines import ModelSize
from kvtier.planning.hardware.profile import HardwareProfile
from kvtier.planning.rates import Rates

#: Of copies, whatever they move.
LINK = "link rates"
#: Of attention where the shape that is asked for was not measured: that of the last calibration.
HOST, DEVICE = "host attention", "device attention"


def host_name(layout: BlockLayout) -> str:
    """The name of what attention on the host takes, for blocks of a layout and the code that attends to them."""
    code = native.instruction_set() if native.available() else "torch"
    return f"{HOST}, {_described(layout)}, {code}"


def device_name(layout: BlockLayout) -> str:
    """The name of what attention on the device takes, for blocks of a layout."""
    return f"{DEVICE}, {_described(layout)}"


def model_name(config: Any) -> str:
    """The name of what a model's own layers take, from its config: what their time depends on."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    sizes = [f"{name.removeprefix('num_')} {_size(text, name)}" for name in (*names, "vocab_size")]
    dtype = getattr(config, "dtype", None) or getattr(text, "dtype", None)
    kind = getattr(text, "model_type", "") or type(text).__name__
    return f"model {kind}, {', '.join(sizes)}, {str(dtype).removeprefix('torch.')}"


def _size(config: Any, name: str) -> object:
    """A size of a config; where layers have sizes of their own, which Transformers refuses to read, that of the others,
    as its file has it."""
    try:
        return getattr(config, name, None)
    except RuntimeError:
        return vars(config).get(name)


def differing(one: str, other: str) -> str:
    """Where two names of `model_name` contradict each other; not by their dtype, in which one may load any model."""
    parts = [dict(each.rpartition(" ")[::2] for each in name.split(", ")[:-1]) for name in (one, other)]
    found = [
        f"{what} {parts[0][what]}, not {value}"
        for what, value in parts[1].items()
        if parts[0].get(what, value) != value and "None" not in (value, parts[0][what])
    ]
    return "; ".join(found)


def hardware(device: torch.device, layout: BlockLayout | None = None, model: str = "") -> HardwareProfile:
    """What is known of a machine: what was measured, else what its datasheet says.

    Args:
        device: where attention runs.
        layout: of blocks that attention is over; None: whatever was measured last.
        model: from `model_name`, for `linear` and `prefill`; "": none.

    Raises:
        ConfigError: KVTIER_PROFILE is neither "off" nor an absolute path.
    """
    machine = launch.machine(device)
    like = machines.machine_like(torch.cuda.get_device_name(device)) if device.type == "cuda" else "cpu"
    found = HardwareProfile.estimate(like)
    found = HardwareProfile(
        machine, found.up, found.down, found.together, found.host, found.device, model=model if model else ""
    )
    names = [LINK, HOST, DEVICE]
    if layout is not None:
        names += [host_name(layout), device_name(layout)]
    if model:
        names.append(model)
    for name in names:  # the more special later
        found = found.with_stored(profile.lookup(machine, name, lambda value: isinstance(value, dict)))
    return found


def of_file(content: Mapping[str, Any], size: ModelSize, model: str) -> HardwareProfile:
    """What a file of stored values says of its machine and of a model. Parts that are not in it are estimates.

    Args:
        content: as `kvtier.profile` has stored it: "machine", and "values" by their names.
        size: of the model.
        model: from `model_name`. The time of its layers is taken in whatever dtype it was measured, in that of the
            config if it was. Of several measurements that fit, the closest one counts, and of such the newest.

    Raises:
        ConfigError: the file is damaged, or nothing of it can be read.
    """
    machine, values = content.get("machine"), content.get("values")
    if not isinstance(machine, str) or not isinstance(values, Mapping):
        raise ConfigError(
            "This is no profile that `kvtier calibrate` has stored: it names no machine, or has no values."
        )
    device = machine.partition(",")[0]
    like = "cpu" if device == "cpu" else machines.machine_like(device)
    *sizes, dtype = model.split(", ")

    def closeness(name: str) -> tuple[int, ...]:
        """Of names that fit the model, how well they do: by sizes that are known of both, dtype, and tokens of a block.
        Of names that do so alike the newest is the last in a file."""
        parts = name.split(", ")
        known = next((x for x in parts if isinstance(getattr(torch, x, None), torch.dtype)), "")
        bytes_alike = bool(known) and getattr(torch, known).itemsize == size.itemsize
        return sum(x in parts for x in sizes), known == dtype, bytes_alike, f"blocks of {DEVICE_BLOCK}" in parts

    fitting = [x for x in values if x.startswith("model ") and not differing(x, model)]
    model = max(reversed(fitting), key=closeness, default="")
    # Of attention over blocks of this shape, where it was measured.
    shape = f", {size.kv_heads} KV heads of {size.head_dim}, "
    special = sorted((x for x in values if x.startswith((HOST, DEVICE)) and shape in x), key=closeness)
    found = replace(HardwareProfile.estimate(like, size), name=machine, model=model)
    for name in (LINK, HOST, DEVICE, *special, *filter(None, (model,))):
        found = found.with_stored(values.get(name))
    if not found.measured:
        raise ConfigError(f"Nothing that is stored of {machine} can be read: `kvtier calibrate` measures it again.")
    return found


def file_here() -> Path:
    """The file of what is stored of this machine: of its current CUDA device, if it has one.

    Raises:
        ConfigError: there is none.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    path = profile.file_of(launch.machine(device))
    if not path.is_file():
        raise ConfigError(
            f"Nothing is stored of this machine ({device}) with these versions of kvtier and torch: `kvtier calibrate` "
            "measures it."
        )
    return path


def rates(device: torch.device, layout: BlockLayout) -> Rates | None:
    """What a policy begins with on a device; None: nothing of it was measured."""
    if not profile.enabled():
        return None
    found = hardware(device, layout)
    if not found.measured:
        return None
    return found.rates(torch.get_num_threads())


def _described(layout: BlockLayout) -> str:
    heads = f"{layout.k_heads} KV heads of {layout.k_dim}"
    if (layout.v_heads, layout.v_dim) != (layout.k_heads, layout.k_dim):
        heads += f" and {layout.v_heads} of {layout.v_dim}"
    return f"{heads}, {str(layout.dtype).removeprefix('torch.')}, blocks of {layout.block_size}"
