"""Does the tool itself stay small over a long run? 20,000 turns of a fast loopback server, watched from outside.

    python benchmarks/long_soak.py [--turns 20000] [--conversations 8] [--warm-up 2000] [--json FILE] [--keep DIR]

Starts the server of ``streams/`` unpaced with 8 deltas an answer, and `soak run` on it: 50 tools, context limit 32,768,
an empty file as kernel log. Samples the tool's RSS and USS (MiB) five times a second until it ends. Then judges the run
again from its events (`soak report --rejudge`) and compares. Says turns a second and sizes on disk.

RSS decides: USS, what the tool alone holds, moves with every other Python process that comes and goes on the machine,
since library pages count as its own while nobody else maps them. It has to end where it began as well.

Exit 1 when RSS after the warm-up leaves +10 % of what it was there, a turn was not ok, or the results differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from client import server

TURN = b'"kind":"turn"'
ALLOWED = 1.10
EVERY_S = 0.2
EDGE = 10
"""Samples at either end whose median stands for where memory began and ended."""


@dataclass
class Watch:
    """What was seen of the tool, a sample every ``EVERY_S``: turns done, RSS and USS in MiB."""

    process: psutil.Process
    events: Path
    samples: list[tuple[int, float, float]] = field(default_factory=list[tuple[int, float, float]])
    turns: int = 0
    offset: int = 0

    def sample(self) -> None:
        """Count what was written since the last sample, then look at memory."""
        if self.events.exists():
            with self.events.open("rb") as stream:
                stream.seek(self.offset)
                whole, _, _ = stream.read().rpartition(b"\n")
            self.turns += whole.count(TURN)
            self.offset += len(whole)
        memory = self.process.memory_full_info()
        self.samples.append((self.turns, memory.rss / 2**20, memory.uss / 2**20))


def folder_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def soak(url: str, folder: Path, turns: int, conversations: int) -> tuple[int, Watch, float]:
    """Run the tool to its end; its exit code, what was seen, and the seconds it took."""
    (folder / "kernel.log").touch()
    load = ["--turns", str(turns // conversations), "--conversations", str(conversations), "--tools", "50"]
    rest = ["--context-limit", "32768", "--kernel-log", str(folder / "kernel.log"), "--runs-dir", str(folder / "runs")]
    argv = [sys.executable, "-m", "soakrig", "run", "--url", url, *load, *rest, "--json"]
    start = time.monotonic()
    with (folder / "out.json").open("wb") as out, (folder / "err.txt").open("wb") as err:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
        watch = Watch(psutil.Process(process.pid), folder / "runs/latest/events.jsonl")
        while True:
            try:
                process.wait(timeout=EVERY_S)
                break
            except subprocess.TimeoutExpired:
                watch.sample()
    return process.returncode, watch, time.monotonic() - start


def rejudged(run: Path) -> dict[str, Any]:
    """What `soak report --rejudge` derives from a copy of the run's events."""
    argv = [sys.executable, "-m", "soakrig", "report", str(run), "--rejudge", "--json"]
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)
    if not done.stdout:
        raise SystemExit(f"soak report printed nothing: {done.stderr.strip()}")
    return json.loads(done.stdout)


def growth(samples: list[tuple[int, float, float]], warm_up: int, turns: int) -> dict[str, float]:
    """RSS and USS (MiB) between the warm-up and the last turn: where they began, ended and peaked, and the ratios of
    these; and what drawing up the report took at the very end."""
    after = [sample for sample in samples if warm_up <= sample[0] < turns]
    if len(after) < 2 * EDGE:
        raise SystemExit(f"{len(after)} samples after {warm_up} turns are too few to say anything; raise --turns")
    figures: dict[str, float] = {"samples": len(after)}
    for index, name in ((1, "rss"), (2, "uss")):
        values = [sample[index] for sample in after]
        begin, end = statistics.median(values[:EDGE]), statistics.median(values[-EDGE:])
        figures |= {f"{name}_begin_mib": begin, f"{name}_end_mib": end, f"{name}_peak_mib": max(values)}
        figures |= {f"{name}_end_ratio": end / begin, f"{name}_peak_ratio": max(values) / begin}
    return {**figures, "rss_report_mib": max(sample[1] for sample in samples)}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--turns", type=int, default=20_000, help="of all conversations together")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=2_000, help="turns after which memory has to be flat")
    parser.add_argument("--json", type=Path, help="write every figure and sample here")
    parser.add_argument("--keep", type=Path, help="work in this folder and keep it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, server(0.0, deltas=8) as url:
        folder: Path = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        code, watch, seconds = soak(url, folder, options.turns, options.conversations)
        if not (folder / "out.json").read_bytes():
            raise SystemExit(f"soak run exited {code} without a result: {(folder / 'err.txt').read_text()[-2000:]}")
        result = json.loads((folder / "out.json").read_bytes())
        run = (folder / "runs/latest").resolve()
        kept = json.loads((run / "result.json").read_bytes())
        same = kept == result == rejudged(run)
        turns = sum(result["outcomes"].values())
        figures: dict[str, Any] = {
            "kind": "measured",
            "turns": turns,
            "conversations": options.conversations,
            "cores": os.cpu_count(),
            "verdict": result["verdict"],
            "exit_code": code,
            "outcomes": result["outcomes"],
            "seconds": seconds,
            "turns_per_s": turns / seconds,
            "rejudged_the_same": same,
            "events_mib": (run / "events.jsonl").stat().st_size / 2**20,
            "requests_mib": folder_size(run / "requests") / 2**20,
            **growth(watch.samples, options.warm_up, turns),
        }
    for name, value in figures.items():
        print(f"{name:20} {value:.4g}" if isinstance(value, float) else f"{name:20} {value}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({**figures, "samples_turns_rss_uss": watch.samples}) + "\n")
    problems: list[str] = []
    if figures["rss_peak_ratio"] > ALLOWED or figures["uss_end_ratio"] > ALLOWED:
        peak, end = figures["rss_peak_ratio"], figures["uss_end_ratio"]
        problems.append(f"RSS peaked at {peak:.2f} times what it was after the warm-up, USS ended at {end:.2f} times")
    if result["outcomes"] != {"ok": options.turns}:
        problems.append(f"not every turn was ok: {result['outcomes']}")
    if not same:
        problems.append("the events judged again give another result")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
