"""How long the planner takes on a whole corpus: miss curves of every size, replays, allocation, beside libcachesim.

    python benchmarks/plan_replay.py [--rounds 5] [--rival-python PYTHON] [--rival-layers 75] [--json FILE]

A synthetic trace of 79,119 rows, 75 layers, top-8 of 256 experts (47,471,400 accesses; skew in an order of each layer's
own, and locality) is made once. Every figure is taken after compilation, in rounds that take turns. libcachesim's LRU
gives one size at a time: it runs 20 sizes on the same layers, each of which has to miss as often as the curve says, or
the command ends with 1. The ratio is its time for ONE size over ours for all 257 of the same layers.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from soakrig.engine.planning.allocate import allocate
from soakrig.engine.planning.curve import lru_curves, static_curves
from soakrig.engine.planning.replay import replay_trace, uniform_slots
from soakrig.engine.planning.trace import PlannedTrace, TraceShape, open_trace

ROWS, LAYERS, TOP_K, EXPERTS = 79_119, 75, 8, 256
SLOTS, TOTAL = 77, 5_792
SIZES = [1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 77, 96, 112, 128, 144, 160, 192, 224, 240, 256]
LOCALITY, WINDOW = 0.4, 64
"""Share of ids drawn from the last 64 of the layer; the rest from a flattened Zipf law."""


@numba.njit(cache=False)
def _draw(rows: int, cdf: Any, orders: Any, seed: int) -> Any:
    np.random.seed(seed)
    ids = np.empty((rows, LAYERS, TOP_K), np.int16)
    recent = np.zeros((LAYERS, WINDOW), np.int16)
    used = np.full(EXPERTS, -1, np.int64)
    for row in range(rows):
        for layer in range(LAYERS):
            now = row * LAYERS + layer
            for at in range(TOP_K):
                expert = orders[layer, np.searchsorted(cdf, np.random.random())]
                if row > WINDOW // TOP_K and np.random.random() < LOCALITY:
                    expert = recent[layer, np.random.randint(WINDOW)]
                while used[expert] == now:
                    expert = orders[layer, np.searchsorted(cdf, np.random.random())]
                used[expert] = now
                ids[row, layer, at] = expert
                recent[layer, (row * TOP_K + at) % WINDOW] = expert
    return ids


def make_trace(path: Path) -> PlannedTrace:
    """Write the corpus and open it."""
    rng = np.random.default_rng(1)
    weights = (np.arange(EXPERTS) + 6.0) ** -0.8
    cdf = np.cumsum(weights / weights.sum())
    cdf[-1] = 1.0
    orders: NDArray[np.int64] = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    _draw(ROWS, cdf, orders, 1).tofile(path)
    return open_trace(str(path), TraceShape(LAYERS, TOP_K, EXPERTS))


def timed(rounds: int, runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Seconds of every run, round after round, each compiled before."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for at in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if at:
                found[name].append(time.perf_counter() - start)
    return found


def rival(path: Path, python: str, layers: list[int], processes: int) -> list[dict[str, Any]] | str:
    """libcachesim's answers, from as many processes as there are CPUs; or why there are none."""
    script = Path(__file__).with_name("plan_replay_rival.py")
    try:
        subprocess.run([python, "-c", "import libcachesim"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return f"{python} has no libcachesim: pip install libcachesim numpy there, or give --rival-python"
    shares = [layers[at::processes] for at in range(processes)]
    argv = [
        [python, str(script), str(path), str(LAYERS), str(TOP_K), json.dumps(SIZES), json.dumps(one)] for one in shares
    ]
    children = [subprocess.Popen(one, stdout=subprocess.PIPE, text=True) for one in argv]
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        return "libcachesim failed"
    return [json.loads(one) for one in outputs]


def main() -> int:
    """Print the table; 1 where a rival's misses differ from ours."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rival-python", default=".venv-bench/bin/python")
    parser.add_argument("--rival-layers", type=int, default=LAYERS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cpus = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "corpus.i16"
        planned = make_trace(path)
        trace = planned.trace
        curves = lru_curves(trace, "sequential")
        step = lru_curves(trace)
        seconds = timed(
            options.rounds,
            {
                "open and check": lambda: open_trace(str(path), TraceShape(LAYERS, TOP_K, EXPERTS)),
                "all sizes of LRU, sequential": lambda: lru_curves(trace, "sequential"),
                "all sizes of LRU, engine steps": lambda: lru_curves(trace),
                "all sizes of a static set": lambda: static_curves(trace),
                "one size of LRU, the engine's books": lambda: replay_trace(planned, uniform_slots(planned, SLOTS)),
                "one size of the optimum": lambda: replay_trace(planned, uniform_slots(planned, SLOTS), "opt"),
                "four maps of 5,792 slots, exact search": lambda: allocate(step, TOTAL),
            },
        )
        accesses = int(curves.accesses.sum())
        figures: dict[str, Any] = {"accesses": accesses, "cpus": cpus, "seconds": seconds}
        print(f"{accesses:,} accesses, {LAYERS} layers, {cpus} CPUs, load {os.getloadavg()[0]:.1f}")
        for name, values in seconds.items():
            middle, each = statistics.median(values), 1e9 * statistics.median(values) / accesses
            print(f"{name:42} {middle:8.3f} s  ({min(values):.3f} to {max(values):.3f})  {each:6.1f} ns/access")
        own = replay_trace(planned, uniform_slots(planned, SLOTS))
        gap = int(step.misses[:, SLOTS].sum()) / own.misses - 1
        print(f"curve in steps against the books at {SLOTS} slots: {gap:+.5%} (ties alone)")
        figures["tie_gap"] = gap
        layers = list(range(min(options.rival_layers, LAYERS)))
        answer = rival(path, options.rival_python, layers, cpus)
        code = 0
        if isinstance(answer, str):
            print(f"no rival: {answer}")
        else:
            code = compare(answer, curves.misses, seconds["all sizes of LRU, sequential"], layers, figures)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(figures, indent=1))
    return code


def compare(
    answers: list[dict[str, Any]],
    misses: NDArray[np.int64],
    ours: list[float],
    layers: list[int],
    figures: dict[str, Any],
) -> int:
    """Misses have to be equal; then the ratio of CPU seconds: theirs for one size, ours for all."""
    found = {int(layer): one for answer in answers for layer, one in answer["layers"].items()}
    unequal = [
        (layer, size, one[str(size)][0], int(misses[layer, size]))
        for layer, one in found.items()
        for size in SIZES
        if one[str(size)][0] != int(misses[layer, size])
    ]
    checked = len(found) * len(SIZES)
    print(
        f"libcachesim {answers[0]['version']}: {checked - len(unequal)} of {checked} misses equal {unequal[:3] or ''}"
    )
    by_size = {size: sum(one[str(size)][1] for one in found.values()) for size in SIZES}
    all_sizes = statistics.median(ours) * len(os.sched_getaffinity(0)) * len(layers) / LAYERS  # CPU seconds
    for size in (16, SLOTS, 192):
        ratio = by_size[size] / all_sizes
        print(f"  LRU of {size:3}: {by_size[size]:7.2f} CPU s for one size, {ratio:5.2f} x ours for all {EXPERTS + 1}")
    figures["rival"] = {
        "version": answers[0]["version"],
        "cpu_seconds": by_size,
        "ours_all_sizes_cpu_seconds": all_sizes,
    }
    figures["rival"]["equal"] = not unequal
    mean = statistics.mean(by_size.values())
    print(f"  a curve of 257 sizes that way: {257 * mean:.0f} CPU s, {257 * mean / all_sizes:.0f} x ours")
    return 1 if unequal else 0


if __name__ == "__main__":
    sys.exit(main())
