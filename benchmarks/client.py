"""What a stream costs the client: ours beside bare loops and other tools, on one server, in one run.

    python benchmarks/client.py [--rounds 3] [--streams 1,32,256] [--json FILE] [--rivals .venv-bench]

A server process (``streams/server.py``) answers with a role chunk, 64 deltas, finish, usage and the terminator: 67
events of JSON. Paced, it writes a delta every 20 ms; unpaced, it never waits. Each client runs in a process of its
own, one after the other, round after round, so that a busy machine is busy for all alike; ratios are taken within a
round, and medians of them shown. CPU is user + system time of the client's process alone, without start-up. Rivals live
in an environment of their own (``make bench-env``); one that is not there is named as not installed.

Exit 1 when a client did not take every answer for a whole one, or did not see every delta.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from streams.clients import CLIENTS
from streams.measure import NOT_INSTALLED
from streams.whole_tool import whole_cost

HERE = Path(__file__).resolve().parent
DELTAS, EVENTS = 64, 67
PACED_MS = 20.0
OURS, FLOOR, VLLM, TOOL = "soakrig", "bare-asyncio", "vllm-bench", "aiperf"
RIVALS = frozenset({VLLM})
Figures = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One load: lanes, pace, and requests on each lane."""

    streams: int
    itl_ms: float

    @property
    def each(self) -> int:
        if self.itl_ms:
            return 3
        return max(4, 1000 // self.streams)

    @property
    def name(self) -> str:
        return f"{self.streams} streams, " + (f"{self.itl_ms:g} ms" if self.itl_ms else "no wait")


@contextmanager
def server(itl_ms: float, deltas: int = DELTAS) -> Generator[str]:
    """The server in a process of its own; yields its URL. It ends when its standard input closes."""
    argv = [sys.executable, "-m", "streams.server", "--deltas", str(deltas), "--itl-ms", str(itl_ms)]
    with subprocess.Popen(argv, cwd=HERE, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def one(name: str, python: Path | str, url: str, case: Case) -> Figures | str:
    """Figures of one client on one load, or the reason why there are none."""
    argv = [str(python), "-m", "streams.measure", name, url, str(case.streams), str(case.each)]
    if not Path(python).exists():
        return "not installed"
    done = subprocess.run(argv, cwd=HERE, capture_output=True, text=True, timeout=300, env={**os.environ})
    if done.returncode == NOT_INSTALLED:
        return "not installed"
    if done.returncode != 0:
        return f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}"
    return derived(json.loads(done.stdout))


def tool(rivals: Path, url: str, case: Case) -> Figures | str:
    """aiperf's whole-process figures, or the reason why there are none."""
    path = rivals / "bin" / TOOL
    if not path.exists():
        return "not installed"
    with tempfile.TemporaryDirectory() as folder:
        try:
            return derived(whole_cost(path, url, case.streams, Path(folder)))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            return f"failed: {error}"


def derived(raw: Figures) -> Figures:
    """The figures that are shown, from the ones that were taken."""
    events = raw["requests"] * EVENTS
    streams_per_s = raw.get("streams_per_s", raw["requests"] / raw["wall_s"])
    figures = {
        "cpu_us_per_event": raw["cpu_s"] / events * 1e6,
        "streams_per_s": streams_per_s,
        "events_per_s": streams_per_s * EVENTS,
        "ttft_ms": raw["ttft_s"] * 1e3,
        "itl_ms": raw["itl_s"] * 1e3,
        "requests": raw["requests"],
    }
    if "server_ttft_s" in raw:
        figures["ttft_error_ms"] = (raw["ttft_s"] - raw["server_ttft_s"]) * 1e3
        figures["itl_error_ms"] = (raw["itl_s"] - raw["server_itl_s"]) * 1e3
        figures["not_whole"] = raw["requests"] - raw["whole"]
        figures["deltas_per_stream"] = raw["deltas"] / raw["requests"]
    return figures


def median_of(rounds: list[Figures], key: str) -> float | None:
    values = [figures[key] for figures in rounds if key in figures]
    return statistics.median(values) if values else None


def ratio(rounds: list[dict[str, Figures | str]], name: str, base: str) -> float | None:
    """The median over rounds of one client's CPU per event over another's."""
    found: list[float] = []
    for seen in rounds:
        mine, theirs = seen.get(name), seen.get(base)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            found.append(mine["cpu_us_per_event"] / theirs["cpu_us_per_event"])
    return statistics.median(found) if found else None


def summary(case: Case, rounds: list[dict[str, Figures | str]]) -> list[dict[str, object]]:
    """One row a client: medians over rounds, ratios, and what was wrong."""
    rows: list[dict[str, object]] = []
    for name in [*CLIENTS, TOOL]:
        all_of = [seen[name] for seen in rounds if name in seen]
        good = [figures for figures in all_of if isinstance(figures, dict)]
        row: dict[str, object] = {"case": case.name, "streams": case.streams, "itl_ms": case.itl_ms, "client": name}
        if not good:
            why = all_of[0] if all_of else "not measured here"
            rows.append({**row, "state": why})
            continue
        keys = dict.fromkeys(key for figures in good for key in figures)
        medians = {key: median_of(good, key) for key in keys}
        state = "measured" if len(good) == len(all_of) else f"measured in {len(good)} of {len(all_of)} rounds"
        ratios = {"over_bare": ratio(rounds, name, FLOOR), "over_vllm": ratio(rounds, name, VLLM)}
        rows.append({**row, "state": state, "rounds": len(good), **medians, **ratios})
    return rows


def wrong(rows: list[dict[str, object]]) -> list[str]:
    """Clients that lost something; their cost is no cost of the whole work."""
    found: list[str] = []
    for row in rows:
        if row.get("not_whole"):
            found.append(f"{row['client']}, {row['case']}: {row['not_whole']} answers were not taken for whole")
        if row["client"] != VLLM and row.get("deltas_per_stream", DELTAS) != DELTAS:  # vLLM counts more than content
            found.append(f"{row['client']}, {row['case']}: {row['deltas_per_stream']} deltas a stream, not {DELTAS}")
        if str(row["state"]).startswith("failed"):
            found.append(f"{row['client']}, {row['case']}: {row['state']}")
    return found


def cell(value: object, form: str) -> str:
    return format(value, form) if isinstance(value, float | int) else "-"


def show(rows: list[dict[str, object]]) -> None:
    head = f"{'case':20} {'client':13} {'us/event':>9} {'x bare':>7} {'x vllm':>7} {'streams/s':>10} {'events/s':>9}"
    print(f"{head} {'TTFT err ms':>12} {'ITL err ms':>11}")
    for row in rows:
        start = f"{row['case']:20} {row['client']:13}"
        if not str(row["state"]).startswith("measured"):
            print(f"{start} {row['state']}")
            continue
        figures = f"{cell(row['cpu_us_per_event'], '.1f'):>9} {cell(row['over_bare'], '.2f'):>7}"
        figures += f" {cell(row['over_vllm'], '.2f'):>7} {cell(row['streams_per_s'], '.1f'):>10}"
        figures += f" {cell(row['events_per_s'], '.0f'):>9} {cell(row.get('ttft_error_ms'), '.1f'):>12}"
        print(f"{start} {figures} {cell(row.get('itl_error_ms'), '.2f'):>11}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,32,256", help="lanes, separated by commas")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--rivals", type=Path, default=HERE.parent / ".venv-bench", help="the rivals' environment")
    parser.add_argument("--tool-rounds", type=int, default=1, help="rounds that include aiperf, which is slow to start")
    options = parser.parse_args()
    rivals = options.rivals.resolve()
    cases = [Case(int(n), itl) for itl in (PACED_MS, 0.0) for n in options.streams.split(",")]
    rounds: dict[Case, list[dict[str, Figures | str]]] = {case: [] for case in cases}
    with server(PACED_MS) as paced, server(0.0) as unpaced:
        for number in range(options.rounds):
            for case in cases:
                url = paced if case.itl_ms else unpaced
                seen: dict[str, Figures | str] = {}
                for name in CLIENTS:
                    python = rivals / "bin" / "python" if name in RIVALS else sys.executable
                    seen[name] = one(name, python, url, case)
                if number < options.tool_rounds and case.itl_ms and case.streams > 1:
                    seen[TOOL] = tool(rivals, url, case)
                rounds[case].append(seen)
                print(f"round {number + 1}: {case.name}", file=sys.stderr)
    rows = [row for case in cases for row in summary(case, rounds[case])]
    show(rows)
    if options.json:
        host = {"cores": os.cpu_count(), "python": platform.python_version(), "machine": platform.machine()}
        data = {"kind": "measured", "host": host, "events_per_stream": EVENTS, "rounds": options.rounds, "rows": rows}
        raw = {case.name: rounds[case] for case in cases}
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**data, "each_round": raw}, indent=1) + "\n")
    problems = wrong(rows)
    for problem in problems:
        print(f"NOT COMPARABLE: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
