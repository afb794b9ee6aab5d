"""Whatever happens to a store and to what it stands on, its tokens are right, and when faults stop everything drains.

KVTIER_TEST_WORLDS says how many worlds, KVTIER_TEST_SEED which one is the first: else each run has others, those of two
versions of Transformers side by side too, and a test that fails says which one failed and how it is seen again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
import transformers
from world import World, run, worlds

#: Worlds of one run, and tests that share them.
WORLDS, SHARES = int(os.environ.get("KVTIER_TEST_WORLDS", "2000")), 10
#: Runs in different minutes have different worlds, and so has the oldest Transformers.
OLDEST = transformers.__version__.startswith("5.17.")
FIRST = int(os.environ.get("KVTIER_TEST_SEED") or int(time.time()) // 60 * 4000 % 10**9 + 2000 * OLDEST)


def check(seed: int) -> dict[str, int]:
    """The world of a seed. How often what happened in it."""
    try:
        return run(seed).did
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and type(error) is KeyboardInterrupt:
            raise
        raise AssertionError(
            f"world {seed}: {type(error).__name__}: {error}. See it again: "
            f"PYTHONPATH=. {sys.executable} tests/conversation/world.py {seed}"
        ) from error


@pytest.mark.usefixtures("one_thread", "on_the_host")
@pytest.mark.parametrize("share", range(SHARES))
def test_in_every_world_tokens_are_right_and_all_drains(share: int) -> None:
    did: dict[str, int] = {}
    with worlds():
        for seed in range(FIRST + share, FIRST + WORLDS, SHARES):
            for what, count in check(seed).items():
                did[what] = did.get(what, 0) + count
    if WORLDS >= 10000:  # else some of it may not come by
        faults = ("killed", "rot", "flip", "a transfer fails", "interrupted", "raised", "not opened", "resize", "give")
        for what in (*faults, "saved one", "saved soon", "upkeep", "verify", "train", "adapter", "guest", "chat"):
            assert did.get(what), f"in no world: {what}"


@pytest.mark.usefixtures("one_thread", "on_the_host")
def test_what_is_left_of_a_world_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    earlier, later = (threading.Thread(target=end.wait, name=name) for name in ("earlier", "later"))
    handle = os.open(os.devnull, os.O_RDONLY)
    earlier.start()

    def ends(*_: object) -> None:
        end.set()
        earlier.join()
        os.close(handle)
        end.clear()

    made, make = list[str](), tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda *args, **options: made.append(make(*args, **options)) or made[-1])
    with worlds():
        monkeypatch.setattr(World, "run", ends)
        run(0)
        monkeypatch.setattr(World, "run", lambda *_: later.start())
        with pytest.raises(AssertionError, match=r"threads are left: .*later"):
            run(0)
        assert len(made) == 2
        assert not any(map(os.path.exists, made)), "folders are left"
        end.set()
        later.join()


@pytest.mark.skipif(OLDEST, reason="it is in one version what it is in another")
def test_a_world_is_the_same_again_in_another_process() -> None:
    """Whatever the seed of Python's hashes is, and wherever objects are."""
    program = (
        "import sys; sys.path[:0] = sys.argv[1].split(':'); import torch; torch.set_num_threads(1); import world\n"
        "with world.worlds():\n"
        "    for seed in range(5000, 5008):\n"
        "        lines = []\n"
        "        try: world.run(seed, say=lines.append)\n"
        "        finally: print(seed, *lines, sep=chr(10))\n"
    )
    here = Path(__file__).resolve().parent
    folders = ":".join(map(str, (here, here.parent / "memory", here.parents[1])))
    found = subprocess.run(
        [sys.executable, "-c", program, folders],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONHASHSEED": "1", "OMP_NUM_THREADS": "1"},
    )
    assert found.returncode == 0, found.stderr[-2000:]
    one, two = found.stdout.splitlines(), list[str]()
    with worlds():
        for seed in range(5000, 5008):
            two.append(str(seed))
            run(seed, say=two.append)
    two = "\n".join(two).splitlines()
    differ = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), None)
    assert differ is None, f"{one[differ]}\nand not\n{two[differ]}"
    assert len(one) == len(two) > 100
