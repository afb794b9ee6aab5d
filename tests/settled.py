"""What is so soon, however busy the machine is."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Collection


def settled(condition: Callable[[], object], seconds: float = 120.0) -> bool:
    """Whether it is so in time. Garbage is collected meanwhile: what is dropped ends by itself."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def only(threads: Collection[threading.Thread]) -> bool:
    """Whether no others are left soon. Of these some may end: they can be of an earlier test."""
    return settled(lambda: set(threading.enumerate()) <= set(threads))


def handles() -> int:
    """Of this process."""
    return len(os.listdir("/proc/self/fd"))
