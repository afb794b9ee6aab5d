"""What is printed of statistics: every counter that is not 0, with unit and meaning, and a line that is true of it."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from kvtier.planning.reports.explain import Explanation
from kvtier.stats import _SHOWN, NO_TIER, CacheStats, Counters, LayerResidency, Residency, TierStats

HOST = TierStats(2**30, 2**20, 2**21, 0, 0, 0, 1234, 5)
NOTHING = Explanation("closed", NO_TIER, NO_TIER, (), 0, "default", None, (), ())
DEVICE = TierStats(2**31, 2**21, 2**22, 0, 0, 0, 7, 0)


def of(**counters: Any) -> CacheStats:
    stats = CacheStats(device=counters.pop("device", NO_TIER), host=counters.pop("host", HOST))
    for name, value in counters.items():
        setattr(stats, name, value)
    return stats


def everything() -> CacheStats:
    stats = of(device=DEVICE, resident_bytes=2048)
    for i, each in enumerate(dataclasses.fields(Counters)):
        value = getattr(stats, each.name)
        setattr(stats, each.name, {"aten::add<x>": 3} if isinstance(value, dict) else type(value)(1 + 1500 * i))
    return stats


def test_every_counter_has_a_unit_and_a_meaning_and_its_place() -> None:
    assert list(_SHOWN) == [each.name for each in dataclasses.fields(Counters)]
    assert {mark for _, _, mark in _SHOWN.values()} == {"", "+", "-", "!"}


def test_all_that_is_not_0_is_shown_and_nothing_else() -> None:
    table = str(everything())
    for name in (*_SHOWN, "resident_bytes"):
        assert f" {name} " in table
    assert "2 KiB" in table
    assert "1,234" in table
    assert [line.name for line in CacheStats().lines()] == ["steps"]
    assert str(CacheStats()).splitlines()[-1].split() == ["steps", "0", "forwards"]


@pytest.mark.parametrize(
    ("stats", "expected"),
    [
        (of(), "0 forwards: nothing attended to yet; no block moved; no wait for copies; nothing looks wrong."),
        (of(steps=1), "1 forward: no attention over a past yet;"),
        (of(steps=9, resident_bytes=1), "9 forwards: no attention over a past in tiered layers yet;"),
        (of(steps=9, views_attended=8, host_attended=8, host_seconds=1.5), "all attention on the host;"),
        (of(steps=9, views_attended=8, host_attended=8, host_seconds=1.5), "host threads attended for 1.5 s"),
        (of(steps=9, views_attended=8, device=DEVICE), "all attention on the device"),
        (of(views_attended=8, host_attended=2, device=DEVICE), "host threads took part in 25% of attention calls;"),
        (
            of(views_attended=8, host_attended=8, host_blocks=10, block_hits=25, block_fetches=5, device=DEVICE),
            "host threads took part in every attention call and read 25% of the blocks, the device the rest;",
        ),
        (of(views_attended=8), "all attention by torch"),
        (of(steps=2, dense_reads=4), "the model's own code, over dense tensors"),
        (of(bytes_up=2048, bytes_down=1024), "2 KiB fetched, 1 KiB copied to the host"),
        (of(bytes_down=1024), "; 1 KiB copied to the host"),
        (of(stall_seconds=0.0125), "waited 12.5 ms for copies"),
        (of(dense_fallbacks=2, dense_fallback_ops={"add": 2}), "look at: 2 dense fallbacks (add; see kvtier.enable)"),
        (of(failed_transfers=2), "look at: 2 failed copies."),
        (of(corrupt_blocks=1), "look at: 1 corrupt block."),
        (
            of(views_attended=8, native_missing="it is not there. Do this."),
            "look at: no native kernel (it is not there. Do",
        ),
        (of(views_attended=8, native_missing="x", device=DEVICE), "nothing looks wrong"),
        (of(views_attended=8, host_attended=1, native_missing="x", device=DEVICE), "look at: no native kernel (x)."),
        (of(io_buffer_misses=1), "look at: 1 call without room"),
        (of(block_fetches=9, prefetched=4, stall_seconds=1.0), "look at: 5 of 9 fetches were late"),
        (of(block_fetches=9, prefetched=5, stall_seconds=1.0), "nothing looks wrong"),
    ],
)
def test_the_line_that_sums_up_says_what_the_counters_say(stats: CacheStats, expected: str) -> None:
    summary = stats.summary()
    assert expected in summary
    assert "\n" not in summary
    assert str(stats).startswith(summary)
    marked = [line for line in stats.lines() if line.mark == "!"]
    assert not marked or "look at:" in summary


def test_in_notebooks_it_is_html_with_the_same_lines() -> None:
    stats = everything()
    tree = ElementTree.fromstring(stats._repr_html_())
    cells = ["".join(cell.itertext()) for cell in tree.iter("td")]
    for line in stats.lines():
        assert {line.name, line.value, line.meaning} <= set(cells)
    assert "3 x aten::add<x>" in cells
    assert "".join(next(tree.iter("p")).itertext()) == stats.summary()


def test_a_snapshot_is_plain_data() -> None:
    stats = everything()
    assert pickle.loads(pickle.dumps(stats)) == copy.deepcopy(stats) == stats
    assert eval(repr(stats), {"CacheStats": CacheStats, "TierStats": TierStats}) == stats


@pytest.mark.parametrize("shown", [everything(), Residency((LayerResidency(0, "tiered", 9, 1, 0, 0, 64),)), NOTHING])
def test_a_notebook_shows_what_is_printed(shown: Any) -> None:
    text: list[str] = []
    shown._repr_pretty_(SimpleNamespace(text=text.append), False)
    assert text == [str(shown)]
    assert not text[0].startswith(type(shown).__name__)
