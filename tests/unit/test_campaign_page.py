"""The page of a campaign: one whole HTML file that needs nothing, says every figure and can be read by everybody."""

from __future__ import annotations

import pytest

from campaign_results import XID, arm, campaign, launch, not_in_list, running, single, span
from html_page import Page, assert_marked_up, assert_self_contained
from soakrig.record.campaign import ArmResult, CampaignResult
from soakrig.reports.campaign_forest import LEFT, RIGHT, forest
from soakrig.reports.campaign_page import campaign_html
from soakrig.reports.campaign_survival import curve, survival
from soakrig.reports.campaign_text import UNITS, arm_row, inert, ordered

MAKERS = (single, not_in_list, running)


@pytest.mark.parametrize("make", MAKERS)
def test_the_page_needs_no_network_and_holds_no_script(make: type) -> None:
    assert_self_contained(campaign_html(make()))


@pytest.mark.parametrize("make", MAKERS)
def test_headings_landmarks_and_tables_are_marked_up(make: type) -> None:
    assert_marked_up(campaign_html(make()))


def test_conclusion_first_then_the_rest() -> None:
    heads = Page(campaign_html(single())).all("h2")
    assert heads == ["Conclusion", "What this does not say", "Arms", "What the next night would buy", "Void launches",
                     "Signatures seen", "Variables and settings", "Launches", "Provenance"]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
def test_every_figure_is_in_the_page(make: type) -> None:
    result: CampaignResult = make()
    page = Page(campaign_html(result))
    rows = page.all("tr")
    for one in result.arms:
        figures = [inert(text) for text in arm_row(one, UNITS[result.unit])]
        assert any(all(figure in row for figure in figures) for row in rows), one.name
    whole = " ".join("".join(page.found[0][2]).split())
    said = [result.conclusion, *result.not_said, *result.outlook, *result.signatures, *result.proofs, result.folder]
    assert [text for text in said if text not in whole] == []
    for one in result.launches:
        assert any(row.startswith(f"{one.id}{one.arm}") for row in rows)


def test_simulated_has_a_banner_and_real_has_none() -> None:
    page = Page(campaign_html(running()))
    (banner,) = [texts for _, values, texts in page.found if values.get("class") == "banner"]
    assert "SIMULATED" in "".join(banner)
    assert page.all("title")[0].startswith("SIMULATED")
    assert "banner" not in Page(campaign_html(single())).attributes("class")


def test_the_matrix_marks_what_differs_from_the_control() -> None:
    page = Page(campaign_html(single()))
    assert page.attributes("class").count("changed") == 3 + 1 + 1 + 1 + 2
    assert page.attributes("class").count("same") == 6 * 3 - 8


def test_a_secret_variable_is_hidden_in_the_matrix() -> None:
    spec = {"variables": {"API_KEY": ["[redacted]", "[redacted]"]}}
    one = arm("API_KEY", "one", changes={"API_KEY": "hunter2"})
    assert "hunter2" not in campaign_html(campaign([arm("control", "control"), one], [], spec=spec))


@pytest.mark.parametrize("spec", [{}, {"variables": []}, {"variables": {"A": []}, "settings": None, "flags": None}])
def test_a_spec_that_says_little_is_shown_as_it_is(spec: dict[str, object]) -> None:
    page = Page(campaign_html(campaign([arm("control", "control")], [], spec=spec, fingerprint={})))
    assert "Launches" not in page.all("h2")


def plot(*arms: ArmResult, at_least: float = 2.0):
    """The forest plot of arms beside a control."""
    return forest([arm("control", "control"), *arms], at_least)


def test_the_plot_has_a_title_a_description_and_a_line_for_each_arm() -> None:
    page = Page(campaign_html(single()))
    drawings = [values for tag, values, _ in page.found if tag == "svg"]
    assert [one["role"] for one in drawings] == ["img", "img"]
    assert "0.1 to 10" in page.all("desc")[0]
    assert "after" in page.all("desc")[1]
    assert len([tag for tag, _, _ in page.found if tag == "g"]) == 5
    assert "forest-title" not in Page(campaign_html(running())).attributes("id")


def test_places_on_the_plot_are_logarithmic() -> None:
    drawn = plot(arm("a", "one", ratio=span(0.1, 1.0, 10.0)))
    assert drawn is not None
    (row,) = drawn.rows
    assert (row.low, row.at, row.high) == (LEFT, (LEFT + RIGHT) / 2, RIGHT)
    assert not row.open_left
    assert not row.open_right
    assert drawn.control == row.at
    assert drawn.asked < drawn.control
    assert [label for _, label in drawn.ticks] == ["0.1", "1", "10"]


@pytest.mark.parametrize(
    ("ratio", "open_left", "open_right", "marked"),
    [
        (span(0.0, 0.0, 0.4), True, False, False),
        (span(0.2, 0.9, None), False, True, True),
        (span(0.2, 0.9, float("inf")), False, True, True),
        (span(1e-9, 1e-6, 1e9), True, True, False),
        (span(float("nan"), float("nan"), float("nan")), True, True, False),
    ],
)
def test_what_is_off_the_axis_has_an_arrow(ratio: object, open_left: bool, open_right: bool, marked: bool) -> None:
    drawn = plot(arm("a", "one", ratio=ratio), arm("b", "one"))
    assert drawn is not None
    row, not_judged = drawn.rows
    assert (row.open_left, row.open_right, row.at is not None) == (open_left, open_right, marked)
    assert LEFT <= row.low <= row.high <= RIGHT
    assert not_judged.low is None
    assert not_judged.text == "not judged"


def test_no_plot_where_nothing_is_judged() -> None:
    assert plot(arm("a", "one")) is None


def test_arms_keep_the_order_of_their_roles() -> None:
    assert [one.role for one in ordered(single().arms)] == ["control", "all_off", "one", "one", "one", "add_back"]
    assert XID in campaign_html(single())


def test_how_long_launches_lasted() -> None:
    """By hand: faults at 10 and 30 of four launches, one censored between them, one at the cap."""
    found = [launch(n, "control", result, at) for n, (result, at) in enumerate(
        [("faulted", 10.0), ("clean", 20.0), ("faulted", 30.0), ("clean", 60.0), ("void", 5.0)], 1)]  # fmt: skip
    assert curve(found) == [(0.0, 1.0), (10.0, 0.75), (30.0, 0.375), (60.0, 0.375)]
    tied = [launch(1, "a", "clean", 10.0), launch(2, "a", "faulted", 10.0)]
    assert curve(tied) == [(0.0, 1.0), (10.0, 0.5)], "the clean one had lived through that moment"
    page = Page(campaign_html(campaign([arm("control", "control"), arm("one", "one")], found)))
    text = " ".join(page.all("desc"))
    assert "control: 38 % after 60 turns" in text
    assert "control4238 %60" in page.all("tr")
    assert survival(campaign([arm("control", "control")], [launch(1, "control", "void", 5.0)])) is None
