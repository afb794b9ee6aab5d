"""What is done at the end of a process is done, whatever comes."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from kvtier import ends


@pytest.fixture(autouse=True)
def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not end."""
    monkeypatch.setattr(ends, "_ending", None)


def test_an_interrupt_does_not_cut_an_end_short_and_one_that_comes_much_later_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, seconds = iter([10.0, 11.0, 14.9, 100.0, 105.1]), list[float]()

    def now() -> float:
        seconds.append(next(times))
        return seconds[-1]

    monkeypatch.setattr(ends.time, "monotonic", now)

    @ends.retry_on_interrupt
    def three() -> None:
        assert ends.process_ends()
        if len(seconds) < 3:
            raise KeyboardInterrupt

    assert not ends.process_ends()
    three()
    assert len(seconds) == 3

    @ends.retry_on_interrupt
    def never() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        never()
    assert len(seconds) == 5


def test_an_error_at_the_end_is_raised_once() -> None:
    calls = list[int]()

    @ends.retry_on_interrupt
    def fails() -> None:
        calls.append(1)
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        fails()
    assert calls == [1]


def test_a_thread_whose_join_was_interrupted_is_waited_for() -> None:
    ends_now = threading.Event()
    thread = threading.Thread(target=ends_now.wait, args=(60,))
    thread.start()
    main = threading.main_thread().ident
    assert main is not None
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored, as in the background
    try:
        threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            ends.join(thread)
    finally:
        signal.signal(signal.SIGINT, before)
    assert ends.runs(thread)
    threading.Timer(0.2, ends_now.set).start()
    began = time.monotonic()
    ends.join(thread)
    assert ends_now.is_set()
    assert time.monotonic() - began > 0.1
    assert not ends.runs(thread)
    ends.join(None)


def test_a_thread_that_has_ended_is_not_taken_for_a_later_one_with_its_number() -> None:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    thread._ident = threading.get_ident()  # type: ignore[attr-defined]
    assert not ends.runs(thread)
    ends.join(thread)  # else for ever
