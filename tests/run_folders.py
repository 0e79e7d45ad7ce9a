"""Run folders made on the spot: of any length, with faults, samples and evidence, as a run leaves them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from builders import T0, done, kernel_live, manifest, sent, source, xid
from soakrig.record.events import EngineChecked, Event, Note, RunEnded, SampleTaken, dump
from soakrig.record.judge import Judge
from soakrig.record.store import EVENTS, MANIFEST, RESULT

HOSTILE = "</script><script>alert(1)</script> & <b>|`*[x](http://evil.example)\x1b[31m\u202e"
"""Text that would do something in a page, a table or a terminal that lets it."""


def long_run(turns: int, faults: int = 0, bad_every: int = 0, **of: Any) -> list[Event]:
    """``turns`` turns of one second, a sample each, ``faults`` Xids spread over them."""
    events: list[Event] = [kernel_live(), source("metrics", "live", "all of it"), Note(T0, T0, "a note")]
    every = turns // faults if faults else 0
    for n in range(1, turns + 1):
        at = T0 + 1.5 * n
        bad = bad_every and n % bad_every == 0
        events += [
            sent(n, at),
            SampleTaken(at + 0.1, at + 0.1, "metrics", {"kv_cache_usage": (n % 100) / 100}),
            SampleTaken(at + 0.1, at + 0.1, "process", {"rss_mib": 500.0 + n % 7}),
            done(n, at + 1.0, "truncated" if bad else "ok", ttft_s=0.1 + (n % 50) / 100, **of),
        ]
        if every and n % every == 0:
            events.append(xid(31, at + 0.5, signature="Xid 31 FAULT_PDE"))
    end = T0 + 1.5 * (turns + 1)
    return [*events, EngineChecked(end, end, True, "a canary"), RunEnded(end, end, "completed")]


def write_run(folder: Path, events: Iterable[Event], *, result: bool = True, **fields: Any) -> Path:
    """A run folder of these events, with its verdict unless ``result`` is off."""
    folder.mkdir(parents=True)
    made = manifest(run_id=folder.name, **fields)
    (folder / MANIFEST).write_bytes(orjson.dumps(made.model_dump(mode="json")))
    judge = Judge(made)
    lines: list[bytes] = []
    for event in events:
        judge.feed(event)
        lines.append(dump(event))
    (folder / EVENTS).write_bytes(b"".join(lines))
    if result:
        (folder / RESULT).write_text(json.dumps(judge.result().to_json()))
    return folder


def write_case(folder: Path, name: str, time: float, log: str = "the engine's last words\n", **request: Any) -> None:
    """One case of evidence, of turn 2."""
    case = folder / "evidence" / name
    case.mkdir(parents=True)
    (case / "cause.json").write_bytes(dump(xid(31, time)))
    facts = {"conversation": 0, "turn": 2, "context_tokens": 7200, "request_bytes": 900, "response_bytes": 40,
             "response_status": 200, "events": 3, "request_sha256_16": "0" * 16}  # fmt: skip
    (case / "c0000-t00002.json").write_text(json.dumps(facts))
    (case / "c0000-t00002-request.json").write_text(json.dumps(request))
    samples = [SampleTaken(time - n, time - n, "nvml", {"temperature_c": 60.0 + n}) for n in range(3)]
    (case / "samples.jsonl").write_bytes(b"".join(dump(one) for one in samples))
    (case / "engine-log-tail.txt").write_text(log)
