"""What the system has of a file in memory, straight into host memory, with checksums on the way; see src/cached.h."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

from kvtier.cpu.loader import available, check, library

#: Where bytes go: an address, and how many.
Piece = tuple[int, int]
_INVALID, _ABSENT = 1, 4
#: Bytes that are brought into memory at a time.
_PIECE = 2**18


class _Piece(ctypes.Structure):
    # As in src/attention.h.
    _fields_ = (("address", ctypes.c_void_p), ("nbytes", ctypes.c_int64))


class _From(ctypes.Structure):
    # As in src/attention.h.
    _fields_ = (
        ("file", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("offset", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("segment", ctypes.c_int64),
        ("pieces", ctypes.c_void_p),
        ("piece_count", ctypes.c_int64),
        ("crc", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
    )


class CachedFile:
    """Reads a file from its beginning, as far as it is in the system's page cache. Nothing waits for a disk.

    Args:
        handle: of the file.
        nbytes: of the file.
        segment: bytes that have a checksum of their own.

    Attributes:
        at: bytes that were read.
    """

    def __init__(self, handle: int, nbytes: int, segment: int) -> None:
        self.at = 0
        self._handle = handle
        self._crc = ctypes.c_uint32()
        self._sums = (ctypes.c_uint32 * (nbytes // segment + 1))()
        self._from = _From(file=handle, segment=segment, crc=ctypes.addressof(self._crc))

    def read(self, pieces: Sequence[Piece], heads: int = 1, head_stride: int = 0) -> bool:
        """Read the next bytes. False where one of them is not in memory: some may have been written then, and are read
        again by the next call.

        Args:
            pieces: where they go, in order.
            heads: so many times as many bytes, of each head after the other.
            head_stride: bytes from where those of one head go to those of the next one.
        """
        made, here = (_Piece * len(pieces))(*[_Piece(*piece) for piece in pieces]), self._from
        here.heads, here.head_stride, here.offset = heads, head_stride, self.at
        here.pieces, here.piece_count = ctypes.addressof(made), len(pieces)
        here.sums = ctypes.addressof(self._sums) + 4 * (self.at // here.segment)
        before = self._crc.value
        error = library().kvtier_read_cached(ctypes.byref(here))
        if error == _ABSENT:
            self._crc.value = before
            return False
        check(error)
        self.at += heads * sum([nbytes for _, nbytes in pieces])
        return True

    def take(self, nbytes: int) -> bytes | None:
        """Read the next bytes. None where one of them is not in memory."""
        found = ctypes.create_string_buffer(nbytes)
        return found.raw if self.read([(ctypes.addressof(found), nbytes)]) else None

    def bring(self, nbytes: int) -> None:
        """Have the system bring the next bytes into memory. Waits for the disk.

        Raises:
            OSError: they cannot be read.
        """
        scratch, at, end = memoryview(bytearray(_PIECE)), self.at, self.at + nbytes
        while at < end and (got := os.preadv(self._handle, [scratch[: min(_PIECE, end - at)]], at)):
            at += got

    @property
    def sums(self) -> bytes:
        """The checksums of all that was read: a CRC-32 of each segment, the last one as far as it was read."""
        whole, rest = divmod(self.at, self._from.segment)
        sums = [*self._sums[:whole], *([self._crc.value] if rest else [])]
        return b"".join(x.to_bytes(4, "little") for x in sums)


@functools.cache
def can_read_cached() -> bool:
    """Whether this system and CPU can."""
    nothing = _From(file=-1, heads=0, segment=1)
    return available() and library().kvtier_read_cached(ctypes.byref(nothing)) != _INVALID
