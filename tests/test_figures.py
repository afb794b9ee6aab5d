"""Tables and plots of README and docs are those of the committed records."""

from __future__ import annotations

import json

import pytest

from benchmarks import figures


def test_tables_and_plots_are_up_to_date_with_the_records() -> None:
    assert figures.outdated() == [], "run `make figures`"


def test_every_table_is_shown_somewhere_and_every_shown_table_exists() -> None:
    pages = [figures.ROOT / page for page in figures.PAGES]
    shown = {m["name"] for page in pages for m in figures.SECTION.finditer(page.read_text("utf-8"))}
    assert shown == figures.TABLES.keys()
    text = "".join(page.read_text("utf-8") for page in pages)
    assert {name for name in figures.DRAWN if f"figures/{name}.svg" in text} == figures.DRAWN.keys()


@pytest.mark.parametrize("name", figures.TABLES)
def test_a_table_of_measurements_names_machine_and_commit(name: str) -> None:
    table = figures.TABLES[name]()
    assert table.count("\n|") >= 2
    if name not in ("targets", "fits"):
        assert "commit `" in table
        assert "AMD EPYC" in table


def test_no_two_targets_have_the_same_name() -> None:
    names = [row.split("|")[1] for row in figures.TABLES["targets"]().splitlines()]
    assert len(names) == len(set(names))


def test_a_table_that_differs_from_the_records_is_noticed() -> None:
    page = "<!-- figures: gains -->\n| 1 |\n<!-- end of figures -->"
    assert "32,768" in figures.with_tables(page)
    assert figures.with_tables(figures.with_tables(page)) == figures.with_tables(page)
    with pytest.raises(KeyError):
        figures.with_tables(page.replace("gains", "invented"))


def test_a_plot_of_other_points_has_another_digest() -> None:
    series = figures.decode_series()
    before = figures.digest(series)
    assert before == figures.digest(json.loads(json.dumps(series)))
    series["kvtier"][0][1] *= 1.001
    assert figures.digest(series) != before
