"""What saved keys and values are bound to: a model's class, config, weights and buffers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

import torch
import transformers

from kvtier.cpu.checksum import checksums
from kvtier.errors import ConfigError
from kvtier.hf.models.generation import hooks, inner
from kvtier.hf.models.identity.dependence import lasting_buffers

#: Whose models compute keys and values. The whole version: releases of patches mend models, too.
COMPUTED_BY = f"transformers {transformers.__version__}"
#: Parts of a config that change no key and no value.
_NOT_OF_KV = frozenset(("transformers_version", "use_cache", "architectures", "torch_dtype", "name_or_path"))
#: Bytes of weights of which one checksum is digested.
_PIECE = 4096


def fingerprint(model: Any) -> dict[str, str]:
    """What saved keys and values are of: every weight and buffer, the dtypes, and the config as the code reads it that
    `read_by` names. Reads all of them.

    Raises:
        ConfigError: some weights are nowhere to be read.
    """
    weights = hashlib.blake2b(digest_size=16)
    state = inner(model).state_dict()
    # Buffers that are no part of the state (frequencies of rotary embeddings, say) make other keys too.
    for name, x in sorted((_buffers(inner(model)) | state).items()):
        for said, plain in _parts(name, _loaded(model, name, x)):
            weights.update(said.encode())
            data = plain.detach().to("cpu").contiguous().view(-1)
            if name not in state and data.is_floating_point():
                data = data.bfloat16()  # each process computes them, on whatever device: the last bits may be others
            data = data.view(torch.uint8)
            # A word that differs changes the checksum of its piece; to digest these takes next to nothing.
            pieces = data.numel() // _PIECE
            weights.update(checksums(data.data_ptr(), pieces, _PIECE, 0).tobytes())
            weights.update(data[pieces * _PIECE :].numpy().data)
    config = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_") and k not in _NOT_OF_KV}
    return {
        "model": _kind(inner(model)).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "config": hashlib.blake2b(json.dumps(config, sort_keys=True, default=str).encode(), digest_size=16).hexdigest(),
        "weights": weights.hexdigest(),
        "read_by": COMPUTED_BY,
    }


def _parts(name: str, x: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What a state has under a name, as tensors that are plain memory, each with what is said of it. Quantised weights
    are tensors made of others (torchao), or packed with their bias (torch's own)."""
    if isinstance(x, (tuple, list)):
        for i, each in enumerate(x):
            yield from _parts(f"{name}.{i}", each)
    elif hasattr(x, "__tensor_flatten__"):
        inside, how = x.__tensor_flatten__()
        yield from _parts(f"{name} {type(x).__name__} {tuple(x.shape)} {x.dtype}", how)
        for each in inside:
            yield from _parts(f"{name}.{each}", getattr(x, each))
    elif not isinstance(x, torch.Tensor):
        said = re.sub(r" at 0x[0-9a-f]+", "", repr(x))  # an address is another one in each process
        yield f"{name} {said}", torch.empty(0)
    else:
        said = f"{name} {tuple(x.shape)} {x.dtype}"
        yield said, x.dequantize() if x.is_quantized else x


def _buffers(model: Any) -> dict[str, torch.Tensor]:
    """All buffers that a model begins with, those that are not saved with it included."""
    found = dict[str, torch.Tensor]()
    for path, module in model.named_modules():
        if module._buffers:
            found |= {f"{path}.{name}".lstrip("."): x for name, x in lasting_buffers(module).items()}
    return found


def _kind(model: Any) -> type:
    """The class of a model: `fully_shard` puts one of its own in the place of it, and that and its mixin before it."""
    kind, *bases = type(model).__mro__
    return bases[1] if bases[0].__name__ == "FSDPModule" else kind


def _loaded(model: Any, name: str, weight: Any) -> Any:
    """A weight, from where `accelerate` has put it, or from the processes that it is distributed over."""
    if not isinstance(weight, torch.Tensor) or weight.device.type != "meta":
        # A `DTensor` has no address, also where one process has all of it.
        return weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    path, _, short = name.rpartition(".")
    module = inner(model).get_submodule(path)
    for hook in hooks(module):
        with contextlib.suppress(AttributeError, KeyError, TypeError):  # without a map, or of other weights
            found: torch.Tensor = hook.weights_map[short]
            return found
    raise ConfigError(
        f"The weight {name} is on the meta device, and nobody says where its values are: what is saved could not be "
        "bound to it. Load the model, or leave directory= away."
    )
