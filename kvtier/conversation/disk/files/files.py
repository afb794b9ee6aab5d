"""Files of tensors: written whole or not at all, and read only if every byte is what was written.

The format is safetensors'. The checksum is of the kind that finds damage, not forgery: a CRC-32 of every `SEGMENT`
bytes. It finds every change of up to 32 neighbouring bits and all but one in 2^32 of the others, and takes less time
than reading does, where a cryptographic digest takes several times as long.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import math
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvtier.conversation.disk.files.folder import keep_owner, sync_names
from kvtier.cpu.checksum import crc32

#: Bytes of tensors in one file, where what is saved can be parted: two files are in memory while a sequence is loaded.
LARGEST = 2**25
#: Bytes that have a checksum of their own.
SEGMENT = 2**24
#: Bytes that are read at a time: what was read is in the processor's cache when its checksum is taken.
_PIECE = 2**18
#: Of the tensors of a model's cache, as safetensors names them.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: What the system says of bytes that the disk cannot give, or that the file system finds to be others.
_LOST = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)


class Damaged(Exception):
    """A file is not what was written."""


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], said: str) -> tuple[int, bytes]:
    """Write a file under its name once it is whole and on the disk. Returns its bytes, and a checksum.

    Raises:
        OSError: it was not written.
    """
    data = _packed(tensors, said)
    unfinished = file.with_suffix(".safetensors.new")
    try:
        _write(unfinished, data)
        os.replace(unfinished, file)
        sync_names(file.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise
    return len(data), checksum(data)


class Buffer:
    """Memory that files are read into, one after the other.

    Attributes:
        awaited: whether somebody waits for what is read into it. Any thread may say that nobody does any more.
    """

    def __init__(self) -> None:
        self.awaited = True
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, nbytes: int) -> torch.Tensor:
        """So many bytes, and what was taken before is not valid any more.

        Raises:
            MemoryError: there are not so many.
        """
        if len(self._bytes) < nbytes:
            self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")  # not both at once
            try:
                self._bytes = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            except RuntimeError as error:
                raise MemoryError(f"there is no room to read {nbytes} bytes: {error}") from error
        return self._bytes[:nbytes]


def read_tensors(
    file: Path, nbytes: int, sums: bytes, buffer: Buffer | None = None
) -> tuple[dict[str, torch.Tensor], str]:
    """The tensors of a file, and what was said of them. They are parts of the buffer; None: of one of their own.

    Raises:
        Damaged: it is not what was written, or is gone, or the disk has lost some of it. OSError, MemoryError: it
            cannot be read now.
    """
    data = _checked(file, nbytes, sums, buffer or Buffer())
    try:
        return _tensors(data)
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # written by something else
        raise Damaged(f"{file.name} holds no tensors: {error}") from error


def copy_file(file: Path, to: Path, nbytes: int, sums: bytes, buffer: Buffer) -> None:
    """Copy a file, and return when its bytes are on the disk; its name is when `sync_names` returns.

    Raises:
        Damaged: it is not what was written, or is gone, or the disk has lost some of it. OSError, MemoryError: it
            cannot be copied now.
    """
    _write(to, _checked(file, nbytes, sums, buffer))


def said_of(file: Path, nbytes: int) -> str:
    """What is said of the tensors of a file, which nobody has checked yet.

    Raises:
        Damaged, ValueError, KeyError, TypeError: it is not what was written. OSError: it cannot be read now.
    """
    with opened(file, nbytes) as handle:
        size = int.from_bytes(os.pread(handle, 8, 0), "little")
        return str(json.loads(os.pread(handle, min(size, nbytes), 8))["__metadata__"]["said"])


@contextlib.contextmanager
def opened(file: Path, nbytes: int) -> Iterator[int]:
    """A handle of a file that has as many bytes as were written.

    Raises:
        Damaged: it has not, or is gone, or the disk has lost it. OSError: it cannot be read now.
    """
    try:
        # No link is followed, and nobody is waited for where something else has the name.
        handle = _unless_lost(file.name, os.open, file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise Damaged(f"{file.name} is gone") from None
    except OSError:
        if file.is_symlink():
            raise Damaged(f"{file.name} is a link") from None
        raise
    try:
        about = os.fstat(handle)
        if not stat.S_ISREG(about.st_mode) or about.st_size != nbytes:
            raise Damaged(f"{file.name} has another size than was written")
        yield handle
    finally:
        os.close(handle)


def _checked(file: Path, nbytes: int, sums: bytes, buffer: Buffer) -> torch.Tensor:
    """The bytes of a file, if these are what was written; a part of the buffer."""
    with opened(file, nbytes) as handle:
        data = buffer.take(nbytes)
        if _read(handle, file.name, data, buffer) != sums:
            raise Damaged(f"{file.name} is not what was written")
    return data


def _write(file: Path, data: torch.Tensor) -> None:
    """Make a file of these bytes, for the folder's owner only, and return when they are on the disk. What has its name
    is of no use, and is not written to: it may be a link to a file of others."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    try:
        handle = os.open(file, flags, 0o600)
    except FileExistsError:  # of a process that was killed, or a link that somebody has made
        os.unlink(file)
        handle = os.open(file, flags, 0o600)
    try:
        keep_owner(handle, file.parent)
        left = memoryview(data.numpy().data)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def checksum(data: torch.Tensor) -> bytes:
    """Of the bytes of a file."""
    return b"".join(crc32(x.data_ptr(), len(x)).to_bytes(4, "little") for x in data.split(SEGMENT) if len(x))


def _read(handle: int, name: str, into: torch.Tensor, buffer: Buffer) -> bytes:
    """Fill memory of a buffer from a file. Returns the checksum of what was read; none, where the file ends early."""
    view, address = memoryview(into.numpy().data), into.data_ptr()
    at, sums, current = 0, b"", 0
    while at < len(view):
        if not buffer.awaited:
            raise InterruptedError("nobody waits for it any more")
        piece = view[at : min(at + _PIECE, (at // SEGMENT + 1) * SEGMENT)]
        got = _unless_lost(name, os.readv, handle, [piece])
        if not got:
            return b""
        current = crc32(address + at, got, current)
        at += got
        if at % SEGMENT == 0 or at == len(view):
            sums, current = sums + current.to_bytes(4, "little"), 0
    return sums


def _unless_lost(name: str, call: Callable[..., int], *args: Any) -> int:
    """What a call of the system for a file gives. One that fails is made again, for once may be a cable. What fails
    twice would fail for good: as long as it counts as saved, it is never saved again.

    Raises:
        Damaged: the disk has lost it. OSError: it cannot be read now.
    """
    try:
        return call(*args)
    except OSError as error:
        if error.errno not in _LOST:
            raise
    try:
        return call(*args)
    except OSError as error:
        if error.errno not in _LOST:
            raise
        raise Damaged(f"the disk has lost some of {name}: {error}") from error


def _packed(tensors: Mapping[str, torch.Tensor], said: str) -> torch.Tensor:
    """A safetensors file, as bytes. What safetensors itself does holds the GIL for two copies, and whoever generates
    meanwhile waits for it.

    Raises:
        ValueError: a dtype that files do not have. MemoryError: there is no room for the file.
    """
    # What needs to be aligned most comes first, as in files that safetensors writes.
    order = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    ends = [0, *itertools.accumulate(tensors[name].nbytes for name in order)]
    about: dict[str, Any] = {"__metadata__": {"said": said}}
    for name, begin, end in zip(order, ends, ends[1:], strict=False):
        x = tensors[name]
        if x.dtype not in _NAMES:
            raise ValueError(f"{name} is of {x.dtype}, which is not saved")
        about[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [begin, end]}
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    start = 8 + len(header)
    data = Buffer().take(start + ends[-1])
    data[:start].copy_(torch.frombuffer(bytearray(len(header).to_bytes(8, "little") + header), dtype=torch.uint8))
    for name, begin, end in zip(order, ends, ends[1:], strict=False):
        if end > begin:
            x = tensors[name].detach()
            data[start + begin : start + end].view(x.dtype).view(x.shape).copy_(x)
    return data


def _tensors(buffer: torch.Tensor) -> tuple[dict[str, torch.Tensor], str]:
    """What is in a safetensors file: eight bytes that say how long its header is, the header, the tensors."""
    size = int.from_bytes(bytes(buffer[:8].numpy()), "little")
    if not 0 < size <= len(buffer) - 8:
        raise ValueError("a header that is longer than the file")
    header: dict[str, Any] = json.loads(bytes(buffer[8 : 8 + size].numpy()))
    said = header.pop("__metadata__", {}).get("said", "")
    data, found = buffer[8 + size :], {}
    for name, about in header.items():
        begin, end = about["data_offsets"]
        dtype, shape = DTYPES[about["dtype"]], about["shape"]
        if not 0 <= begin <= end <= len(data) or end - begin != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} is not within the file")
        part = data[begin:end]
        if part.storage_offset() % dtype.itemsize:
            part = part.clone()
        found[name] = part.view(dtype).view(shape)
    return found, said
