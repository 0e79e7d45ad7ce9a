"""The terminal reports as ``tests/golden/reports`` holds them: a run, a comparison, a plan, what is served.

``python tests/report_golden.py`` writes them anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from rich.console import Console

from plan_builders import BUDGET, raw, traffic
from soakrig.bisect.run_comparison import RunFacts, compare_runs
from soakrig.cli.engine_tables import show_findings, show_models, show_states
from soakrig.cli.main import invoke
from soakrig.engine.preflight.finding import Finding
from soakrig.engine.registry import SHIPPED, Registry, load_registry
from soakrig.engine.serving.state import ModelState
from soakrig.reports.comparison import comparison_parts
from soakrig.reports.run_settings import differences
from soakrig.reports.run_view import RunView, read_run
from soakrig.reports.terminal import WIDTH, print_report

GOLDEN = Path(__file__).parent / "golden" / "reports"
OLDER = Path(__file__).parent / "fixtures" / "runs" / "before-findings"
SHAPE = ["--layers", "4", "--top-k", "2", "--experts", "16"]
STATES = [
    ModelState("embedded", "ready", "answered in 0.08 s", "http://127.0.0.1:4711", 4711, 40, 39, [39, 40, 41, 42],
               15.0, 487 << 20, 0.08, "/soakrig-embedded-9e9d5dc3"),
    ModelState("tiny-moe", "unresponsive", "no answer in 10 s, and its token counters stand still",
               "http://127.0.0.1:4712", 4712, 50, 49, [49, 50], 3600.0, 5 << 30, forced=["host-ram"]),
    ModelState("glm53", "stopped", "since 2026-11-30 02:00: asked to stop", leaked={"psm_1": 1 << 30}),
]  # fmt: skip


@contextlib.contextmanager
def utc() -> Iterator[None]:
    """Local time is UTC: reports for a terminal tell it."""
    before = os.environ.get("TZ")
    os.environ["TZ"] = "UTC"
    time.tzset()
    try:
        yield
    finally:
        os.environ.pop("TZ")
        if before is not None:
            os.environ["TZ"] = before
        time.tzset()


def drawn(draw: Callable[[Console], None], encoding: str = "utf-8") -> str:
    """What ``draw`` prints, in ``encoding``, strictly, without the blanks that end a line on a terminal."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    draw(Console(file=stream, width=WIDTH, highlight=False))
    stream.flush()
    return _lines(stream.buffer.getvalue().decode(encoding))


def renderings() -> dict[str, str]:
    """File name -> text."""
    registry = load_registry(SHIPPED)
    found: dict[str, str] = {}
    with utc():
        view = read_run(OLDER)
        for encoding in ("utf-8", "ascii"):
            found[f"run.{encoding}.txt"] = drawn(
                lambda console: print_report(console, view.result, view.series, Path("runs/older")), encoding
            )
    found["comparison.txt"] = drawn(lambda console: _comparison(console, view))
    found["engine-status.txt"] = drawn(lambda console: show_states(console, STATES))
    states = {state.model: state for state in STATES}
    found["engine-list.txt"] = drawn(lambda console: show_models(console, Registry(registry.models, ()), states))
    found["preflight.txt"] = drawn(lambda console: show_findings(console, "glm53", _findings()))
    found |= _plans()
    return found


def _comparison(console: Console, view: RunView) -> None:
    other = view.manifest.model_copy(update={"seed": 4, "settings": {"set": {"VLLM_MOE_DMA_STAGING": "0"}}})
    one = RunFacts("runs/a", view.manifest, view.result, view.turns)
    found = compare_runs(one, RunFacts("runs/b", other, view.result, view.turns), differences(view.manifest, other))
    for part in comparison_parts(found):
        console.print(part)


def _findings() -> list[Finding]:
    return [
        Finding("fatal", "ok", "none of the 10 combinations known to be fatal"),
        Finding("host-ram", "refused", "155 GiB needed, 22.5 GiB available", "Stop what holds memory."),
        Finding("vram", "unknown", "no NVML here"),
    ]


def _plans() -> dict[str, str]:
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as base, contextlib.chdir(base):
        raw(Path("t.i16"), traffic(400, 4, 2, 16))
        Path("card.toml").write_text(BUDGET)
        for name, words in (
            ("curve", ["curve", "t.i16", *SHAPE, "--sizes", "2,4,8"]),
            ("allocate", ["allocate", "t.i16", *SHAPE, "--total", "20"]),
            ("budget", ["budget", "card.toml"]),
            ("levers", ["levers", "card.toml"]),
        ):
            stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
            with contextlib.redirect_stdout(stream):
                assert invoke(["plan", *words]) == 0
            stream.flush()
            found[f"plan-{name}.txt"] = _lines(stream.buffer.getvalue().decode())
    return found


def _lines(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()) + "\n"


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, text in renderings().items():
        (GOLDEN / name).write_text(text, "utf-8")
