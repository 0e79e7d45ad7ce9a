"""The metrics watcher against a real loopback server: figures, standing still, stalls, restarts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from soakrig.clock import FakeClock, RealClock
from soakrig.errors import WatcherError
from soakrig.record.signal import Signal, SourceName, SourceState
from soakrig.soak.watch.metrics import FAMILIES, MetricsWatcher, default_client, parse_page
from soakrig.soak.watch.watcher import Sample, WatchGroup

PAGES = Path(__file__).parents[1] / "fixtures" / "metrics"
VLLM = (PAGES / "vllm.prom").read_text()


class Page(ThreadingHTTPServer):
    """Serves ``status`` and ``text`` at /metrics; ``hold`` set means that it accepts and stays silent."""

    daemon_threads = True
    status, text = 200, VLLM

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Page

    def do_GET(self) -> None:
        self.server.go.wait(10)
        body = self.server.text.encode()
        try:
            self.send_response(self.server.status if self.path == "/metrics" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:
            return  # the client has given up

    def log_message(self, *args: object) -> None: ...


class Kept:
    """Takes what a group of watchers sees."""

    def __init__(self) -> None:
        self.samples: list[tuple[SourceName, Sample]] = []
        self.states: list[str] = []

    def signal(self, signal: Signal) -> None: ...

    def sample(self, source: SourceName, sample: Sample) -> None:
        self.samples.append((source, sample))

    def state(self, state: SourceState) -> None:
        self.states.append(state.state)


@pytest.fixture
def page() -> Iterator[Page]:
    server = Page()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.go.set()
    server.shutdown()
    thread.join()
    server.server_close()


def watch(page: Page, clock: FakeClock, path: str = "", timeout: float = 5.0) -> MetricsWatcher:
    return MetricsWatcher(page.url + path, clock, lambda: httpx.Client(timeout=timeout, trust_env=False))


def test_a_vllm_page() -> None:
    assert parse_page(VLLM) == {
        "running": 3.0, "waiting": 4.0, "generation_tokens": 1234.0, "prompt_tokens": 21000.0,
        "iteration_tokens_count": 900.0, "preemptions": 3.0, "prefix_cache_hits": 15000.0,
        "prefix_cache_queries": 20000.0, "kv_cache_usage": 0.75, "corrupted_requests": 0.0,
    }  # fmt: skip


def test_a_llamacpp_page() -> None:
    found = parse_page((PAGES / "llamacpp.prom").read_text())
    assert found == {"running": 1.0, "waiting": 0.0, "generation_tokens": 77.0, "prompt_tokens": 512.0}


def test_other_families_are_not_even_parsed() -> None:
    """A broken line elsewhere is no concern of ours, and a page of buckets costs next to nothing."""
    buckets = "".join(
        f'vllm:time_to_first_token_seconds_bucket{{engine="0",le="{n}.0",model_name="m"}} {n}.0\n' for n in range(1500)
    )
    text = VLLM + buckets + 'vllm:someone_elses{broken="1} x\n'
    before = time.perf_counter()
    assert parse_page(text)["generation_tokens"] == 1234.0
    assert time.perf_counter() - before < 0.1
    with pytest.raises(ValueError, match=r"\S"):
        parse_page(VLLM + "vllm:generation_tokens_total{engine= many\n")


def test_nan_is_no_figure() -> None:
    """NaN differs from itself: as a counter it would look like progress for ever."""
    assert parse_page("vllm:prompt_tokens_total NaN\nvllm:num_requests_running 1\n") == {"running": 1.0}


def test_no_family_is_named_twice() -> None:
    families = [family for names in FAMILIES.values() for family in names]
    assert len(families) == len(set(families))


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
def test_open_poll_and_progress(page: Page, path: str) -> None:
    clock = FakeClock(100.0)
    watcher = watch(page, clock, path)
    assert watcher.progress().scraped_at_monotonic is None
    assert watcher.open().state == "live"
    clock._now = 101.0
    seen = watcher.poll()
    assert not seen.signals
    assert seen.sample is not None
    assert seen.sample["generation_tokens"] == 1234.0
    progress = watcher.progress()
    assert (progress.changed_at_monotonic, progress.scraped_at_monotonic) == (100.0, 101.0), "the counters stand still"
    page.text = VLLM.replace("} 34.0", "} 35.0")
    clock._now = 102.0
    watcher.poll()
    assert watcher.progress().counters["generation_tokens"] == 1235.0
    assert watcher.progress().changed_at_monotonic == 102.0
    watcher.close()


def test_the_opening_scrape_is_a_sample_from_before_the_load(page: Page) -> None:
    """Else what is counted in the first second belongs to nobody: a run's window begins with its first sample."""
    page.text = VLLM + 'soakrig:moe_bad_ids_total{layer="0",model_name="m",path="small"} 2.0\n'
    kept = Kept()
    watcher = watch(page, FakeClock())
    watcher.interval = 600.0
    group = WatchGroup([watcher], kept, RealClock())
    group.start()
    assert [(source, sample["moe_small_bad_ids"]) for source, sample in kept.samples] == [("metrics", 2.0)]
    assert kept.states == ["live"]
    group.stop()


def test_prefill_alone_is_progress_too(page: Page) -> None:
    clock = FakeClock(100.0)
    watcher = watch(page, clock)
    watcher.open()
    page.text = VLLM.replace("21000.0", "23048.0")
    clock._now = 105.0
    watcher.poll()
    assert watcher.progress().changed_at_monotonic == 105.0
    watcher.close()


def test_gauges_that_move_are_no_progress(page: Page) -> None:
    clock = FakeClock(100.0)
    watcher = watch(page, clock)
    watcher.open()
    page.text = VLLM.replace("} 4.0", "} 9.0")
    clock._now = 105.0
    seen = watcher.poll()
    assert seen.sample is not None
    assert seen.sample["waiting"] == 9.0
    assert watcher.progress().changed_at_monotonic == 100.0
    watcher.close()


def test_corrupted_requests_are_a_fault(page: Page) -> None:
    watcher = watch(page, FakeClock())
    watcher.open()
    assert not watcher.poll().signals
    page.text = VLLM.replace('corrupted_requests_total{engine="0",model_name="m"} 0.0',
                             'corrupted_requests_total{engine="0",model_name="m"} 2.0')  # fmt: skip
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity, signal.detail) == ("corrupted_requests", "fault", {"before": 0.0, "now": 2.0})
    assert not watcher.poll().signals
    watcher.close()


def test_counters_that_fall_mean_another_process(page: Page) -> None:
    watcher = watch(page, FakeClock())
    watcher.open()
    page.text = VLLM.replace("1.2e+03", "7.0").replace("} 34.0", "} 0.0").replace("21000.0", "90.0")
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity) == ("engine_restarted", "fault")
    assert "1234 -> 7" in signal.raw
    watcher.close()


def test_a_silent_page_is_a_stall_told_once(page: Page) -> None:
    watcher = watch(page, FakeClock(), timeout=0.15)
    watcher.open()
    before = watcher.progress()
    page.go.clear()
    seen = watcher.poll()
    (signal,) = seen.signals
    assert (signal.kind, signal.severity) == ("metrics_stalled", "warning")
    assert seen.sample is None
    assert seen.state is not None
    assert (seen.state.state, seen.state.lost) == ("partial", 1)
    assert not watcher.poll().signals
    assert watcher.progress() == before
    page.go.set()
    seen = watcher.poll()
    assert not seen.signals
    assert seen.sample is not None
    assert seen.state is not None
    assert seen.state.lost == 2
    watcher.close()


@pytest.mark.parametrize(
    ("status", "text", "words"),
    [(404, "not found", "answered 404"), (200, "<html>hello</html>", "none of the families"),
     (200, "vllm:prompt_tokens_total{a= x\n", "not in the Prometheus text format")],
)  # fmt: skip
def test_what_is_no_metrics_page(page: Page, status: int, text: str, words: str) -> None:
    page.status, page.text = status, text
    with pytest.raises(WatcherError, match=words):
        watch(page, FakeClock()).open()
    page.status, page.text = 200, VLLM
    watcher = watch(page, FakeClock())
    watcher.open()
    page.status, page.text = status, text
    (signal,) = watcher.poll().signals
    assert (signal.kind, signal.severity) == ("metrics_lost", "warning")
    assert words in signal.raw
    watcher.close()


def test_nobody_there() -> None:
    server = Page()
    server.server_close()
    with pytest.raises(WatcherError, match="ConnectError"):
        MetricsWatcher(server.url, FakeClock(), default_client).open()


def test_a_page_without_token_counters_is_partial(page: Page) -> None:
    page.text = "vllm:num_requests_running 1.0\n"
    watcher = watch(page, FakeClock())
    state = watcher.open()
    assert state.state == "partial"
    assert "generation_tokens" in state.detail
    watcher.close()
