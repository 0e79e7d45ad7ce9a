"""The reports of a campaign for a terminal and in Markdown: golden texts, unknown figures, hostile values."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.cells import cell_len

from campaign_golden import GOLDEN, renderings, terminal
from campaign_results import HOSTILE, XID, arm, campaign, hostile, launch, not_in_list, running, single, span
from soakrig.record.campaign import CampaignResult
from soakrig.reports.campaign_page import MOST_LAUNCHES, campaign_html, campaign_markdown
from soakrig.reports.campaign_text import UNITS, arm_row, began, inert, launch_line, short_names, void_groups
from soakrig.reports.pages import cell, prose
from soakrig.reports.terminal import WIDTH

MAKERS = (single, not_in_list, running)
MARKDOWN = MarkdownIt("commonmark").enable("table")
NASTY = st.text(alphabet="<>|`*_[](){}\\&#~!$@-+=.:/ 1ab\n\r\t\x1b\x9b\u202e\u2028", max_size=24)


class Structure(HTMLParser):
    """Tags with the names of their attributes, and text by cell."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, ...]] = []
        self.text = ""
        self.cells: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, *(name for name, _ in attrs)))
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.cells:
            self.cells[-1] += data


def harmless(result: CampaignResult) -> CampaignResult:
    """The same with a plain word in place of each hostile one."""
    text = orjson.dumps(result.to_json()).decode()
    return CampaignResult.from_json(orjson.loads(text.replace(orjson.dumps(HOSTILE).decode()[1:-1], "plainword")))


@pytest.mark.parametrize("name", sorted(renderings()))
def test_golden(name: str) -> None:
    assert renderings()[name] == (GOLDEN / name).read_text("utf-8"), "python tests/campaign_golden.py writes it anew"


def test_no_golden_text_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == set(renderings())


@pytest.mark.parametrize("make", [*MAKERS, hostile])
def test_json_there_and_back(make: type) -> None:
    result = make()
    assert CampaignResult.from_json(orjson.loads(orjson.dumps(result.to_json()))) == result


@pytest.mark.parametrize("data", [None, [], {}, {"schema": 2}, {**single().to_json(), "verdict": "CLEARED"}])
def test_json_of_anything_else_is_refused(data: object) -> None:
    with pytest.raises(ValueError):
        CampaignResult.from_json(data)


def test_the_arms_stand_in_the_order_of_their_roles() -> None:
    heads = ["control ", "all-off ", "VLLM_MOE_DMA_STAGING=0", "VLLM_MOE_HOT_SLOTS=8", "--max-num-seqs=1", "back:"]
    places = [terminal(single()).index(f"\n  {head}") for head in heads]
    assert places == sorted(places)


def test_the_parts_of_the_terminal_report_stand_in_their_order() -> None:
    heads = ["bisect", "arms", "rates", "conclusion", "what this does not say", "void launches", "signatures seen",
             "what the next night would buy", "shown to be in effect by", "  runs/"]  # fmt: skip
    places = [f"\n{terminal(single())}".index(f"\n{head}") for head in heads]
    assert places == sorted(places)


def test_unknown_is_told_and_never_as_0() -> None:
    row = arm_row(arm("VLLM_X=0", "one", runs=1, exposure=60.0), UNITS["turns"])
    assert (row.expected, row.rate, row.ratio, row.p, row.posterior) == ("-", "-", "not judged", "-", "-")
    assert arm_row(arm("control", "control"), UNITS["turns"]).ratio == "-"
    assert arm_row(arm("VLLM_X=0", "one", p=0.9), UNITS["turns"]).ratio == "-", "judged, but it has no ratio"
    no_bound = arm("VLLM_X=0", "one", ratio=span(0.1, 0.4, None), rate=span(0.1, 0.4, None))
    assert arm_row(no_bound, UNITS["turns"]).ratio == "0.4 (0.1..unbounded)"
    for text in (terminal(running()), campaign_markdown(running()), Structure(campaign_html(running())).text):
        assert "rift of the control: not judged" in text
        assert "not shown yet" in text


def test_a_chance_is_never_rounded_to_certainty() -> None:
    shown = [arm_row(arm("x", "one", posterior=p), UNITS["turns"]).posterior for p in (1 - 1e-9, 0.9991, 0.02, 1e-9)]
    assert shown == [">0.999", "0.999", "0.020", "<0.001"]


def test_cleared_is_never_told_as_fixed() -> None:
    for make in MAKERS:
        for text in (terminal(make()), campaign_markdown(make()), Structure(campaign_html(make())).text):
            assert "fixed" not in text.lower()
    assert terminal(single()).count("CLEARED to at least 2.3 times") == 2


def test_simulated_and_where_to_go_on() -> None:
    assert "SIMULATED" in terminal(running()).splitlines()[0]
    assert "SIMULATED" not in terminal(single()) + campaign_markdown(single()) + campaign_html(single())
    assert "**SIMULATED**" in campaign_markdown(running())
    paused = single().model_copy(update={"state": "paused", "folder": "runs/my campaign"})
    assert "soak bisect resume 'runs/my campaign'" in terminal(paused)
    assert "soak bisect resume" in campaign_markdown(paused)
    assert "soak bisect status runs/" in terminal(running())


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_the_terminal_report_fits_and_says_every_name_in_full(encoding: str) -> None:
    names = [f"VLLM_X=/very/{'long' * n}/path/{n:03}/to/ü漢{'字' * n}" for n in (3, 30, 30, 80)]
    arms = [arm(f"{name}{n}", "one", ratio=span(0.000123, 1234.5, None), rate=span(1.23e-4, 2.34e-4, 5.67e-4), p=1.2e-6)
            for n, name in enumerate(names)]  # fmt: skip
    text = terminal(campaign([arm("control", "control"), *arms], [], conclusion="long" * 90), encoding)
    assert max(cell_len(line) for line in text.splitlines()) <= WIDTH
    whole = re.sub(r"\s", "", text)
    for one in arms:
        assert re.sub(r"\s", "", one.name.encode(encoding, "backslashreplace").decode(encoding)) in whole


def test_short_names_stay_apart() -> None:
    names = [f"VLLM_PROFILE=/a/{n}/b/{'c' * 40}/profile.json" for n in range(12)]
    short = short_names(names, 26)
    assert len(set(short.values())) == len(names)
    assert all(len(name) <= 26 and "..." in name for name in short.values())


def test_a_campaign_of_300_launches_stays_short() -> None:
    launches = [launch(n, "VLLM_X=1", "void", 0.0, reason=f"reason {n}") for n in range(300)]
    void = arm("VLLM_X=1", "one", void=300, void_reasons={f"reason {n}": 1 for n in range(300)})
    seen = {f"Xid {n}": 1 for n in range(40)}
    result = campaign([arm("control", "control"), void], launches, signatures=seen)
    text = terminal(result)
    assert len(text.splitlines()) < 60
    assert "292 x  292 other reasons" in text
    assert "32 x  32 other signatures" in text
    many = [launch(n, "VLLM_MOE_DMA_STAGING=0", "faulted", 9.0, signature=f"{XID} {'x' * 150}") for n in range(300)]
    markdown = campaign_markdown(single().model_copy(update={"launches": many}))
    assert len(markdown) < 60_000, "a pull request takes 65,536 characters"
    assert f"300 launches, the last {MOST_LAUNCHES}" in markdown
    assert "\n| 299 |" in markdown
    assert "\n| 199 |" not in markdown


def test_void_launches_are_grouped_and_none_is_lost() -> None:
    groups = void_groups(running().arms)
    assert [(group.launches, group.arms) for group in groups] == [
        (2, "control, all-off"),
        (1, "control"),
        (1, "all-off"),
    ]
    assert groups[1].reason == "no reason recorded"
    assert sum(group.launches for group in groups) == sum(one.void for one in running().arms)


def test_how_a_launch_ended() -> None:
    unit = UNITS["turns"]
    assert launch_line(launch(1, "x", "faulted", 1.0), unit) == f"faulted after 1 turn: {XID}"
    assert (
        launch_line(launch(1, "x", "faulted", 7.0, signature=None), unit) == "faulted after 7 turns: signature unknown"
    )
    assert launch_line(launch(1, "x", "clean", 60.0), unit) == "clean, 60 turns"
    assert launch_line(launch(1, "x", "void", 0.0), unit) == "VOID: no reason recorded"
    assert launch_line(launch(1, "x", "interrupted", 3.0), unit) == "interrupted after 3 turns"
    assert launch_line(launch(1, "x", None, 7.0), unit) == "probing, 7 of 60 turns"
    assert began(launch(1, "x", None, 7.0, began=1e300)) == "-"


def test_colour_and_marks_only_for_a_terminal() -> None:
    assert "\x1b" not in terminal(single())
    assert "\x1b[" in terminal(single(), force_terminal=True)


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_hostile_text_is_inert_on_a_terminal(encoding: str) -> None:
    text = terminal(hostile(), encoding)
    assert not set(text) & set("\x1b\x9b\u202e\r")
    whole = re.sub(r"\s", "", text)
    assert whole.count(re.sub(r"\s", "", inert(HOSTILE))) >= 4
    assert "[red]bold[/red]" in whole


def test_hostile_text_makes_no_structure_in_markdown() -> None:
    text = campaign_markdown(hostile())
    assert not set(text) & set("\x1b\x9b\u202e\r")
    shown, plain = (Structure(MARKDOWN.render(campaign_markdown(one))) for one in (hostile(), harmless(hostile())))
    assert shown.tags == plain.tags
    assert len(shown.cells) == len(plain.cells)
    assert shown.text.count("<script>alert('x')</script>") == plain.text.count("plainword")


def test_hostile_text_makes_no_structure_in_html() -> None:
    page = campaign_html(hostile())
    assert not set(page) & set("\x1b\x9b\u202e\r")
    shown, plain = (Structure(campaign_html(one)) for one in (hostile(), harmless(hostile())))
    assert shown.tags == plain.tags
    assert shown.text.count(inert(HOSTILE)) == plain.text.count("plainword")


@given(NASTY)
def test_any_text_is_one_cell_of_markdown_and_reads_as_it_is(text: str) -> None:
    page = Structure(MARKDOWN.render(f"| a | b |\n|---|---|\n| {cell(text)} | {prose(text)} |\n"))
    assert len(page.cells) == 4
    shown = inert(text)
    wanted = shown.replace("\\|", "\\\\x7c") if shown else "(empty)"
    assert page.cells[2].strip() == (wanted.strip() if wanted.strip() else page.cells[2].strip())
    assert page.cells[3].strip() == shown.strip()


@given(NASTY)
def test_any_text_starts_no_block_of_markdown(text: str) -> None:
    assert {tag for tag, *_ in Structure(MARKDOWN.render(f"{prose(text)}\n\nb\n")).tags} == {"p"}
    assert {tag for tag, *_ in Structure(MARKDOWN.render(f"b\n{prose(text)}\n")).tags} == {"p"}
    assert Structure(MARKDOWN.render(f"- {prose(text)}\n")).text.strip() == inert(text).strip()


def test_github_makes_no_mention_and_no_link_of_a_value() -> None:
    text = prose("@octocat a#12 GH-12 https://x.example WWW.x.example me@x.example $x$")
    assert not re.search(r"@\w|#\d|GH-\d|://|www\.|(?<!\\)\$", text, re.IGNORECASE)
    assert Structure(MARKDOWN.render(text)).text.strip() == (
        "@octocat a#12 GH-12 https://x.example WWW.x.example me@x.example $x$"
    )
