"""Checksums of blocks in host memory: 64 bits that differ wherever one word of a block does; see src/checksum.h. And
zlib's CRC-32, faster where the CPU can; see src/crc32.h."""

from __future__ import annotations

import ctypes
import functools
import zlib
from array import array

import torch

from kvtier.cpu.loader import available, check, library, library_with_gil

# As in src/checksum.h.
_CHUNK, _BASE, _WORD = 512, 0x9E3779B97F4A7C15, (1 << 64) - 1
#: Of more bytes, the GIL is given back.
_SHORT = 1 << 16


def checksums(address: int, blocks: int, nbytes: int, seed: int) -> array[int]:
    """A checksum of each of `blocks` neighbouring blocks.

    Args:
        address: of the first, in host memory.
        blocks: how many.
        nbytes: of each, a multiple of 8.
        seed: in [0, 2^64): what else the checksums are of; other seeds give others.
    """
    sums = array("Q", bytes(8 * blocks))
    if not available():
        return _in_torch(address, nbytes, seed, sums)
    of = library() if blocks * nbytes > _SHORT else library_with_gil()
    where = ctypes.c_void_p(sums.buffer_info()[0])
    sizes = (ctypes.c_int64(blocks), ctypes.c_int64(nbytes), ctypes.c_uint64(seed))
    check(of.kvtier_checksums(ctypes.c_void_p(address), *sizes, where))
    return sums


def crc32(address: int, nbytes: int, crc: int = 0) -> int:
    """The CRC-32 of bytes in host memory, as `zlib.crc32` has it. The GIL is given back.

    Args:
        address, nbytes: where they are.
        crc: of the bytes before these.
    """
    if not _crc32_is_native():
        return zlib.crc32((ctypes.c_char * nbytes).from_address(address), crc)
    found = ctypes.c_uint32(crc)
    check(library().kvtier_crc32(ctypes.c_void_p(address), ctypes.c_int64(nbytes), ctypes.byref(found)))
    return found.value


@functools.cache
def _crc32_is_native() -> bool:
    return available() and library().kvtier_crc32(None, ctypes.c_int64(0), ctypes.byref(ctypes.c_uint32())) == 0


@functools.cache
def _weights() -> torch.Tensor:
    weights, state = [], 0
    for _ in range(_CHUNK):
        state = (state + _BASE) & _WORD
        x = state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _WORD
        weights.append((x ^ (x >> 31)) | 1)
    with torch.inference_mode(False):
        return torch.frombuffer(bytearray(array("Q", weights).tobytes()), dtype=torch.int64)


def _folded(x: torch.Tensor) -> torch.Tensor:
    return x ^ (x >> 32 & 0xFFFFFFFF)


def _in_torch(address: int, nbytes: int, seed: int, sums: array[int]) -> array[int]:
    """The same without the library: torch's integers wrap around as well."""
    for i in range(len(sums)):
        found = (ctypes.c_int64 * (nbytes // 8)).from_address(address + i * nbytes)
        result = seed
        for chunk in torch.frombuffer(found, dtype=torch.int64).split(_CHUNK):
            total = int(_folded(_folded(chunk) * _weights()[: len(chunk)]).sum())
            result = ((result + total) * _BASE) & _WORD
        sums[i] = result
    return sums
