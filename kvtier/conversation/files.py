"""Files of tensors: written whole or not at all, and read only if every byte is what was written."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load, save


class Damaged(Exception):
    """A file is not what was written."""


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], said: str) -> tuple[int, bytes]:
    """Write a file under its name once it is whole and on the disk. Returns its bytes, and a checksum.

    Raises:
        OSError: it was not written.
    """
    data = save({name: x.detach().to("cpu").contiguous() for name, x in tensors.items()}, {"said": said})
    beside = file.with_suffix(".safetensors.new")
    try:
        handle = os.open(beside, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            left = memoryview(data)
            while left:
                left = left[os.write(handle, left) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(beside, file)
        folder = os.open(file.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
    return len(data), _checksum(data)


def read_tensors(file: Path, nbytes: int, checksum: bytes) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a file, and what was said of them.

    Raises:
        Damaged: it is not what was written. OSError: it cannot be read.
    """
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(handle, "rb") as stream:
        if os.fstat(handle).st_size != nbytes:
            raise Damaged(f"{file.name} has another size than was written")
        data = stream.read(nbytes + 1)
    if len(data) != nbytes or _checksum(data) != checksum:
        raise Damaged(f"{file.name} is not what was written")
    try:
        length = int.from_bytes(data[:8], "little")
        said = json.loads(data[8 : 8 + length]).get("__metadata__", {}).get("said", "")
        return load(data), said
    except Exception as error:  # written by something else, under the same checksum
        raise Damaged(f"{file.name} holds no tensors: {error}") from error


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
