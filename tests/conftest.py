"""Where the tests run: on the CPU, or with KVTIER_TEST_DEVICE=cuda everything that torch makes is made there.

KVTIER_TEST_SHARE=1/3 runs every third test, beginning with the second.

KVTIER_TEST_SIDE=newest or oldest runs one of two sides, for two versions of Transformers that are tested side by side.
What does not depend on the version is on one side. Elsewhere the cases of a test are dealt out: every test runs on both
sides, and every case on one. A test of one case runs on both sides if it is `NEAR` Transformers, else on the newest.
Of a test marked `sampled(n)` the two sides together run every n-th case: KVTIER_TEST_SAMPLE modulo n says which.
Without it all runs.
"""

import contextlib
import gc
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

SIDES = ("newest", "oldest")
#: What runs on one side alone: folders, and files by the beginning of their names.
ONE_SIDED = {
    "newest": (
        *("calibration/", "scheduling/", "eviction/", "serving/test_sub_batches"),
        *("test_imports", "test_packaging", "test_documents", "test_figures", "test_demo"),
        *(f"hf/test_{x}" for x in ("trained", "half_precision", "needed")),
        "hf/cache/test_interrupted_hybrids",
        *(f"conversation/{x}" for x in ("test_disk", "test_store", "test_index", "disk/test_disk", "saved/test_disk")),
    ),
    "oldest": (
        *("memory/", "transfer/", "tables/", "forward/", "kernels/", "attention/", "cuda/", "planning/"),
        *("cpu/", "test_benchmarks"),
    ),
}
#: Where what differs between versions is called, or calls.
NEAR = ("hf/", "serving/http/")
TESTS = Path(__file__).parent


class DrawnOnTheHost(TorchFunctionMode):
    """Random numbers from a host's generator are drawn there and then moved, whatever the default device: so they are
    the same numbers on every device, and a device refuses such a generator."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every call of a torch function comes by here."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        drawn_here = generator is not None and generator.device.type == "cpu" and kwargs.get("device") is None
        if drawn_here and not any(isinstance(x, torch.Tensor) for x in args):
            return func(*args, **(kwargs | {"device": "cpu"})).to(self.device)
        return func(*args, **kwargs)


def pytest_configure(config: pytest.Config) -> None:
    # No test may depend on the profile of this machine.
    os.environ["KVTIER_PROFILE"] = "off"
    # Before collection, so that tensors made at import time follow too.
    if device := os.environ.get("KVTIER_TEST_DEVICE"):
        torch.set_default_device(device)
        DrawnOnTheHost(device).__enter__()  # to the end of the process


class PageLocking:
    """Page-locking without CUDA.

    Attributes:
        locked: bytes by address.
        code: what every call answers; nothing is done unless it is 0.
        devices: the current one of each call.
    """

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.code = 0
        self.devices: list[object] = []
        self._current: object = None

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        """Lock."""
        assert flags == 3, "portable and mapped"
        self.devices.append(self._current)
        if not self.code:
            assert address not in self.locked
            self.locked[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        """Unlock."""
        self.devices.append(self._current)
        if self.code or address in self.locked:
            self.locked.pop(address, None) if not self.code else None
            return self.code
        return 713  # cudaErrorHostMemoryNotRegistered

    @contextlib.contextmanager
    def device(self, device: object) -> Iterator[None]:
        """Make a device current."""
        before, self._current = self._current, device
        yield
        self._current = before


@pytest.fixture
def page_locking(monkeypatch: pytest.MonkeyPatch) -> PageLocking:
    """Stands in for what torch knows of page-locking."""
    stand_in = PageLocking()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: stand_in)
    monkeypatch.setattr(torch.cuda, "device", stand_in.device)
    return stand_in


@pytest.fixture
def on_the_host() -> Iterator[None]:
    """For what is about the host, or about a device that is emulated there, whatever the default device."""
    here = torch.get_default_device().type == "cpu"  # then there is no mode to enter, which all calls of torch go by
    with contextlib.nullcontext() if here else torch.device("cpu"):
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors only lose by threads, badly so on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def side_of(path: Path) -> str | None:
    """The side on which alone a file runs."""
    name = path.relative_to(TESTS).as_posix()
    return next((side for side, names in ONE_SIDED.items() if name.startswith(names)), None)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    side = os.environ.get("KVTIER_TEST_SIDE")
    if side not in (None, *SIDES):
        raise pytest.UsageError(f"KVTIER_TEST_SIDE is {side!r}; it may be {' or '.join(SIDES)}.")
    if side and collection_path.suffix == ".py" and side_of(collection_path) not in (None, side):
        return True
    return None


def shared(item: pytest.Item) -> str:
    """The name of a case without its placement: cases that differ in that alone share what they are compared with."""
    placement = getattr(getattr(item, "callspec", None), "params", {}).get("placement")
    test, _, case = item.nodeid.partition("[")
    return "-".join([test, *(part for part in case.rstrip("]").split("-") if part != placement)])


def by_test(items: Iterable[pytest.Item]) -> list[list[pytest.Item]]:
    """The cases of each test."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    return list(cases.values())


def sampled(items: list[pytest.Item], first: int) -> list[pytest.Item]:
    """Of the tests that are marked so every n-th case, in an order by their names; of the others all."""
    left = set[pytest.Item]()
    for some in by_test(items):
        if mark := some[0].get_closest_marker("sampled"):
            (step,) = mark.args
            drawn = sorted(some, key=lambda item: zlib.crc32(item.nodeid.encode()))
            left.update(set(drawn) - set(drawn[first % min(step, len(drawn)) :: step]))
    return [item for item in items if item not in left]


def dealt(items: list[pytest.Item], side: str) -> list[pytest.Item]:
    """The tests of one side. Of a test's cases one half, drawn by their names; of a test of one case, see above."""
    first, other = SIDES.index(side), set[pytest.Item]()
    for some in by_test(items):
        if side_of(some[0].path) is not None:
            continue
        if len(some) == 1:
            if side != "newest" and not some[0].path.relative_to(TESTS).as_posix().startswith(NEAR):
                other.update(some)
        else:
            name = shared if len({shared(item) for item in some}) > 1 else lambda item: item.nodeid
            drawn = sorted({name(item) for item in some}, key=lambda case: (zlib.crc32(case.encode()), case))
            others = set(drawn[1 - first :: 2])
            other.update(item for item in some if name(item) in others)
    return [item for item in items if item not in other]


def pytest_collection_finish() -> None:
    # What is loaded by now stays: then it takes no time whenever garbage is collected.
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if side := os.environ.get("KVTIER_TEST_SIDE"):
        items[:] = dealt(sampled(items, int(os.environ.get("KVTIER_TEST_SAMPLE", "0"))), side)
    if share := os.environ.get("KVTIER_TEST_SHARE"):
        first, step = map(int, share.split("/"))
        items[:] = items[first::step]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
