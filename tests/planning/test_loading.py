"""Loading or computing: what is chosen is never much worse than the better of the two."""

from __future__ import annotations

import itertools
import json
import math
import random
from typing import Any

import pytest

from kvtier.planning.hardware.predictors import Prefill
from kvtier.planning.resuming.loading import PROBE, LoadOrCompute
from kvtier.planning.resuming.prefix import SavedPrefix

BYTES = 100_000  # of a token


def machine(draw: random.Random) -> tuple[Prefill, float, float]:
    """What a prefill takes, and the overhead and the seconds per byte of a disk."""
    per_token = 10 ** draw.uniform(-5, -2.5)
    fixed, per_pair = draw.uniform(1e-3, 3e-2), per_token / 10 ** draw.uniform(3.5, 5)
    prefill = Prefill(fixed, per_token, per_pair, per_pair)
    return prefill, draw.uniform(0, 5e-3), 1 / 10 ** draw.uniform(7, 10)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_chosen_is_within_a_tenth_of_the_better_once_it_was_tried(seed: int) -> None:
    draw = random.Random(seed)
    prefill, overhead, per_byte = machine(draw)
    choice, chosen, loading, computing = LoadOrCompute(), 0.0, 0.0, 0.0
    for n in range(120):
        tokens, past, more = draw.randrange(500, 20_000), draw.choice((0, 0, 4000)), draw.randrange(16, 600)
        noise = draw.uniform(0.98, 1.02)
        load = (overhead + per_byte * tokens * BYTES) * noise
        compute = (prefill.seconds(tokens + more, past) - prefill.seconds(more, past + tokens)) * noise
        probes = choice._computed >= PROBE
        if choice.choose(SavedPrefix([(0, tokens * BYTES)], past + tokens, past, more)) == 0:
            choice.loaded(tokens * BYTES, load)
            choice.computed(more, past + tokens, 1, prefill.seconds(more, past + tokens) * noise)
            taken = load
        else:
            choice.computed(tokens + more, past, 1, prefill.seconds(tokens + more, past) * noise)
            taken = compute
        if n >= 40 and not probes:
            chosen += taken
            loading += load
            computing += compute
    assert loading
    assert chosen <= 1.1 * min(loading, computing)


def loads(choice: LoadOrCompute, nbytes: int, tokens: int) -> bool:
    """Whether all is loaded, where a tail alone cannot be."""
    return choice.choose(SavedPrefix([(0, nbytes)], tokens, 0, 10)) == 0


def test_nothing_is_known_at_first_and_it_loads() -> None:
    choice = LoadOrCompute()
    assert loads(choice, 10**12, 100)
    choice.loaded(10**9, 100.0)
    assert loads(choice, 10**12, 100), "nobody knows what computing takes"
    choice.computed(1, 100, 1, 0.1)
    assert loads(choice, 10**12, 100), "one token tells nothing of many"


def test_a_disk_that_becomes_faster_is_noticed() -> None:
    choice = LoadOrCompute()
    for _ in range(60):
        choice.loaded(10**9, 100.0)
        choice.computed(1000, 0, 1, 1.0)
    assert [loads(choice, 10**9, 1000) for _ in range(PROBE + 2)] == [False] * PROBE + [True, False]
    count = 0
    for _ in range(PROBE * 30):
        if loads(choice, 10**9, 1000):
            count += 1
            choice.loaded(10**9, 0.1)
    assert count > PROBE * 5


def test_a_longer_past_makes_computing_dearer() -> None:
    choice, prefill = LoadOrCompute(), Prefill(0.01, 1e-4, 1e-7, 1e-7)
    for new in (100, 400, 1600, 6400):
        for past in (0, 2000, 30000):
            choice.computed(new, past, 1, prefill.seconds(new, past))
    near, far = (choice.seconds_to_compute(1000, past, 64) for past in (0, 50_000))
    assert near is not None
    assert far is not None
    assert far > 10 * near


# A head is computed while the tail is loaded


def chain(draw: random.Random, length: int) -> list[tuple[int, int]]:
    """Files of a sequence: the first token and the bytes of each."""
    starts = [0, *sorted(draw.sample(range(1, length), draw.randrange(min(length - 1, draw.choice((4, 40, 400))))))]
    return [(a, (b - a) * BYTES) for a, b in itertools.pairwise([*starts, length])]


@pytest.mark.parametrize("seed", range(200))
def test_no_other_beginning_of_the_tail_is_expected_to_be_much_better(seed: int) -> None:
    draw = random.Random(seed)
    prefill, overhead, per_byte = machine(draw)
    choice = LoadOrCompute()
    for _ in range(20):
        new, past = draw.randrange(2, 4000), draw.randrange(8000)
        choice.computed(new, past, 1, prefill.seconds(new, past))
        choice.loaded(nbytes := draw.randrange(1, 10**9), overhead + per_byte * nbytes)
    slower, dearer = draw.choice([(1.0, 1.0), (1.6, 1.0), (1.2, 2.0)])
    for _ in range(40):
        choice.loaded_overlapped(10**8, slower * (choice.seconds_to_load(10**8) or 0))
        choice.computed_overlapped(1000, 0, 1, dearer * (choice.seconds_to_compute(1000, 0, 0) or 0))
    length, more, step = draw.randrange(300, 20_000), draw.randrange(16, 600), draw.choice((1, 16, 256))
    batch = draw.choice((1, 1, 4))
    files, past = chain(draw, length), draw.choice((0, 0, draw.randrange(length)))

    def seconds(start: int) -> float:
        """Of any way there is, by the same predictions."""
        nbytes = sum(n for i, (_, n) in enumerate(files) if i + 1 == len(files) or files[i + 1][0] > start)
        load = choice.seconds_to_load(nbytes) or 0.0
        if start == length:
            return choice.seconds_to_compute(length - past, past, more, batch) or 0.0
        if start <= past:
            return load
        return max(slower * load, dearer * (choice.seconds_to_compute(start - past, past, 0, batch) or 0.0))

    ways = [0, length] + [x for first, _ in files for x in [-(-max(first, past) // step) * step] if x < length]
    chosen = choice.choose(SavedPrefix(files, length, past, more, step, batch=batch))
    assert chosen in ways
    assert seconds(chosen) <= 1.0501 * min(seconds(x) for x in ways)


def test_choosing_among_more_files_takes_hardly_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long conversation has files by the hundred, and nothing is loaded before it is chosen."""
    choice, looked, seconds = LoadOrCompute(), list[int](), Prefill.seconds
    for new in (100, 1000, 4000):
        choice.loaded(new * BYTES, new * 1e-3)
        choice.computed(new, 0, 1, new * 1e-3)
    monkeypatch.setattr(Prefill, "seconds", lambda *args: looked.append(0) or seconds(*args))
    took = []
    for count in (8, 2048):
        looked.clear()
        size = 2**15 // count
        saved = SavedPrefix([(i * size, size * BYTES) for i in range(count)], 2**15, 0, 100, 16)
        assert 0 < choice.choose(saved) < 2**15
        took.append(len(looked))
    assert took[1] <= 1.5 * took[0], took


def test_beams_compute_each_token_for_every_row_and_load_it_once() -> None:
    choice = LoadOrCompute()
    for tokens in (100, 1000, 10_000):
        choice.loaded(tokens * BYTES, tokens * 2e-3)
        choice.computed(tokens, 0, 1, tokens * 1e-3)
    files = [(start, 100 * BYTES) for start in range(0, 10_000, 100)]
    assert choice.choose(SavedPrefix([(0, 10_000 * BYTES)], 10_000, 0, 64)) == 10_000, (
        "computing one row takes half as long"
    )
    assert choice.choose(SavedPrefix([(0, 10_000 * BYTES)], 10_000, 0, 64, batch=4)) == 0, (
        "computing four takes twice as long"
    )
    for batch, share in ((1, 2 / 3), (4, 1 / 3)):
        start = choice.choose(SavedPrefix(files, 10_000, 0, 64, 16, batch=batch))
        assert abs(start / 10_000 - share) < 0.03


def test_with_equal_prices_about_half_is_computed_meanwhile() -> None:
    choice = LoadOrCompute()
    for tokens in (100, 1000, 10_000):
        choice.loaded(tokens * BYTES, tokens * 1e-3)
        choice.computed(tokens, 0, 1, tokens * 1e-3)
    files = [(start, 100 * BYTES) for start in range(0, 10_000, 100)]
    start = choice.choose(SavedPrefix(files, 10_000, 0, 64, 16))
    assert 4800 <= start <= 5200
    assert start % 16 == 0
    assert choice.choose(SavedPrefix(files, 10_000, 0, 64)) in (0, 10_000), "nobody can use a tail alone"


@pytest.mark.parametrize("slower", [1, 2, 4])
def test_one_load_tells_that_a_tail_takes_less(slower: int) -> None:
    choice, files = LoadOrCompute(), [(start, 100 * BYTES) for start in range(0, 10_000, 100)]
    choice.loaded(10_000 * BYTES, slower * 10.0)
    for tokens in (100, 1000, 10_000):
        choice.computed(tokens, 0, 1, tokens * 1e-3)
    start = choice.choose(SavedPrefix(files, 10_000, 0, 64, 16))
    assert start / 10_000 == pytest.approx(slower / (slower + 1), abs=0.03), "both end at once"


def test_what_is_there_is_not_read_again() -> None:
    choice = LoadOrCompute()
    files = [(start, 100 * BYTES) for start in range(0, 1000, 100)]
    assert choice.choose(SavedPrefix(files, 1000, 512, 10, 256)) == 512, "nobody knows, and it is tried"
    assert choice.choose(SavedPrefix(files, 1000, 500, 10, 256)) == 0
    choice.loaded(100 * BYTES, 1e-3)
    choice.computed(1000, 0, 1, 10.0)
    assert choice.choose(SavedPrefix(files, 1000, 512, 10, 256)) == 512
    assert choice.choose(SavedPrefix(files, 1000, 512, 10)) == 0


def test_what_was_learned_goes_to_json_and_back() -> None:
    choice, draw = LoadOrCompute(), random.Random(0)
    for _ in range(40):
        choice.loaded(draw.randrange(1, 10**9), draw.random())
        choice.computed(draw.randrange(2, 4000), draw.randrange(8000), 1, draw.random())
        choice.loaded_overlapped(10**8, draw.random())
        choice.computed_overlapped(100, 0, 1, draw.random())
    text = json.dumps(choice.as_json())
    again = LoadOrCompute.from_json(json.loads(text))
    assert json.dumps(again.as_json()) == text
    files = [(start, 100 * BYTES) for start in range(0, 10_000, 100)]
    assert again.choose(SavedPrefix(files, 10_000, 0, 64, 16)) == choice.choose(SavedPrefix(files, 10_000, 0, 64, 16))


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {},
        {"loads": [[1, 1.0]]},
        {"loads": [[1]], "prefills": [], "loads_overlapped": [], "computed_overlapped": []},
        {"loads": [[-1, 1.0]], "prefills": [], "loads_overlapped": [], "computed_overlapped": []},
        {"loads": [[1, math.nan]], "prefills": [], "loads_overlapped": [], "computed_overlapped": []},
        {"loads": [], "prefills": [[10, -1, 1, 1.0]], "loads_overlapped": [], "computed_overlapped": []},
        {"loads": [], "prefills": [], "loads_overlapped": [0.0], "computed_overlapped": []},
        {"loads": [], "prefills": [], "loads_overlapped": ["x"], "computed_overlapped": []},
        {"loads": 7, "prefills": [], "loads_overlapped": [], "computed_overlapped": []},
    ],
)
def test_what_is_no_such_thing_is_refused(wrong: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        LoadOrCompute.from_json(wrong)


def test_prefills_that_are_all_noise_are_not_less_than_nothing() -> None:
    choice = LoadOrCompute()
    choice.loaded(26368, 1000.0)
    for new, past, seconds in ((40, 0, 0.0052), (5, 45, 0.0079), (1, 50, 0.006), (41, 0, 0.0024), (51, 0, 0.003)):
        choice.computed(new, past, 1, seconds)
    assert choice.seconds_to_compute(47, 0, 5) == 0
    assert choice.choose(SavedPrefix([(0, 27520)], 47, 0, 5, 8)) == 47


@pytest.mark.parametrize(("slower", "splits"), [(10, True), (30, False)])
def test_what_is_hardly_better_is_not_worth_a_head(slower: int, splits: bool) -> None:
    choice = LoadOrCompute()
    for tokens in (100, 1000, 10_000):
        choice.loaded(tokens * BYTES, tokens * 1e-3)
        choice.computed(tokens, 0, 1, tokens * slower * 1e-3)
    files = [(start, 100 * BYTES) for start in range(0, 10_000, 100)]
    assert (choice.choose(SavedPrefix(files, 10_000, 0, 64, 16)) > 0) == splits


def test_computing_slows_the_overhead_of_a_load_down_too() -> None:
    """Of a load of 44 ms its bytes take 12: what a head saves of these is less than it makes the rest slower by."""
    choice, files = LoadOrCompute(), [(0, 4 * 10**6), (512, 4 * 10**6), (1024, 4 * 10**6)]
    for nbytes in (10**5, 10**6, 10**7):
        choice.loaded(nbytes, 32e-3 + nbytes * 1e-9)
    for tokens in (10, 100, 1000):
        choice.computed(tokens, 0, 1, 1e-5 * tokens)
    saved = SavedPrefix(files, 10_000, 0, 8, 64)
    assert choice.choose(saved) == 1024, "the bytes of the head are saved"
    for _ in range(12):
        choice.loaded_overlapped(10**6, 1.5 * (32e-3 + 1e-3))
    assert choice.choose(saved) == 0


def test_loads_that_are_all_overhead_are_waited_for() -> None:
    choice = LoadOrCompute()
    for nbytes, seconds in ((10**4, 60e-3), (10**5, 59e-3), (10**6, 58e-3)):
        choice.loaded(nbytes, seconds)
    assert choice.seconds_to_load(10**6) == choice.seconds_to_load(0)
    for tokens in (10, 100, 1000):
        choice.computed(tokens, 0, 1, 1e-4 * tokens)
    assert choice.choose(SavedPrefix([(0, 10**4)], 64, 0, 8, 64)) == 64
    assert choice.choose(SavedPrefix([(0, 10**4)], 10_000, 0, 8, 64)) == 0
