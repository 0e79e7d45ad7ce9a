"""`soak report --serve` in a real headless Chromium: list, filter, open, compare, follow a live run, a token."""

from __future__ import annotations

import http.server
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import orjson
import pytest
from playwright.sync_api import expect

from browser import CHROMIUM, MISSING, opened
from campaign_results import single
from e2e.soaking import Soak
from report_site import ReportSite
from run_folders import HOSTILE, long_run, write_case, write_run
from soakrig.bisect.campaign_file import Campaign
from soakrig.bisect.journal import Journal
from soakrig.cli.main import invoke
from soakrig.record.campaign import CAMPAIGN_RESULT
from soakrig.record.run_index import INDEX
from soakrig.record.store import EVENTS, MANIFEST

pytestmark = pytest.mark.skipif(not CHROMIUM, reason=MISSING)
LOOKS = [(1280, False), (390, True)]
LOAD = {"tools": 50}
TOKEN = "correct-horse-battery-staple-9"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportSite]:
    """A night's folder: a pass that a later fault outlived, others, a campaign, a broken and a hostile folder."""
    runs = tmp_path_factory.mktemp("site") / "runs"
    write_run(runs / "1-passed", long_run(60), turns=60, created=1_795_990_000.0, load=LOAD)
    faulted = write_run(runs / "2-faulted", long_run(60, faults=2), turns=60, created=1_795_993_600.0, load=LOAD)
    write_case(faulted, "01-xid", 1_000.0 + 46)
    write_run(runs / "3-planted", long_run(60, faults=1), turns=60, created=1_795_997_200.0, load=LOAD, simulated=True)
    write_run(runs / "4-other", long_run(30), turns=30, created=1_796_000_800.0, reproducer="cancel-storm")
    write_run(runs / "5 <b>odd<i> #?%2e&", long_run(5), turns=5, created=1_796_001_000.0, model=HOSTILE)
    (write_run(runs / "6-broken", long_run(5)) / MANIFEST).write_text("{")
    made = Campaign(variables={"VLLM_MOE_DMA_STAGING": ["1", "0"]})
    Journal.create(runs / "7-night", made.to_json()).close()
    (runs / "8-old-night").mkdir()
    (runs / "8-old-night" / CAMPAIGN_RESULT).write_bytes(orjson.dumps(single().to_json()))
    (runs.parent / "secret").mkdir()
    write_run(runs.parent / "secret" / "run", long_run(3))
    with ReportSite(runs) as served:
        yield served


@pytest.mark.parametrize(("width", "dark"), LOOKS)
def test_the_list(site: ReportSite, width: int, dark: bool) -> None:
    with opened(site.url, width=width, dark=dark) as found:
        tab = found.page
        expect(tab.locator("#compare-said")).to_have_text("0 of 2 checked")
        names = tab.locator("#runs tbody tr td.name a").all_inner_texts()
        assert names[0] == "7-night"
        assert names.index("2-faulted") < names.index("1-passed")
        assert tab.locator("tr[data-id='6-broken'] strong").inner_text() == "unread"
        assert "manifest.json cannot be read" in tab.locator("tr", has_text="6-broken").inner_text()
        passed = tab.locator("tr[data-id='1-passed']").inner_text()
        assert "OUTLIVED" in passed
        assert tab.locator("small.bad", has_text="contradicted").count() == 1
        assert "2 faults in 120 turns" in passed
        assert "CORRECTS an earlier pass" in tab.locator("tr[data-id='2-faulted']").inner_text()
        assert "SIMULATED" in tab.locator("tr[data-id='3-planted']").inner_text()
        assert "OUTLIVED" not in tab.locator("tr[data-id='4-other']").inner_text()
        ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(15, 20, 25)" if dark else "rgb(255, 255, 255)")
        assert all(url.startswith(site.url) for url in found.requests)


def test_filters_and_order(site: ReportSite) -> None:
    with opened(site.url) as found:
        tab = found.page

        def names() -> list[str]:
            return tab.locator("#runs tbody tr td.name").all_inner_texts()

        tab.get_by_label("verdict").select_option("contradicted")
        tab.wait_for_url("**verdict=contradicted**")
        assert names() == ["1-passed"]
        tab.get_by_label("verdict").select_option("fail")
        tab.wait_for_url("**verdict=fail**")
        assert names() == ["3-planted", "2-faulted"]
        tab.get_by_label("order").select_option("oldest")
        tab.wait_for_url("**order=oldest**")
        assert names() == ["2-faulted", "3-planted"]
        tab.goto(site.url)
        tab.get_by_label("reproducer").select_option("cancel-storm")
        tab.wait_for_url("**reproducer=cancel-storm**")
        assert names() == ["4-other"]
        tab.goto(site.url)
        tab.get_by_label("containing").fill("XID 31")
        tab.keyboard.press("Enter")
        tab.wait_for_url("**text=XID*31**")
        assert names() == ["3-planted", "8-old-night\ncampaign, 5 launches", "2-faulted"]
        tab.get_by_label("containing").fill("no such words")
        tab.get_by_role("button", name="List").click()
        tab.wait_for_url("**no+such**")
        assert "None that fits" in tab.locator("main").inner_text()


def test_reports_are_opened_and_say_what_was_corrected(site: ReportSite) -> None:
    with opened(site.url) as found:
        tab = found.page
        tab.get_by_role("link", name="1-passed").first.click()
        tab.wait_for_url("**/run/1-passed")
        assert tab.locator("h1").inner_text().lower().startswith("pass")
        told = tab.locator("#corrections").inner_text()
        assert "This pass is outlived" in told
        assert "2-faulted" in told
        assert tab.locator("#turns-body tr").count() == 60
        tab.get_by_role("link", name="All runs").click()
        tab.get_by_role("link", name="2-faulted").first.click()
        tab.wait_for_url("**/run/2-faulted")
        assert "corrects an earlier verdict: 1-passed" in tab.locator("#corrections").inner_text()
        tab.locator("#fault-1 summary").first.click()
        tab.get_by_role("link", name="All runs").click()
        tab.get_by_role("link", name="7-night").first.click()
        assert tab.locator("h1").inner_text().startswith("Bisect")
        tab.get_by_role("link", name="All runs").click()
        tab.get_by_role("link", name="5 <b>odd").first.click()
        assert "<b>odd<i> #?%2e&" in tab.locator("h1").inner_text()


def test_two_are_compared_by_their_checkboxes(site: ReportSite) -> None:
    with opened(site.url) as found:
        tab = found.page
        button = tab.locator("#compare-button")
        assert button.is_disabled()
        tab.get_by_label("compare 2-faulted", exact=True).check()
        assert button.is_disabled()
        tab.get_by_label("compare 1-passed", exact=True).check()
        button.click()
        tab.wait_for_url("**/compare?run=**")
        assert "A 1-passed, B 2-faulted" in tab.locator("h1").inner_text()
        tab.get_by_role("link", name="All runs").click()
        assert tab.get_by_label("compare 6-broken").count() == 0
        assert tab.get_by_label("compare 7-night").count() == 0


def test_a_run_that_goes_on_is_followed_to_its_end(tmp_path: Path) -> None:
    with Soak(tmp_path, turns=2000) as soak:
        soak.wait_turn(1)
        with ReportSite(tmp_path / "runs") as served, opened(served.url) as found:
            tab = found.page
            assert tab.locator("[data-live='verdict']").inner_text() == "running"
            expect(tab.locator("[data-live='turns']")).to_have_text(re.compile(r"[1-9]"))
            tab.locator("#runs tbody a").first.click()
            expect(tab.locator("#live-turns")).to_have_text(re.compile(r"^[1-9]\d* of 2000$"))
            assert tab.locator("h1 .verdict").inner_text() == "RUNNING"
            assert "it goes on" in tab.locator("header").inner_text()
            first = tab.locator("#live-turns").inner_text()
            expect(tab.locator("#live-turns")).not_to_have_text(first, timeout=30_000)
            assert "ok" in tab.locator("#live-outcomes").inner_text()
            assert tab.locator("#live-body tr").count() > 0
            soak.process.send_signal(signal.SIGINT)
            result = soak.finish()
            tab.wait_for_selector("#live", state="detached")
            assert tab.locator("h1").inner_text().lower().startswith(result["verdict"])
            tab.get_by_role("link", name="All runs").click()
            assert tab.locator("[data-live='verdict']").inner_text() == result["verdict"]


def test_folders_and_index_that_change_meanwhile(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    write_run(runs / "a", long_run(3))
    with ReportSite(runs) as served:
        assert served.told == {"url": served.url, "runs_dir": str(runs), "token": False}
        assert served.url.startswith("http://127.0.0.1:")
        with opened(served.url) as found:
            assert found.page.locator("#changed").is_hidden()
            broken = write_run(runs / "b", long_run(3), result=False)
            (broken / EVENTS).write_text('{"kind": "no such"}\n')
            found.page.locator("#changed a").click()
            assert found.page.locator("#runs tbody tr").count() == 2
        answer = httpx.get(f"{served.url}/run/b")
        assert (answer.status_code, answer.headers["content-type"]) == (404, "text/plain; charset=utf-8")
        assert "events.jsonl line 1 is no event of a run" in answer.text
        (runs / INDEX).unlink()
        assert httpx.get(f"{served.url}/run/a").status_code == 200
        assert served.end() == 0
        assert "Traceback" not in served.errors.read_text()
    assert (runs / INDEX).exists()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReportSite]:
    """With a token; ended by SIGTERM, after which it has said nothing of it."""
    runs = tmp_path_factory.mktemp("guarded") / "runs"
    write_run(runs / "a", long_run(3))
    with ReportSite(runs, "--token-env", "SITE_TOKEN", SITE_TOKEN=TOKEN) as served:
        yield served
        assert served.end(signal.SIGTERM) == 0
        assert TOKEN not in served.errors.read_text()


def test_a_token_is_shown_once_and_kept_by_the_browser(guarded: ReportSite) -> None:
    elsewhere = _page_with_link(f"{guarded.url}/run/a?token={TOKEN}")
    with elsewhere as server, opened(f"http://localhost:{server.server_address[1]}/") as found:
        tab = found.page
        tab.get_by_role("link", name="here").click()  # from another site, where a strict cookie is not sent along
        tab.wait_for_url("**/run/a")
        assert TOKEN not in tab.url
        assert tab.locator("h1").inner_text().lower().startswith("pass")
        tab.goto(guarded.url)
        assert tab.locator("#runs tbody tr").count() == 1
        (cookie,) = tab.context.cookies(guarded.url)
        assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
        assert TOKEN not in cookie["value"]
        assert tab.evaluate("document.cookie") == ""
        server.shutdown()


def _page_with_link(address: str) -> http.server.ThreadingHTTPServer:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = f'<!doctype html><link rel="icon" href="data:,"><a href="{address}">here</a>'.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *args: object) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def test_without_the_token_nothing_is_told(guarded: ReportSite) -> None:
    for path in ("/", "/run/a", "/live/a", "/changes", "/compare", f"/?token={TOKEN}x", "/?token=", "/nothing"):
        answer = httpx.get(guarded.url + path)
        assert answer.status_code == 401
        assert "set-cookie" not in answer.headers
    wrong = httpx.get(guarded.url, headers={"Cookie": f"soakrig-{guarded.url.rpartition(':')[2]}=guess"})
    assert wrong.status_code == 401
    away = httpx.get(f"{guarded.url}//evil.example/?token={TOKEN}&x=%22")
    assert 'url=/evil.example/?x=%22"' in away.text
    assert re.search(r"httponly.*samesite=strict", away.headers["set-cookie"], re.I)


def test_foreign_names_and_paths_and_methods_are_refused(site: ReportSite) -> None:
    port = site.url.rpartition(":")[2]
    for host, status in (
        ("evil.example", 400), (f"evil.example:{port}", 400), ("127.0.0.1.evil.example", 400), ("", 400),
        (f"localhost:{port}", 200), (f"127.0.0.1:{port}", 200),
    ):  # fmt: skip
        assert httpx.get(site.url, headers={"Host": host}).status_code == status, host
    with httpx.Client(base_url=site.url) as client:
        for path in (
            "/run/../secret/run", "/run/..%2fsecret%2frun", "/run/%2e%2e/secret/run", "/run//etc", "/run/latest",
            "/run/.index.sqlite", "/live/..%2f..%2fsecret%2frun", "/run/", f"/run/{'a' * 5000}", "/run/a%00b",
            "/compare?run=1-passed&run=..%2Fsecret%2Frun",
        ):  # fmt: skip
            answer = client.get(path)
            assert answer.status_code == 404, path
            assert "secret/run/" not in answer.text
        assert client.get("/run/6-broken").status_code == 404
        assert client.get("/live/7-night").status_code == 400
        for path in (
            "/compare?run=1-passed",
            "/compare?run=1-passed&run=1-passed",
            "/compare?run=1-passed&run=7-night",
        ):
            assert client.get(path).status_code == 400
        for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
            assert client.request(method, "/run/1-passed").status_code == 405
        for path in (
            "/",
            "/run/1-passed",
            "/run/7-night",
            "/compare?run=1-passed&run=2-faulted",
            "/changes",
            "/nothing",
        ):
            headers = client.get(path).headers
            said = headers["content-security-policy"]
            assert said.startswith("default-src 'none'")
            assert "frame-ancestors 'none'" in said
            assert "unsafe-eval" not in said
            assert not re.search(r"script-src[^;]*unsafe-inline", said)
            assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
            assert "access-control-allow-origin" not in headers


REFUSED: list[tuple[list[str], int, str]] = [
    (["--serve", "--bind", "192.0.2.7"], 64, "lets other machines in, and there is no token"),
    (["--serve", "--bind", "192.0.2.7", "--token-env", "SHORT_TOKEN"], 64, "has 5 characters, 16 were expected"),
    (["--serve", "--token-env", "NO_SUCH_TOKEN"], 64, "is not set"),
    (["--serve", "--bind", "a host"], 64, "is no IP address"),
    (["--serve", "--port", "70000"], 64, "is no TCP port"),
    (["--serve", "--bind", "192.0.2.7", "--port", "0", "--token-env", "LONG_TOKEN"], 3, "give another --bind"),
    (["--serve", "--html", "x.html"], 64, "--html makes no sense with --serve"),
    (["--port", "0"], 64, "--port is for --serve"),
    (["--serve", "--runs-dir", "no-such-folder"], 64, "no-such-folder cannot be read"),
]


@pytest.mark.parametrize(("options", "code", "said"), REFUSED, ids=lambda one: str(one)[:40])
def test_bad_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    options: list[str], code: int, said: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(os.environ, "SHORT_TOKEN", "short")
    monkeypatch.setitem(os.environ, "LONG_TOKEN", TOKEN)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    assert invoke(["report", *options]) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_taken_port_is_refused(site: ReportSite, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = site.url.rpartition(":")[2]
    (tmp_path / "runs").mkdir()
    assert invoke(["report", "--serve", "--port", port, "--runs-dir", str(tmp_path / "runs")]) == 3
    assert port in capsys.readouterr().err
