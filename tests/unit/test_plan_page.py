"""The page of a plan: one whole HTML file, each plot with its figures beside it, and marks where the figures are."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from html_page import Page, assert_marked_up, assert_self_contained
from plan_builders import BUDGET, raw, traffic
from soakrig.cli.main import invoke
from soakrig.reports.plan_charts import WIDTH, Bar, LinePlot, Series, bar_plot, line_plot, number, ticks
from soakrig.reports.plan_page import PlanPage, PlanPart, PlanTable, plan_html

SHAPE = ["--layers", "4", "--top-k", "2", "--experts", "16"]
PAGES = {
    "curve": ["curve", "t.i16", *SHAPE],
    "replayed": ["curve", "t.i16", *SHAPE, "--policy", "clock", "--sizes", "4,8"],
    "single": ["curve", "t.i16", *SHAPE, "--sizes", "4"],
    "allocate": ["allocate", "t.i16", *SHAPE, "--total", "20", "--policy", "static", "--train", "0.5"],
    "budget": ["budget", "card.toml"],
    "levers": ["levers", "card.toml"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("page")
    raw(found / "t.i16", traffic(400, 4, 2, 16))
    (found / "card.toml").write_text(BUDGET)
    return found


@pytest.fixture(scope="module")
def made(folder: Path) -> dict[str, str]:
    """Each page as the command writes it."""
    for name, argv in PAGES.items():
        words = [str(folder / word) if (folder / word).exists() else word for word in argv]
        assert invoke(["plan", *words, "--html", str(folder / f"{name}.html")]) == 0
    return {name: (folder / f"{name}.html").read_text() for name in PAGES}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_whole_and_readable_by_everybody(made: dict[str, str], name: str) -> None:
    assert_self_contained(made[name])
    assert_marked_up(made[name])


@pytest.mark.parametrize(
    ("name", "plots"), [("curve", 2), ("replayed", 2), ("single", 0), ("allocate", 2), ("budget", 1), ("levers", 4)]
)
def test_every_plot_has_a_title_a_description_and_a_table(made: dict[str, str], name: str, plots: int) -> None:
    page = Page(made[name])
    drawings = [values for tag, values, _ in page.found if tag == "svg"]
    assert len(drawings) == plots == len(page.all("desc"))
    assert all(values["role"] == "img" for values in drawings)
    texts = {values["id"]: " ".join("".join(texts).split()) for _, values, texts in page.found if "id" in values}
    for values in drawings:
        title, description = values["aria-labelledby"].split()
        assert texts[title]
        assert "The same figures stand in the table below." in texts[description]
    assert len(page.all("table")) == len(page.all("h2")) - 1 - ("What it rests on" in page.all("h2"))


def test_the_figures_of_json_are_in_the_page(
    made: dict[str, str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["plan", "levers", str(folder / "card.toml"), "--json", "--html", str(folder / "again.html")]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (folder / "again.html").read_text() == made["levers"]
    rows = Page(made["levers"]).all("tr")
    for lever in shown["levers"]:
        (row,) = [row for row in rows if row.startswith(lever["name"])]
        assert f"{lever['gain']:+.1%}" in row
        assert f"{lever['linear']['gain']:+.1%}" in row
    text = " ".join(Page(made["levers"]).all("section"))
    for figure in (
        "1.78 times as fast",
        "+16.3%",
        "34.25",
        "UNATTRIBUTED",
        "1,732 slots, 1,948 without scales",
        "modelled",
    ):
        assert figure in text


def test_marks_stand_where_the_figures_are() -> None:
    plot = line_plot([Series("a", [(0, 10), (10, 5), (20, 0)], dots=True)], "x", "y", (10, "now"))
    assert plot is not None
    (line,) = plot.lines
    assert line.dots == [
        (plot.left, plot.top), ((plot.left + plot.right) / 2, (plot.top + plot.bottom) / 2), (plot.right, plot.bottom),
    ]  # fmt: skip
    assert plot.mark is not None
    assert plot.mark.at == line.dots[1][0]
    assert [tick.label for tick in plot.x_ticks] == ["0", "5", "10", "15", "20"]
    steps = line_plot([Series("a", [(0, 10), (10, 5)], steps=True)], "x", "y")
    assert steps is not None
    assert re.fullmatch(r"M[\d.]+ [\d.]+ H[\d.]+ V[\d.]+", steps.lines[0].path)


def test_bars_begin_and_end_where_their_figures_are() -> None:
    plot = bar_plot(
        [Bar("a", 0, 50, "50"), Bar("b", 50, 100, "50", "open", 75, "the line's"), Bar("c", 100, 40, "x")], "x"
    )
    assert plot is not None
    middle = (plot.left + plot.right) / 2
    first, second, third = plot.bars
    assert (first.x, first.x + first.width) == (plot.left, middle)
    assert (second.x, second.x + second.width) == (middle, plot.right)
    assert second.tick == middle + (plot.right - plot.left) / 4
    assert third.x < third.x + third.width == plot.right, "one that goes back is drawn from its end"
    assert first.tick is None
    assert bar_plot([Bar("loss", 50, 20, "-30"), Bar("below", 0, -20, "-20")], "x") is not None


def test_lines_that_end_together_have_names_apart() -> None:
    series = [Series(f"s{n}", [(0, 1), (1, 1 + n / 1000)]) for n in range(6)]
    plot = line_plot(series, "x", "y")
    assert isinstance(plot, LinePlot)
    places = sorted(line.label_y for line in plot.lines)
    assert all(after - before >= 15 for before, after in pairwise(places))
    low = line_plot([Series(f"s{n}", [(0, 1), (1, 0)]) for n in range(4)], "x", "y")
    assert isinstance(low, LinePlot)
    assert max(line.label_y for line in low.lines) <= low.bottom


@pytest.mark.parametrize("points", [[], [(0.0, 1.0)]])
def test_nothing_to_draw_is_no_plot(points: list[tuple[float, float]]) -> None:
    assert line_plot([Series("a", points)], "x", "y") is None
    assert bar_plot([], "x") is None


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 32, [0, 10, 20, 30, 40]),
        (0, 0.05, [0, 0.01, 0.02, 0.03, 0.04, 0.05]),
        (-20, 50, [-20, 0, 20, 40, 60]),
        (3, 3, [3]),
        (0, float("nan"), [0]),
    ],
)
def test_ticks_are_round_and_cover_both_ends(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)
    assert [number(value) for value in (0.05, 1.5, 12000, 0)] == ["0.05", "1.5", "12,000", "0"]
    assert WIDTH == 810


def test_a_flat_curve_at_zero_is_drawn_on_the_floor() -> None:
    plot = line_plot([Series("a", [(0, 0), (4, 0)], dots=True)], "x", "y")
    assert plot is not None
    assert {y for _, y in plot.lines[0].dots} == {plot.bottom}


def test_names_from_outside_stay_text() -> None:
    bad = '<script>alert(1)</script>"\x1b[31m\u202e'
    part = PlanPart(
        "key", bad, bad, PlanTable(bad, (bad, bad), [(bad, bad)]), bar_plot([Bar(bad, 0, 1, bad)], bad), [bad]
    )
    html = plan_html(PlanPage(bad, bad, [bad], [part], [(bad, bad)]))
    assert_self_contained(html)
    assert "\x1b" not in html
    assert "\u202e" not in html


def test_a_page_that_cannot_be_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["plan", "budget", str(folder / "card.toml"), "--html", "/nowhere/x.html"]) == 64
    assert "/nowhere/x.html cannot be written" in capsys.readouterr().err
