"""Transcripts through the command line: a moved run is sent again to the byte, nobody is left in what is anonymised,
and a trace's lengths, shared beginnings and times arrive.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from soakrig.engine.bundled import Order, launch_bundled
from soakrig.record.events import TurnDone
from soakrig.record.request_log import read_requests
from soakrig.record.store import RunReader
from wire import loopback

SECRET = "Zqxvjohnson"
BLOCK = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    order = Order("embedded", {}, ["--layers=2", "--hidden=64", "--experts=8", "--top-k=2"])
    with launch_bundled(order, tmp_path_factory.mktemp("engine")) as running:
        yield running.base_url


def soak(folder: Path, *options: str, **env: str) -> tuple[int, Path, str]:
    """`soak run` in ``folder``; its exit code, its run folder and what it said to people."""
    (folder / "kernel.log").touch()
    argv = [sys.executable, "-m", "soakrig", "run", "--kernel-log", "kernel.log", "--stall-timeout", "20", *options]
    done = subprocess.run(argv, cwd=folder, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)
    return done.returncode, (folder / "runs" / "latest").resolve(), done.stderr + done.stdout


def turns(run: Path) -> list[TurnDone]:
    return [event for event in RunReader(run).events() if isinstance(event, TurnDone)]


def test_a_run_that_was_moved_elsewhere_is_sent_again_byte_for_byte(engine: str, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    code, run, said = soak(here, "--url", engine, "--turns", "4", "--tools", "5", "--conversations", "2", "--seed", "9")
    assert code == 0, said
    first = {(one.conversation, turn): one.body for turn, one in numbered(run)}
    assert len(first) == 8
    shutil.move(run, there / "found on a stick")
    shutil.rmtree(here)
    got: list[bytes] = []

    async def keep(x: loopback.Exchange) -> None:
        if b'"tools"' in x.body:
            got.append(x.body)
        await (loopback.tool_call(x) if x.number % 3 else loopback.good(x))

    with served(keep) as url:
        code, again, said = soak(there, "--transcript", "found on a stick", "--url", url, HOME=str(tmp_path))
    assert "is a run folder: 8 requests, sent again byte for byte" in said
    assert sorted(got) == sorted(first.values())
    assert {(one.conversation, turn): one.body for turn, one in numbered(again)} == first


def numbered(run: Path) -> Iterator[tuple[int, Any]]:
    seen: dict[int, int] = {}
    for one in read_requests(run):
        seen[one.conversation] = seen.get(one.conversation, 0) + 1
        yield seen[one.conversation], one


class served:
    """A loopback server in a thread of its own."""

    def __init__(self, handler: loopback.Handler) -> None:
        self.handler = handler
        self.ready, self.loop = threading.Event(), asyncio.new_event_loop()

    def __enter__(self) -> str:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        assert self.ready.wait(10)
        return self.url

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        self.stop = asyncio.Event()
        async with loopback.serve(self.handler) as self.url:
            self.ready.set()
            await self.stop.wait()

    def __exit__(self, *_: object) -> None:
        self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(10)


def session() -> str:
    system = {"role": "system", "content": f"You work for {SECRET} on their build server. Say little."}
    ask = {"role": "user", "content": f"Hello, {SECRET} here.\nWhy does /home/{SECRET}/build.sh end with status 3?"}
    call = {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": f'{{"path": "/{SECRET}"}}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c1", "content": f'{{"lines": ["set -e", "cd {SECRET}"], "size": 20181}}'}
    tool = {"type": "function", "function": {"name": "read_file", "description": f"of {SECRET}", "parameters": {
        "type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}}}  # fmt: skip
    rows = [[system, ask], [system, ask, said, result]]
    return "".join(json.dumps({"messages": row, "tools": [tool], "max_tokens": 400}) + "\n" for row in rows)


def test_nobody_is_left_in_an_anonymised_run_and_every_prompt_has_its_length(engine: str, tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_text(session())
    code, plain, said = soak(tmp_path, "--url", engine, "--transcript", "s.jsonl")
    assert code == 0, said
    code, run, said = soak(tmp_path, "--url", engine, "--transcript", "s.jsonl", "--anonymise", "--seed", "5")
    assert code == 0, said
    assert "s.jsonl was read as OpenAI requests: 2 requests" in said
    for now, then in zip(turns(run), turns(plain), strict=True):
        # Texts are counted alone; where the template writes one into JSON its first token may join with the quote.
        assert abs(now.prompt_tokens - then.prompt_tokens) <= 2
    manifest = RunReader(run).manifest
    assert manifest.text_kept, "it is nobody's text"
    assert manifest.transcript["anonymised"]["counted"] == "the engine's /tokenize"
    assert manifest.transcript["anonymised"]["texts_of_another_length"] == 0
    for path in (path for path in run.rglob("*") if path.is_file()):
        assert SECRET.encode() not in path.read_bytes(), path
    bodies = [one.body for one in read_requests(run)]
    assert len(bodies) == 2
    assert bodies[0][:-2] == bodies[1][: len(bodies[0]) - 2], "the second request begins with the first"


def test_a_trace_arrives_with_its_lengths_beginnings_and_times(engine: str, tmp_path: Path) -> None:
    rows = [
        {"timestamp": 700, "input_length": 300, "output_length": 21, "hash_ids": [1, 2, 3, 4, 5]},
        {"timestamp": 700, "input_length": 90, "output_length": 5, "hash_ids": [9, 10]},
        {"timestamp": 2700, "input_length": 280, "output_length": 9, "hash_ids": [1, 2, 3, 4, 7]},
    ]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--url", engine, "--transcript", "trace.jsonl", "--trace-block", str(BLOCK)]
    code, run, said = soak(tmp_path, *options, "--trace-speed", "2")
    assert code == 0, said
    assert "trace.jsonl was read as Mooncake arrivals: 3 requests" in said
    done = {one.prompt_tokens: one for one in turns(run)}
    assert sorted(done) == [90, 280, 300]
    assert [done[row["input_length"]].output_tokens for row in rows] == [21, 5, 9]
    assert done[280].cached_tokens >= 4 * BLOCK - 16, "its beginning is the first one's"
    assert done[300].cached_tokens == done[90].cached_tokens == 0
    sent = {
        event.turn + 10 * event.conversation: event.mono for event in RunReader(run).events() if event.kind == "sent"
    }
    times = sorted(sent.values())
    assert times[1] - times[0] < 0.9
    assert 1.0 <= times[2] - times[0] < 2.5, "two seconds of the trace, twice as fast"
    assert {one.due_s for one in read_requests(run)} == {0.0, 1.0}
    code, again, said = soak(tmp_path, "--url", engine, "--transcript", str(run))
    assert code == 0, said
    assert sorted(one.body for one in read_requests(again)) == sorted(one.body for one in read_requests(run))
    assert {one.due_s for one in read_requests(again)} == {0.0, 1.0}
