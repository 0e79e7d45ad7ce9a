"""What a step of the offload core costs on the CPU, what slots are worth on the embedded engine's own traffic.

    python benchmarks/offload_cpu.py [--rounds 5] [--only step|hits|speed] [--json FILE]

step: 75 layers of 256 experts, top-8, one or two tokens a step, skewed traffic, LRU with 112 slots. Bookkeeping and
gather together, beside ``torch.index_select`` of the same missing rows (the limit: a copy and nothing else), and beside
``index_select`` of every routed row (what staging without a cache copies). Measured in turn, round after round, on the
same steps; medians, as ratios.

hits: the embedded engine serves agent conversations once and writes a trace; the trace is replayed through the same
books for other numbers of slots and policies (derived from measured routing; the engine's own counters have to equal
the replay of its own settings, else exit 1), with the offline optimum as the limit.

speed: tokens a second of the embedded engine, one request at a time, all experts resident and with slots for 25, 50 and
75 % of them. Engines run beside each other and take turns; ratios to resident.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np
import torch

from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.counters import COUNTERS, PATHS, Window, report
from soakrig.engine.offload.optimum import fewest_misses
from soakrig.engine.offload.plan import LayerPlan, LayerShape, ModelShape, OffloadPlan, PolicyName
from soakrig.engine.offload.replay import replay
from soakrig.engine.offload.slots import StepBuffers, Tally, layer_slots
from soakrig.engine.offload.trace import Trace, read_trace

LAYERS, EXPERTS, TOP_K, SLOTS = 75, 256, 8, 112
STEPS, WARM_UP = 60, 300
POLICIES: tuple[PolicyName, ...] = ("static", "lru", "lfru", "clock")
Figures = dict[str, Any]


def step_plan(row_bytes: int) -> OffloadPlan:
    shapes = tuple(LayerShape(layer, EXPERTS, row_bytes) for layer in range(LAYERS))
    layers = tuple(LayerPlan(one.layer, EXPERTS, row_bytes, SLOTS, "lru", ()) for one in shapes)
    return OffloadPlan(
        model=ModelShape("bench", shapes, TOP_K), layers=layers, arena=0, staging=True, groups=True, staging_rows=64,
        asked_gb=None, trace=None, skew=None, warnings=(),
    )  # fmt: skip


def traffic(tokens: int, steps: int) -> list[torch.Tensor]:
    """[layers, tokens, k] ids a step: a Zipf law with another order of experts in each layer."""
    rng = np.random.default_rng(1)
    orders = np.stack([rng.permutation(EXPERTS) for _ in range(LAYERS)])
    weights = np.log(1 / (np.arange(EXPERTS) + 1.0))
    found: list[torch.Tensor] = []
    for _ in range(steps):
        noise = rng.gumbel(size=(LAYERS, tokens, EXPERTS))
        ranks = np.argsort(-(weights + noise), axis=-1)[..., :TOP_K]
        found.append(torch.from_numpy(np.take_along_axis(orders[:, None, :], ranks, axis=-1)))
    return found


def bench_step(rounds: int) -> list[Figures]:
    """One figure set for each size of row and number of tokens."""
    return [_bench_step(size, tokens, rounds) for size in (4096, 65536) for tokens in (1, 2)]


def _bench_step(row_bytes: int, tokens: int, rounds: int) -> Figures:
    plan = step_plan(row_bytes)
    store = ExpertStore(plan, torch.device("cpu"), 64)
    for layer in range(LAYERS):
        store.add_layer(layer, {"weight": torch.randint(0, 255, (EXPERTS, row_bytes), dtype=torch.uint8)})
    store.finish()
    torch.set_num_threads(1)
    marks = np.zeros(tokens, dtype=np.uint8)
    steps = traffic(tokens, WARM_UP + STEPS * rounds)
    missing = misses(plan, steps)[WARM_UP:]
    routed = [[ids[layer].reshape(-1) for layer in range(LAYERS)] for ids in steps[WARM_UP:]]
    steps, warm_up = steps[WARM_UP:], steps[:WARM_UP]

    def ours(ids: torch.Tensor) -> None:
        store.begin_step(marks)
        for layer in range(LAYERS):
            for _ in store.parts(layer, ids[layer]):
                pass
        store.end_step()

    for ids in warm_up:
        ours(ids)
    banks = [store.offloaded[layer].bank.host["weight"] for layer in range(LAYERS)]
    place = torch.zeros((64, row_bytes), dtype=torch.uint8)
    spent: dict[str, list[float]] = {"ours": [], "missing": [], "routed": []}
    for start in range(0, len(steps), STEPS):
        of_round = slice(start, start + STEPS)
        began = time.perf_counter()
        for ids in steps[of_round]:
            ours(ids)
        spent["ours"].append((time.perf_counter() - began) / STEPS)
        for name, lists in (("missing", missing[of_round]), ("routed", routed[of_round])):
            began = time.perf_counter()
            for of_step in lists:
                for bank, src in zip(banks, of_step, strict=True):
                    if len(src):
                        torch.index_select(bank, 0, src, out=place[: len(src)])
            spent[name].append((time.perf_counter() - began) / STEPS)
    median = {name: statistics.median(times) / LAYERS * 1e6 for name, times in spent.items()}
    return {
        "row_bytes": row_bytes,
        "tokens": tokens,
        "misses_per_step_per_layer": statistics.mean(len(src) for of_step in missing for src in of_step),
        "us_per_layer": median,
        "over_copy_of_misses": median["ours"] / median["missing"],
        "over_copy_of_routed": median["ours"] / median["routed"],
    }


def misses(plan: OffloadPlan, steps: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """What each layer-step has to fetch, from the books alone: [steps][layers] expert ids, int64."""
    tallies = [
        Tally(
            torch.zeros(len(COUNTERS), dtype=torch.int64),
            torch.zeros(EXPERTS, dtype=torch.int64),
            torch.zeros(64, dtype=torch.uint8),
        )
        for _ in plan.layers
    ]
    books = layer_slots(plan.layers, 0, LAYERS * SLOTS, StepBuffers(torch.device("cpu")), tallies)
    found: list[list[torch.Tensor]] = []
    for ids in steps:
        of_step: list[torch.Tensor] = []
        for book, of_layer in zip(books, ids, strict=True):
            fetches = book.assign(of_layer)
            of_step.append(torch.from_numpy(fetches.src[: fetches.count]).long())
        found.append(of_step)
    return found


def bench_hits(folder: Path) -> Figures:
    """Hit rates by slots and policy on the traffic of one run of `soak run`, and the engine's own beside them."""
    path = folder / "routing.trace"
    counted = _serve_and_count({"VLLM_MOE_HOT_SLOTS": "8", "VLLM_MOE_ROUTING_TRACE": str(path)}, folder)
    trace = read_trace(str(path))
    assert trace.header.plan is not None
    own = trace.header.plan
    rows = [
        {"policy": policy, "slots": slots, **_rates(trace, _other(own, policy, slots, trace))}
        for slots in (4, 8, 16, 24)
        for policy in POLICIES
    ]
    for slots in (4, 8, 16, 24):
        fewest = {"policy": "optimum", "slots": slots, "misses_per_step_per_layer": _optimum(trace, slots)}
        rows.append(fewest)
    small = sum(len(marks) * own.model.top_k <= own.staging_rows for marks, _ in trace.steps())
    return {
        "engine_steps": sum(1 for _ in trace.steps()),
        "small_steps": small,
        "rows": rows,
        "replay_equals_engine": replay(trace, own) == counted,
    }


def _other(own: OffloadPlan, policy: PolicyName, slots: int, trace: Trace) -> OffloadPlan:
    """The same engine with other slots. The static hot set is that of the first half, as a profile's would be."""
    hot: dict[int, tuple[int, ...]] = {layer.layer: () for layer in own.layers}
    if policy == "static":
        half = trace.ids[: len(trace.ids) // 2]
        for place, layer in enumerate(own.layers):
            counts = np.bincount(half[:, place][half[:, place] >= 0].reshape(-1), minlength=layer.experts)
            hot[layer.layer] = tuple(int(one) for one in np.argsort(-counts, kind="stable")[:slots])
    layers = tuple(replace(layer, slots=slots, policy=policy, hot=hot[layer.layer]) for layer in own.layers)
    return replace(own, layers=layers)


def _rates(trace: Trace, plan: OffloadPlan) -> Figures:
    counters = replay(trace, plan)
    layers = [layer.layer for layer in plan.model.layers]
    small = report(layers, plan.row_bytes, Window(0, 1, counters))["total"]["small"]
    return {"hit_rate": small["hit_rate"], "misses_per_step_per_layer": small["misses_per_step_per_layer"]}


def _optimum(trace: Trace, slots: int) -> float:
    header = trace.header
    small = [ids for _, ids in trace.steps() if len(ids) * header.top_k <= header.staging_rows]
    misses = [
        fewest_misses([ids[:, place].reshape(-1) for ids in small], header.experts, slots)
        for place in range(len(header.layers))
    ]
    return sum(misses) / len(small) / len(header.layers)


def _serve_and_count(environment: dict[str, str], folder: Path) -> Any:
    """Run `soak run` for 30 turns against an engine of its own; the engine's own counters at the end."""
    with Engine(environment, folder) as engine:
        argv = [sys.executable, "-m", "soakrig", "run", "--url", engine.url, "--turns", "30", "--json"]
        (folder / "kernel.log").touch()
        argv += ["--kernel-log", str(folder / "kernel.log"), "--runs-dir", str(folder / "runs")]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        whole = httpx.get(f"{engine.url}/soakrig/offload", trust_env=False).json()
    return [
        [[whole["layers"][str(layer)][path][name] for name in COUNTERS] for path in PATHS]
        for layer in range(len(whole["layers"]))
    ]


class Engine:
    """An embedded engine in a process of its own."""

    def __init__(self, environment: dict[str, str], folder: Path) -> None:
        self._port_file = Path(tempfile.mkdtemp(dir=folder)) / "port"
        argv = [sys.executable, "-m", "soakrig.engine.embedded", "--port", "0", "--port-file", str(self._port_file)]
        self._process = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def __enter__(self) -> Self:
        while not self._port_file.exists():
            if self._process.poll() is not None:
                raise SystemExit(f"the engine ended with {self._process.returncode} before it was ready")
            time.sleep(0.05)
        self.url = f"http://127.0.0.1:{self._port_file.read_text().strip()}"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


SPEED_SETTINGS = {"resident": {}, "25 %": {"VLLM_MOE_HOT_SLOTS": "8"}, "50 %": {"VLLM_MOE_HOT_SLOTS": "16"},
                  "75 %": {"VLLM_MOE_HOT_SLOTS": "24"}, "none, staging": {"CPU_OFFLOAD_GB": "1"},
                  "none, in place": {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_DMA_STAGING": "0"}}  # fmt: skip


def bench_speed(rounds: int, folder: Path) -> Figures:
    """Decode and prefill, tokens a second, for each of SPEED_SETTINGS, in turn."""
    decode: dict[str, list[float]] = {name: [] for name in SPEED_SETTINGS}
    prefill: dict[str, list[float]] = {name: [] for name in SPEED_SETTINGS}
    with ExitStack() as stack:
        engines = {name: stack.enter_context(Engine(env, folder)) for name, env in SPEED_SETTINGS.items()}
        client = stack.enter_context(httpx.Client(timeout=120, trust_env=False))
        for number in range(rounds + 1):
            for name, engine in engines.items():
                speeds = _speed(client, engine.url, number), _prefill(client, engine.url, number)
                if number:  # the first round warms up
                    decode[name].append(speeds[0])
                    prefill[name].append(speeds[1])
    return {
        kind: {
            name: {"tokens_per_s": statistics.median(times), "of_resident": _paired(times, speeds["resident"])}
            for name, times in speeds.items()
        }
        for kind, speeds in (("decode", decode), ("prefill", prefill))
    }


def _paired(times: list[float], resident: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(times, resident, strict=True))


def _speed(client: httpx.Client, url: str, seed: int) -> float:
    body = {"prompt": [seed + 1, 2, 3, 4], "max_tokens": 300, "temperature": 0}
    began = time.perf_counter()
    answer = client.post(f"{url}/v1/completions", json=body).json()
    return answer["usage"]["completion_tokens"] / (time.perf_counter() - began)


def _prefill(client: httpx.Client, url: str, seed: int) -> float:
    rng = random.Random(seed)
    body = {"prompt": [rng.randrange(4096) for _ in range(4000)], "max_tokens": 1, "temperature": 0}
    began = time.perf_counter()
    client.post(f"{url}/v1/completions", json=body).raise_for_status()
    return 4000 / (time.perf_counter() - began)


def show(figures: Figures) -> None:
    """The figures as text."""
    for one in figures.get("step", ()):
        us = one["us_per_layer"]
        print(
            f"step  rows of {one['row_bytes']} B, {one['tokens']} token(s), "
            f"{one['misses_per_step_per_layer']:.2f} misses: {us['ours']:.1f} us a layer, copy of the misses "
            f"{us['missing']:.1f}, copy of all routed {us['routed']:.1f}: {one['over_copy_of_misses']:.2f}x, "
            f"{one['over_copy_of_routed']:.2f}x"
        )
    if hits := figures.get("hits"):
        print(
            f"hits  {hits['small_steps']} small steps of {hits['engine_steps']}; "
            f"replay equals the engine's counters: {hits['replay_equals_engine']}"
        )
        for row in hits["rows"]:
            rates = " ".join(f"{name} {value:.4f}" for name, value in row.get("hit_rate", {}).items())
            print(
                f"      {row['policy']:8} {row['slots']:3} slots: {row['misses_per_step_per_layer']:.3f} misses {rates}"
            )
    for kind, speeds in figures.get("speed", {}).items():
        for name, one in speeds.items():
            print(f"speed {kind:8} {name:15} {one['tokens_per_s']:9.1f} tok/s, {one['of_resident']:.3f} of resident")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each in turn (default 5)")
    parser.add_argument("--only", choices=("step", "hits", "speed"), help="one part of it")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    wanted = parser.parse_args()
    figures: Figures = {}
    with tempfile.TemporaryDirectory(prefix="offload-cpu-") as name:
        folder = Path(name)
        if wanted.only in (None, "step"):
            figures["step"] = bench_step(wanted.rounds)
        if wanted.only in (None, "hits"):
            figures["hits"] = bench_hits(folder)
        if wanted.only in (None, "speed"):
            figures["speed"] = bench_speed(wanted.rounds, folder)
    show(figures)
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(figures, indent=2))
    return 0 if figures.get("hits", {}).get("replay_equals_engine", True) else 1


if __name__ == "__main__":
    sys.exit(main())
