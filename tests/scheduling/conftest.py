"""Machines whose arithmetic can be done by hand."""

from __future__ import annotations

import pytest

from kvtier.planning.hardware.machines import Machine, ModelSize
from kvtier.scheduling.simulation.profile import Profile

#: One layer, one byte of KV per token and head pair; a GFLOP of arithmetic takes about a second.
SMALL = ModelSize(layers=1, hidden=4, heads=2, head_dim=2, kv_heads=1, parameters=500, active=500, itemsize=2)
SLOW = Machine(flops=1e6, device_memory=1e6, device_bytes=10**9, link=1e4, host_memory=1e5)


@pytest.fixture
def profile() -> Profile:
    """Forty blocks on the device, as many on the host."""
    return Profile(SLOW, SMALL, device_blocks=40, host_blocks=40, block_size=4, overhead=0.01)
