"""The library's CRC-32 is zlib's, wherever bytes begin and however many they are."""

from __future__ import annotations

import random
import zlib

import pytest
import torch

from kvtier.cpu import checksum
from kvtier.cpu.checksum import crc32


def some(nbytes: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=draw)


@pytest.fixture(params=["native", "zlib"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways."""
    if request.param == "zlib":
        monkeypatch.setattr(checksum, "_crc32_is_native", lambda: False)
    elif not checksum._crc32_is_native():
        pytest.skip("this CPU, or this library, has none")
    return str(request.param)


def test_it_is_that_of_zlib_for_every_length_and_alignment() -> None:
    data = some(330)
    for begin in range(17):
        for nbytes in range(330 - begin):
            part = bytes(data[begin : begin + nbytes].numpy())
            assert crc32(data.data_ptr() + begin, nbytes) == zlib.crc32(part), (begin, nbytes)


@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x01])
def test_it_is_that_of_zlib_for_bytes_that_are_all_alike(byte: int) -> None:
    for nbytes in (1, 63, 64, 65, 127, 128, 1000, 70_000):
        data = bytes([byte]) * nbytes
        assert crc32(torch.frombuffer(bytearray(data), dtype=torch.uint8).data_ptr(), nbytes) == zlib.crc32(data)


def test_it_goes_on_behind_bytes_before() -> None:
    data, rng = some(300_000), random.Random(0)
    for _ in range(200):
        cuts = sorted(rng.randrange(300_000) for _ in range(rng.randrange(6)))
        crc = 0
        for begin, end in zip([0, *cuts], [*cuts, 300_000], strict=True):
            crc = crc32(data.data_ptr() + begin, end - begin, crc)
        assert crc == zlib.crc32(bytes(data.numpy()))


def test_every_flipped_bit_changes_it() -> None:
    data = some(1029)
    before = crc32(data.data_ptr(), len(data))
    seen = {before}
    for byte in range(len(data)):
        for bit in range(8):
            data[byte] ^= 1 << bit
            seen.add(crc32(data.data_ptr(), len(data)))
            data[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * len(data)
    assert crc32(data.data_ptr(), len(data)) == before
