"""Transfers whose short runs go by one launch of the real program move exactly what they should."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "transfer"))

from mixed_runs import moves_exactly
from stream_model import StreamModel

from kvtier.calibration.measurements.copies import measure
from kvtier.errors import MismatchError
from kvtier.kernels import copies
from kvtier.memory.storage.slabs import SlabAllocator
from kvtier.transfer import launches
from kvtier.transfer.cuda import CudaTransfers
from kvtier.transfer.engine import Direction
from kvtier.transfer.launches import Launches

#: Everything by launches, runs of middle lengths by the copy engine, only single blocks of the smallest by launches.
LEAST = [(1,) * 5, (3, 3, 3, 3, 0), (2, 0, 0, 0, 0)]


@pytest.mark.parametrize("least", LEAST, ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_mixed_runs_move_exactly(
    seed: int, least: tuple[int, ...], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch = Launches.launch
    monkeypatch.setattr(launches, "FEWEST", 1)
    monkeypatch.setattr(launches, "least_runs", lambda device, direction: least)
    monkeypatch.setattr(Launches, "launch", lambda self, batch: launched.append(batch.count) or launch(self, batch))
    if device.type == "cuda":
        moves_exactly(CudaTransfers(torch.device("cuda", torch.cuda.current_device())), seed)
    else:
        monkeypatch.setattr(SlabAllocator, "is_mapped", lambda self, slab: True)
        with StreamModel(seed, monkeypatch) as model:
            moves_exactly(model.engine(device), seed)
    assert launched


@pytest.mark.cuda
@pytest.mark.parametrize("direction", [Direction.FETCH, Direction.WRITE_BACK])
def test_what_pays_is_measured_on_the_device(direction: Direction) -> None:
    assert launches.valid(measure(torch.device("cuda", torch.cuda.current_device()), direction))


def test_addresses_may_lie_on_the_host_only_where_the_device_is_named(device: torch.device) -> None:
    data = torch.arange(64, dtype=torch.uint8, device=device)
    addresses = [torch.tensor([data.data_ptr() + i], device="cpu") for i in (0, 32)]
    if device.type == "cuda":
        addresses = [x.pin_memory() for x in addresses]
    copies.copy_blocks(*addresses, 32, device=device)
    assert data.tolist() == [*range(32)] * 2
    elsewhere = [x.to("meta") for x in addresses]
    with pytest.raises(MismatchError, match="meta"):
        copies.copy_blocks(*elsewhere, 32, device=device)
    with pytest.raises(MismatchError, match="meta"):
        copies.copy_blocks(elsewhere[0], addresses[1], 32, device=device)
