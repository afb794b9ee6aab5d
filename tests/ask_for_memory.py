"""Every way to ask for the memory behind a tensor, past torch's functions too, on a tensor and on a view of the same.

Prints, as JSON, name -> [what the tensor gave, what the view gave]; an exception is its name and "!". Run it in a
process of its own: where a way works on a view, it reads from a null pointer.
"""

from __future__ import annotations

import ctypes
import io
import json
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils import dlpack

from kvtier import TieredKVCache

Way = Callable[[Any], Any]


def in_c(way: Way) -> Way:
    """A way that `__torch_function__` is not asked about."""

    def call(x: Any) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return way(x)

    return call


def read(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


@torch.jit.script
def scripted(x):
    return x * 2 + x.sum()


def saved(x: Any) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def shared(x: Any) -> Any:
    x.share_memory_()
    return x.sum()


WAYS: dict[str, Way] = {
    "to_dlpack": lambda x: dlpack.from_dlpack(dlpack.to_dlpack(x)),
    "to_dlpack_versioned": lambda x: torch._C._from_dlpack(torch._C._to_dlpack_versioned(x)),
    "from_dlpack": torch.from_dlpack,
    "numpy_from_dlpack": np.from_dlpack,
    "data_ptr": lambda x: read(x.data_ptr(), x.numel()),
    "data_ptr_in_c": in_c(lambda x: read(x.data_ptr(), x.numel())),
    "untyped_storage": lambda x: read(x.untyped_storage().data_ptr(), x.numel()),
    "untyped_storage_in_c": in_c(lambda x: read(x.untyped_storage().data_ptr(), x.numel())),
    "storage": lambda x: list(x.storage()),
    "storage_in_c": in_c(lambda x: list(torch.Tensor.storage(x))),
    "numpy": lambda x: x.numpy(),
    "numpy_in_c": in_c(lambda x: torch._C.TensorBase.numpy(x)),
    "asarray": np.asarray,
    "array_protocol": lambda x: x.__array__(),
    "cuda_array_interface": lambda x: x.__cuda_array_interface__,
    "as_tensor": torch.as_tensor,
    "as_subclass": lambda x: x.as_subclass(torch.Tensor),
    "as_subclass_in_c": in_c(lambda x: x.as_subclass(torch.Tensor)),
    "make_subclass": lambda x: torch.Tensor._make_subclass(torch.Tensor, x),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "data": lambda x: x.data,
    "tolist": lambda x: x.tolist(),
    "tolist_in_c": in_c(lambda x: x.tolist()),
    "item_in_c": in_c(lambda x: x[0, 0, 0, 0].item()),
    "repr_in_c": in_c(lambda x: bool(torch.Tensor.__repr__(x))),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "forking_pickle": lambda x: pickle.loads(ForkingPickler.dumps(x)),
    "save": saved,
    "share_memory_": shared,
    "pin_memory": lambda x: x.pin_memory(),
    "pin_memory_in_c": in_c(lambda x: x.pin_memory()),
    "scripted": scripted,
    "ops": lambda x: torch.ops.aten.add.Tensor(x, 1),
    "ops_in_c": in_c(lambda x: torch.ops.aten.add.Tensor(x, 1)),
    "copy_in_c": in_c(lambda x: torch.empty(x.shape).copy_(x)),
}


def told(result: Any) -> str:
    if isinstance(result, torch.Tensor):
        result = (result + 0).tolist()
    return str(result.tolist() if isinstance(result, np.ndarray) else result)


def main() -> None:
    cache = TieredKVCache(block_size=4)
    kv = torch.arange(24.0).view(1, 2, 3, 4)
    cache.update(kv, -kv, 0)
    outcomes: dict[str, list[str]] = {}
    for name, way in WAYS.items():
        outcomes[name] = []
        for x in (kv.clone(), cache.layers[0].keys):
            try:
                outcomes[name].append(told(way(x)))
            except Exception as error:
                outcomes[name].append(f"{type(error).__name__}!")
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
