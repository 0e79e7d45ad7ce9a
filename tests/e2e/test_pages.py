"""Pages in a real headless Chromium: no error, no request, filters and expanders work, two widths, light and dark."""

from __future__ import annotations

from pathlib import Path

import pytest

from browser import CHROMIUM, MISSING, opened
from builders import T0
from campaign_results import single
from plan_builders import BUDGET, raw, traffic
from run_folders import HOSTILE, long_run, write_case, write_run
from soakrig.cli.main import invoke
from soakrig.reports.campaign_page import campaign_html
from soakrig.reports.run_page import run_html
from soakrig.reports.run_view import read_run

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=MISSING)
LOOKS = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A faulting run of 10,000 turns and 200 signals, in under 2 MB; benchmarks/reports.py has the time."""
    folder = tmp_path_factory.mktemp("runs") / "long"
    write_run(folder, long_run(10_000, faults=200, bad_every=500), turns=10_000)
    for n in range(3):
        write_case(folder, f"0{n + 1}-xid", T0 + 76 * (n + 1), log=HOSTILE + "\n")
    html = run_html(read_run(folder))
    assert len(html.encode()) < 2_000_000
    path = folder / "page.html"
    path.write_text(html)
    return path


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_long_faulting_run(page: Path, width: int, dark: bool) -> None:
    with opened(page, width=width, dark=dark) as found:
        tab = found.page
        assert tab.locator("#turns-said").inner_text() == "1 to 100 of 10000 shown; 10000 turns in all"
        assert tab.locator("#turns-body tr").count() == 100
        tab.get_by_label("ok 9980").uncheck()
        assert tab.locator("#turns-said").inner_text() == "1 to 20 of 20 shown; 10000 turns in all"
        assert tab.locator("#turns-body tr td:nth-child(3)").all_inner_texts() == ["truncated"] * 20
        assert tab.locator("#timeline rect.ok.off").count() > 0
        assert tab.locator("#timeline rect.truncated.off").count() == 0
        tab.get_by_label("ok 9980").check()
        tab.get_by_label("containing").fill("t9999")
        assert tab.locator("#turns-body tr").count() == 1
        tab.get_by_label("containing").fill("")
        tab.get_by_role("button", name="Later").click()
        assert tab.locator("#turns-said").inner_text().startswith("101 to 200 of")
        fault = tab.locator("#fault-2")
        assert fault.get_attribute("open") is None
        fault.locator("summary").first.click()
        assert fault.locator("pre").first.is_visible()
        assert "Xid" in fault.locator("pre").first.inner_text()
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)")


def test_a_fault_s_number_on_the_timeline_opens_it(page: Path) -> None:
    with opened(page) as found:
        link = found.page.locator("#timeline a").nth(1)
        number = link.locator("text").inner_html()
        link.click()
        assert int(number) > 2, "numbers stand apart"
        assert found.page.locator(f"#fault-{number}").get_attribute("open") is not None


def test_every_part_is_reached_by_keyboard(page: Path) -> None:
    with opened(page) as found:
        reached: set[str] = set()
        for _ in range(40):
            found.page.keyboard.press("Tab")
            reached.add(found.page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert {"timeline", "A", "SUMMARY"} <= reached


def test_without_its_script_the_page_still_tells(page: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.html"
    html = page.read_text()
    bare.write_text(html[: html.rindex("<script>")])
    with opened(bare) as found:
        assert found.page.locator("#turns-static li").count() == 20
        assert found.page.locator("#turns-tools").is_hidden()


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_a_clean_run_and_a_campaign(tmp_path: Path, width: int, dark: bool) -> None:
    clean = tmp_path / "clean.html"
    clean.write_text(run_html(read_run(write_run(tmp_path / "clean", long_run(30), turns=30))))
    with opened(clean, width=width, dark=dark) as found:
        assert found.page.locator("h1").inner_text().lower().startswith("pass")
        assert found.page.locator("#turns-body tr").count() == 30
    campaign = tmp_path / "campaign.html"
    campaign.write_text(campaign_html(single()))
    with opened(campaign, width=width, dark=dark) as found:
        found.page.locator("summary").first.click()
        assert found.page.locator("#launches-table").is_visible()


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_plans_and_a_comparison(tmp_path: Path, width: int, dark: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    raw(tmp_path / "t.i16", traffic(400, 4, 2, 16))
    (tmp_path / "card.toml").write_text(BUDGET)
    shape = ["--layers", "4", "--top-k", "2", "--experts", "16"]
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, long_run(12), turns=12)
    for words in (
        ["plan", "curve", "t.i16", *shape],
        ["plan", "allocate", "t.i16", *shape, "--total", "20"],
        ["plan", "budget", "card.toml"],
        ["plan", "levers", "card.toml"],
        ["compare", "a", "b"],
    ):
        assert invoke([*words, "--html", "page.html"]) == 0
        with opened(tmp_path / "page.html", width=width, dark=dark) as found:
            assert found.page.locator("h1").count() == 1
            for table in found.page.locator(".scroll").all():
                assert table.is_visible()
