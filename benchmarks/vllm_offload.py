"""What the plug-in costs a real vLLM on the CPU, beside stock in one run.

    python benchmarks/vllm_offload.py [--rounds 5] [--tokens 160] [--json FILE]

Three servers of the tiny checkpoint (4 layers of 32 experts, top-4) stand beside each other and are asked in turn,
round after round: stock, all experts in slots (the cost of the plug-in alone), and slots for half of them (LRU). Decode
tokens a second at 1 and 4 streams, as ratios to stock in the same round; time to a served request; memory of bank and
slots, asked and resident. Needs the vLLM environment (`make vllm-env`); without it says so and measures nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from soakrig.engine.launcher import EngineProcess
from soakrig.engine.vllm.launch import launch_vllm
from soakrig.engine.vllm.served_model import ServedModel
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import TinySpec
from soakrig.errors import PreflightRefusedError

STREAMS = (1, 4)
SETTINGS: dict[str, dict[str, str]] = {
    "stock": {},
    "all in slots": {"VLLM_MOE_HOT_SLOTS": "32"},
    "half in slots": {"VLLM_MOE_HOT_SLOTS": "16"},
}
FLAGS = ["--max-model-len=4096"]
Figures = dict[str, Any]


def ask(engine: EngineProcess, seed: int, tokens: int) -> tuple[float, int]:
    """Seconds and tokens of one greedy completion."""
    body = {
        "model": "tiny",
        "prompt": [300 + seed, 301, 302],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    began = time.perf_counter()
    answer = httpx.post(f"{engine.base_url}/v1/completions", json=body, timeout=600, trust_env=False)
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()["usage"]["completion_tokens"]


def speed(engine: EngineProcess, streams: int, seed: int, tokens: int) -> float:
    """Tokens a second of ``streams`` requests at once."""
    began = time.perf_counter()
    with ThreadPoolExecutor(streams) as pool:
        done = list(pool.map(lambda number: ask(engine, seed + number, tokens), range(streams)))
    return sum(count for _, count in done) / (time.perf_counter() - began)


def measure(rounds: int, tokens: int, folder: Path) -> Figures:
    """All servers, in turn."""
    make_tiny(folder / "model", TinySpec())
    model = ServedModel(str(folder / "model"), "tiny", tiny=True)
    found: Figures = {name: {"speeds": {streams: [] for streams in STREAMS}} for name in SETTINGS}
    with ExitStack() as stack:
        engines: dict[str, EngineProcess] = {}
        for name, settings in SETTINGS.items():
            place = folder / name.replace(" ", "-")
            place.mkdir()
            began = time.perf_counter()
            engines[name] = stack.enter_context(launch_vllm(model, settings, FLAGS, place))
            found[name]["start_s"] = time.perf_counter() - began
            print(f"{name}: up after {found[name]['start_s']:.1f} s", file=sys.stderr, flush=True)
        for number in range(rounds + 1):
            for streams in STREAMS:
                for name, engine in engines.items():
                    one = speed(engine, streams, 10 * number, tokens)
                    if number:  # the first round warms up
                        found[name]["speeds"][streams].append(one)
        for name, engine in engines.items():
            if SETTINGS[name]:
                said = httpx.get(f"{engine.base_url}/soakrig/settings", timeout=60, trust_env=False).json()
                counted = httpx.get(f"{engine.base_url}/soakrig/offload", timeout=60, trust_env=False).json()
                found[name]["memory"] = said["offload"]["memory"]
                found[name]["hit_rate"] = counted["total"]["small"]["hit_rate"]
    return found


def show(found: Figures) -> None:
    """The figures as text."""
    for name, one in found.items():
        for streams in STREAMS:
            mine, stock = one["speeds"][streams], found["stock"]["speeds"][streams]
            ratio = statistics.median(a / b for a, b in zip(mine, stock, strict=True))
            print(f"{name:14} {streams} stream(s): {statistics.median(mine):7.1f} tok/s, {ratio:.3f} of stock")
        if "memory" in one:
            rates = " ".join(f"{key} {value:.3f}" for key, value in one["hit_rate"].items())
            print(f"{name:14} {one['memory']}; small layer-steps: {rates}")
        print(f"{name:14} served after {one['start_s']:.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds, each in turn (default 5)")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer (default 160)")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    wanted = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-offload-") as folder:
            found = measure(wanted.rounds, wanted.tokens, Path(folder))
    except PreflightRefusedError as error:
        print(f"nothing was measured: {error}")
        return 0
    show(found)
    if wanted.json is not None:
        wanted.json.write_text(json.dumps(found, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
