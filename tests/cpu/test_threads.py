"""Threads, futures and forks: results never depend on them, and nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from problems import Case, Packed, Paged, Result, Spec, changed

from kvtier.cpu import build, native
from kvtier.errors import KVTierError
from kvtier.kernels.params import AttentionParams

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.usefixtures("kernel")

# 3 MiB and 9 MiB of keys and values: several tasks for each sequence.
SPEC = Spec(torch.bfloat16, 4, 2, 2, lengths=(3000, 9000, 17), block_size=64, seed=1, causal=True)
LARGE = changed(SPEC, lengths=(60_000,), queries=8)


@pytest.fixture(autouse=True)
def _team() -> Iterator[None]:
    yield
    native.library().kvtier_use_team(native.torch_team())


class Call:
    """A problem that can be asked again and again."""

    def __init__(self, spec: Spec) -> None:
        self.case = Case(spec)
        self.paged = Paged(self.case)
        self.sequences = self.paged.sequences()
        self.attend(1)
        self.right = self.attend(1)

    def attend(self, threads: int) -> Result:
        result = Result(self.case.spec)
        params, out, lse = self.case.params, result.out, result.lse
        native.attend(self.paged.shape, self.case.query, self.sequences, params, threads=threads, out=out, lse=lse)
        return result

    def submit(self, threads: int) -> native.Future:
        result = Result(self.case.spec)
        params, out, lse = self.case.params, result.out, result.lse
        return native.submit(
            self.paged.shape, self.case.query, self.sequences, params, threads=threads, out=out, lse=lse
        )

    def is_right(self, out: torch.Tensor, lse: torch.Tensor | None) -> bool:
        assert lse is not None
        return torch.equal(out, self.right.out) and torch.equal(lse, self.right.lse)


def alive() -> set[str]:
    """Threads of this process. One that was joined may be among them for a moment yet."""
    return set(os.listdir("/proc/self/task"))


#: How often something is tried that a busy machine may keep from being seen.
TRIES = 100


@pytest.mark.parametrize("team", [True, False])
def test_results_are_the_same_bit_for_bit_on_any_number_of_threads(isa: str, team: bool) -> None:
    native.library().kvtier_use_team(native.torch_team() if team else None)
    call = Call(SPEC)
    for threads in (0, 1, 2, 3, 7):
        for _ in range(3):
            result = call.attend(threads)
            assert call.is_right(result.out, result.lse)
            assert not result.touched_outside()
            assert call.is_right(*call.submit(threads).wait())


@pytest.mark.parametrize("team", [True, False])
def test_ragged_results_are_the_same_bit_for_bit_on_any_number_of_threads(isa: str, team: bool) -> None:
    native.library().kvtier_use_team(native.torch_team() if team else None)
    case = Case(changed(SPEC, lengths=(9000, 3000, 17, 6000), queries=3))
    paged, counts = Paged(case), [1, 0, 2, 3]
    results = []
    for threads in (1, 2, 5):
        for attend in (native.attend, lambda *args, **options: native.submit(*args, **options).wait()[0]):
            packed = Packed(case, counts, four=False)
            results.append(packed)
            options = {"threads": threads, "out": packed.out, "lse": packed.lse, "cu_queries": packed.cu_queries}
            assert attend(paged.shape, packed.query, paged.sequences(), packed.params, **options) is packed.out
    for other in results[1:]:
        assert torch.equal(other.around, results[0].around)
        assert torch.equal(other.lse, results[0].lse)


def test_a_team_that_returns_late_is_left_alone_for_a_while() -> None:
    """As when another process is busy on a core: the team waits for a thread that has nothing left to do."""
    used = [0]
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def team(run: Callable[[int], None], data: int, threads: int, flags: int) -> None:
        used[0] += 1
        run(data)
        time.sleep(0.2)

    call = Call(SPEC)
    native.library().kvtier_use_team(team)
    for _ in range(50):
        result = call.attend(2)
        assert call.is_right(result.out, result.lse)
    assert used[0] == 2, "once, and after 16 calls again"


def test_a_team_is_left_alone_for_longer_each_time_and_comes_back(tmp_path: Path) -> None:
    program = """
#include <cstdio>
#include "backoff.h"

// Returns so late after 1 ms of work, for so many calls on the team; prints how many calls left it alone before each.
static void calls(Backoff& backoff, int microseconds, int count) {
  const Clock::time_point began{}, done = began + std::chrono::milliseconds(1);
  for (int i = 0; i < count; i++) {
    int alone = 0;
    while (backoff.active()) alone++;
    std::printf("%d ", alone);
    backoff.observe(began, done, done + std::chrono::microseconds(microseconds));
  }
  std::printf("\\n");
}

int main() {
  Backoff backoff;
  calls(backoff, 90, 3);
  calls(backoff, 240, 3);
  calls(backoff, 260, 9);
  calls(backoff, 0, 3);
  calls(backoff, 260, 3);
  backoff.reset();
  calls(backoff, 260, 2);
}
"""
    try:
        command = build.compiler()
    except build.BuildError:
        pytest.skip("there is no C++ compiler here")
    (tmp_path / "check.cpp").write_text(program)
    made = tmp_path / "check"
    subprocess.run(
        [*command, "-std=c++17", f"-I{build.SOURCE}", str(tmp_path / "check.cpp"), "-o", str(made)], check=True
    )
    lines = subprocess.run([str(made)], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [[int(x) for x in line.split()] for line in lines] == [
        [0, 0, 0],
        [0, 0, 0],
        [0, 16, 32, 64, 128, 256, 512, 512, 512],
        [512, 0, 0],
        [0, 16, 32],
        [0, 16],
    ]


def test_a_submitted_call_goes_on_while_python_does() -> None:
    call, turns = Call(LARGE), 0
    for _ in range(TRIES):  # on a busy machine Python may come to nothing before a call has ended
        future, turns = call.submit(1), 0
        while not future.done():
            turns += 1
            time.sleep(0)
        assert call.is_right(*future.wait())
        if turns > 1:
            break
    assert turns > 1


def test_a_call_gives_the_interpreter_to_other_threads() -> None:
    call = Call(LARGE)
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(1e-4)

    thread = threading.Thread(target=count)
    thread.start()
    while not turns[0]:
        time.sleep(1e-3)
    counted, interval = 0, sys.getswitchinterval()
    sys.setswitchinterval(60)  # nobody has to give the lock away
    try:
        for _ in range(20):
            before = turns[0]
            call.attend(1)
            counted = turns[0] - before
            if counted > 20:  # the call in C let them count; torch does once or twice
                break
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
    assert counted > 20


def test_a_future_can_be_waited_for_twice() -> None:
    call = Call(SPEC)
    future = call.submit(2)
    first = future.wait()
    assert future.done()
    again = future.wait()
    assert first[0] is again[0]
    assert call.is_right(*again)


def test_a_future_tells_how_long_its_job_ran() -> None:
    call = Call(LARGE)
    for _ in range(TRIES):
        began = time.perf_counter()
        future = call.submit(1)
        seconds, running = future.seconds, not future.done()
        future.wait()
        assert 0.0 < future.seconds <= time.perf_counter() - began
        if running:
            break
    assert (running, seconds) == (True, 0.0)
    future.wait()
    assert future.seconds > 0.0


def test_sequences_may_change_as_soon_as_a_call_was_submitted() -> None:
    call = Call(LARGE)
    for _ in range(5):
        future = call.submit(1)
        call.sequences.set_length(1)
        call.sequences.set_runs(0, [(8, 0, 1)])
        assert call.is_right(*future.wait())
        call.sequences = call.paged.sequences()


def test_a_future_that_is_dropped_still_protects_what_its_threads_use() -> None:
    call = Call(SPEC)
    for _ in range(50):
        call.submit(2)
        gc.collect(0)
    queue = [call.submit(2) for _ in range(20)]
    del queue
    assert call.is_right(*call.submit(1).wait())


def test_many_futures_may_be_in_flight_and_be_waited_for_in_any_order() -> None:
    calls = [Call(changed(SPEC, seed=seed, lengths=(700 + 977 * seed, 5))) for seed in range(8)]
    futures = [(call, call.submit(1 + n % 3)) for n in range(6) for call in calls]
    between = calls[0].attend(2)
    for call, future in futures[1::2] + futures[::2][::-1]:
        assert call.is_right(*future.wait())
    assert calls[0].is_right(between.out, between.lse)


def test_python_threads_call_at_the_same_time() -> None:
    calls = [Call(changed(SPEC, seed=seed, lengths=(5000, 100 * seed + 2))) for seed in range(4)]
    wrong: list[int] = []

    def work(number: int) -> None:
        call = calls[number]
        for turn in range(15):
            future = call.submit(2)
            result = call.attend(1 + (turn + number) % 3)
            if not (call.is_right(result.out, result.lse) and call.is_right(*future.wait())):
                wrong.append(number)

    for team in (native.torch_team(), None):
        native.library().kvtier_use_team(team)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_shutdown_leaves_no_thread_and_the_next_call_starts_new_ones() -> None:
    call, library = Call(SPEC), native.library()
    library.kvtier_use_team(None)
    library.kvtier_shutdown()
    before = alive()
    for _ in range(3):
        assert library.kvtier_threads() == 0
        futures = [call.submit(3) for _ in range(5)]
        call.attend(3)
        assert library.kvtier_threads() == 3
        assert len(alive() - before) == 3
        library.kvtier_shutdown()  # what was submitted is still done
        assert all(future.done() for future in futures)
        for _ in range(60_000):
            if alive() <= before:
                break
            time.sleep(1e-3)
        assert alive() <= before
        assert all(call.is_right(*future.wait()) for future in futures)


def test_shutdowns_and_calls_at_the_same_time_do_not_hang() -> None:
    call, library = Call(SPEC), native.library()
    library.kvtier_use_team(None)
    wrong: list[int] = []

    def work() -> None:
        for turn in range(60):
            future = call.submit(2)
            if turn % 2:
                library.kvtier_shutdown()
            if not call.is_right(*future.wait()):
                wrong.append(turn)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not wrong
    # Threads that a shutdown ended are not counted as ones that could still work.
    future = call.submit(1)
    for _ in range(60_000):
        if future.done():
            break
        time.sleep(1e-3)
    assert future.done()
    library.kvtier_shutdown()


FORK = """
import os, signal, sys, torch
sys.path[:0] = sys.argv[1:]
from test_threads import LARGE, SPEC, Call
from kvtier.cpu import build, native
from kvtier.errors import KVTierError

call, slow = Call(SPEC), Call(LARGE)
torch.set_num_threads(2)
torch.randn(2000, 500) @ torch.randn(500, 500)  # GNU OpenMP has threads now, which a child has not
call.attend(2)
for turn in range(3):
    future, done = [slow.submit(2) for _ in range(3)], call.submit(1)
    done.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # a child that hangs is killed
        result = call.attend(2)
        assert call.is_right(result.out, result.lse)
        assert call.is_right(*call.submit(2).wait())
        assert call.is_right(*done.wait())
        try:
            # Whichever was not done when the process was forked never will be: it says so.
            for one in future:
                assert one.done()
                assert slow.is_right(*one.wait())
        except KVTierError as error:
            assert "fork" in str(error)
        del future, one
        native.library().kvtier_shutdown()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert all(slow.is_right(*one.wait()) for one in future)
print("fine")
"""


def test_a_forked_child_attends_and_submits() -> None:
    # In a process of its own: GNU OpenMP has few threads here and no fork behind it.
    command = [sys.executable, "-c", FORK, str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr


def test_blocks_live_as_long_as_calls_over_them() -> None:
    # Memory of this size is unmapped when it is freed: threads that still read it would crash.
    in_flight = 0
    for _ in range(TRIES):
        call = Call(LARGE)
        right, futures = call.right, [call.submit(1) for _ in range(4)]
        in_flight += not futures[-1].done()
        del call
        for future in futures:
            out, lse = future.wait()
            assert torch.equal(out, right.out)
            assert torch.equal(lse, right.lse)
        if in_flight == 3:
            break
    assert in_flight == 3


# The globals of a program are cleared in the order in which they were made, before those of any module. `First` says
# whether threads were still at work when that began; then goes the memory that they read.
EXIT = """
import sys
sys.path[:0] = sys.argv[1:]

class First:
    def __del__(self):
        print("idle" if all(future.done() for future in futures) else "at work", flush=True)

first = First()
from test_threads import LARGE, Call
call = Call(LARGE)
call.sequences.keep = None
futures = [call.submit(2) for _ in range(30)]
print("fine" if not futures[-1].done() else "too early", flush=True)
"""


def test_a_process_that_ends_with_calls_in_flight_waits_for_them_before_it_frees_anything() -> None:
    command = [sys.executable, "-c", EXIT, str(ROOT), str(Path(__file__).parent)]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stdout, done.stderr) == (0, "fine\nidle\n", "")


def test_what_is_submitted_while_a_process_ends_is_done_at_once() -> None:
    program = """
import atexit, sys, time
sys.path[:0] = sys.argv[1:]
from test_threads import LARGE, SPEC, Call, native

def last():  # registered before the library's own: it runs after it
    before = call.submit(2)
    assert before.done()
    assert call.is_right(*before.wait())
    result = call.attend(2)
    assert call.is_right(result.out, result.lse)
    print("fine")

atexit.register(last)
call = Call(SPEC)
large = Call(LARGE)
before = large.submit(1)
time.sleep(2e-3)  # a thread took it from the queue, and is at work
native.library().kvtier_drain()
assert before.done()
"""
    command = [sys.executable, "-c", program, str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "fine\n", "")


SHAPE = native.Shape(torch.float32, 2, 64, 48, 16)


def test_problems_that_cannot_be_are_errors_and_not_crashes() -> None:
    memory = torch.zeros(2, 2 * 16 * (64 + 48))
    address = memory.data_ptr()
    query = torch.randn(1, 4, 1, 64)

    def refused(
        query: torch.Tensor = query,
        params: AttentionParams | None = None,
        shape: native.Shape = SHAPE,
        runs: Sequence[tuple[int, int, int]] = ((address, 0, 2),),
        length: int = 30,
        **options: Any,
    ) -> None:
        sequences = native.Sequences(1, memory.stride(0) * 4)
        sequences.set_runs(0, runs)
        sequences.set_length(length)
        for call in (native.attend, lambda *args, **more: native.submit(*args, **more).wait()):
            with pytest.raises(KVTierError):
                call(shape, query, sequences, params or AttentionParams(0.1), threads=2, **options)

    refused(query=query[:, :3])  # not a multiple of the KV heads
    refused(query=query[:, :1])  # fewer
    refused(query=query[..., :32])
    refused(query=query.bfloat16())
    refused(query=query.expand(2, -1, -1, -1))  # more rows than sequences
    refused(query=query.double())
    refused(shape=native.Shape(torch.float32, 0, 64, 48, 16))
    refused(shape=native.Shape(torch.float32, 2, 64, 48, 0))
    refused(params=AttentionParams(0.1, window=-1))
    refused(length=-1)
    for runs in (
        [(address, 0, 1), (address, 1, 0)],  # no block
        [(address, 0, 2), (address, 1, 1)],  # overlapping
        [(address, 1, 1), (address, 0, 1)],  # falling
    ):
        refused(runs=runs)
    for cu_queries in ([0], [0, 1, 1], [0, 3], [1, 4], [0, -1], []):
        refused(query=query[0].mT.reshape(4, 1, 64)[:1].expand(4, 4, 64), cu_queries=cu_queries)
    refused(query=query.expand(2, -1, -1, -1), cu_queries=[0, 1])
    refused(query=query[0, 0], cu_queries=[0, 1])
    refused(query=query[0])
    refused(out=torch.empty(1, 4, 1, 64))
    refused(out=torch.empty(1, 4, 1, 48, dtype=torch.float64))
    refused(out=torch.empty(1, 4, 48, 1).mT.expand(1, 4, 1, 48)[..., ::2])
    refused(lse=torch.empty(1, 4, 2))
    refused(lse=torch.empty(1, 4, 1, dtype=torch.float64))
    refused(params=AttentionParams(0.1, mask=torch.ones(1, 1, 1, 29, dtype=torch.bool)))
    refused(params=AttentionParams(0.1, mask=torch.ones(1, 3, 1, 30, dtype=torch.bool)))
    refused(params=AttentionParams(0.1, mask=torch.ones(1, 1, 1, 30, dtype=torch.int64)))
    refused(params=AttentionParams(0.1, sinks=torch.zeros(2)))
    refused(params=AttentionParams(0.1, sinks=torch.zeros(4, dtype=torch.bfloat16)))
    refused(params=AttentionParams(0.1, slopes=torch.zeros(8)[::2]))
    refused(params=AttentionParams(0.1, first_valid=torch.zeros(1)))
    refused(query=query.to("meta"))


def test_a_future_of_a_problem_that_cannot_be_says_so_each_time() -> None:
    sequences = native.Sequences(1, 0)
    sequences.set_length(-1)
    future = native.submit(SHAPE, torch.randn(1, 4, 1, 64), sequences, AttentionParams(0.1), threads=1)
    assert future.done()
    for _ in range(2):
        with pytest.raises(KVTierError, match="shapes"):
            future.wait()


def test_thousands_of_calls_do_not_grow_memory() -> None:
    call = Call(changed(SPEC, lengths=(1500, 30)))

    def resident() -> int:
        # Memory that earlier tests gave back would hide what is lost here.
        gc.collect()
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def turn() -> None:
        call.attend(2)
        call.submit(2).wait()
        call.submit(1)

    native.library().kvtier_use_team(None)
    for _ in range(200):
        turn()
    before = resident()
    for _ in range(700):
        turn()
    # Less than 100 bytes for each call, and what the allocator may do on its own.
    assert resident() - before < 2**20


NO_THREADS = """
import os, resource, sys
sys.path[:0] = sys.argv[1:]
import torch
from test_threads import SPEC, Call, native
torch.set_num_threads(1)
native.library().kvtier_use_team(None)
call = Call(SPEC)
before = native.library().kvtier_threads()
os.setuid(65534)  # of another user than root the number is limited
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
for _ in range(3):
    result = call.attend(7)
    assert call.is_right(result.out, result.lse)
    assert call.is_right(*call.submit(7).wait())
assert native.library().kvtier_threads() == before
print("fine")
"""


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
def test_where_the_system_gives_no_thread_the_caller_attends() -> None:
    command = [sys.executable, "-c", NO_THREADS, str(ROOT), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "fine\n", done.stderr
