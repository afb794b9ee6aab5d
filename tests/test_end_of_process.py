"""What is done at the end of a process is done, whatever comes."""

from __future__ import annotations

import pytest

from kvtier import ends


@pytest.fixture(autouse=True)
def goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process does not end."""
    monkeypatch.setattr(ends, "_here", None)


def test_an_interrupt_does_not_cut_an_end_short_and_one_that_comes_much_later_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times, seconds = iter([10.0, 11.0, 14.9, 100.0, 105.1]), list[float]()

    def now() -> float:
        seconds.append(next(times))
        return seconds[-1]

    monkeypatch.setattr(ends.time, "monotonic", now)

    @ends.insistent
    def three() -> None:
        assert ends.process_ends()
        if len(seconds) < 3:
            raise KeyboardInterrupt

    assert not ends.process_ends()
    three()
    assert len(seconds) == 3

    @ends.insistent
    def never() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        never()
    assert len(seconds) == 5


def test_an_error_at_the_end_is_raised_once() -> None:
    calls = list[int]()

    @ends.insistent
    def fails() -> None:
        calls.append(1)
        raise ValueError("once")

    with pytest.raises(ValueError, match="once"):
        fails()
    assert calls == [1]
