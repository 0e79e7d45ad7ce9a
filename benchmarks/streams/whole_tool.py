"""aiperf as its users run it, a tool of ten processes: what the whole of it costs.

Its cost per event is the difference of two runs of different length, children included, so that start-up and report
drop out. It gets a tokenizer folder, since it would fetch one otherwise, and is told to trust the server's counts.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from importlib.resources import files
from pathlib import Path

from streams.measure import MODEL, PROMPT

MORE = 800
"""Requests between the short run and the long one: its start-up takes 6 s of CPU, give or take some tenths."""


def profile(tool: Path, url: str, streams: int, requests: int, folder: Path) -> dict[str, float]:
    """One run of ``requests`` requests; CPU seconds of the tool and its children, and what it counted.

    Raises ``RuntimeError`` with the end of its output when it fails or reports another number of good requests.
    """
    prompts, tokenizer, report = folder / "prompts.jsonl", folder / "tokenizer", folder / f"report-{requests}"
    tokenizer.mkdir(exist_ok=True)
    source = files("soakrig.engine.embedded").joinpath("tokenizer.json")
    (tokenizer / "tokenizer.json").write_bytes(source.read_bytes())
    (tokenizer / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    prompts.write_text("".join(json.dumps({"text": f"{PROMPT} Part {n}."}) + "\n" for n in range(requests)))
    shape = ["--model", MODEL, "--url", url, "--endpoint-type", "chat", "--streaming"]
    load = ["--concurrency", str(streams), "--request-count", str(requests)]
    source_of = ["--input-file", str(prompts), "--custom-dataset-type", "single_turn"]
    counts = ["--tokenizer", str(tokenizer), "--use-server-token-count"]
    output = ["--ui", "none", "--artifact-dir", str(report)]
    before, start = children(), time.monotonic()
    done = subprocess.run(
        [str(tool), "profile", *shape, *load, *source_of, *counts, *output],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300,
        cwd=folder, env=dict(os.environ),
    )  # fmt: skip
    used, wall = children() - before, time.monotonic() - start
    if done.returncode != 0:
        raise RuntimeError(f"aiperf exited {done.returncode}: {done.stdout[-800:]}")
    data = json.loads((report / "profile_export_aiperf.json").read_text())
    good = int(data["request_count"]["avg"])
    if good != requests:
        raise RuntimeError(f"aiperf counted {good} good requests of {requests}")
    return {
        "cpu_s": used,
        "wall_s": wall,
        "streams_per_s": data["request_throughput"]["avg"],
        "ttft_s": data["time_to_first_token"]["avg"] / 1e3,
        "itl_s": data["inter_token_latency"]["avg"] / 1e3,
    }


def children() -> float:
    """User and system seconds of every child that has ended and been waited for, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def whole_cost(tool: Path, url: str, streams: int, folder: Path) -> dict[str, float]:
    """Figures of ``MORE`` requests or so beyond the first of every lane; streams a second are the tool's own word."""
    each = max(3, MORE // streams)
    short = profile(tool, url, streams, streams, folder)
    long = profile(tool, url, streams, streams * (each + 1), folder)
    return {**long, "requests": streams * each, "cpu_s": long["cpu_s"] - short["cpu_s"]}
