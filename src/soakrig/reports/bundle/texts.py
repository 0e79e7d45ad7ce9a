"""What of a run folder goes into a bundle, and what of it holds prompts: read as it stands, not yet redacted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from soakrig.record.manifest import Manifest
from soakrig.record.store import EVENTS
from soakrig.reports.run_view import RunView

AROUND = 25
"""Lines of the kernel log before and after a line that is told."""
TAIL_BYTES = 64 << 10
LOG_LINES = 300
"""Lines of the engine's log, at each of ``MOST_TAILS`` faults and at the end."""
MOST_TAILS = 3
_MOST_LINE = 1 << 20


@dataclass(slots=True)
class RunTexts:
    """``events``: whole lines of ``events.jsonl``, parsed; ``kernel`` and ``engine``: excerpts."""

    manifest: dict[str, Any]
    events: list[dict[str, Any]]
    result: dict[str, Any]
    kernel: str
    engine: str


def run_texts(view: RunView) -> RunTexts:
    """The texts of a run that has been read."""
    return RunTexts(
        manifest=view.manifest.model_dump(mode="json"),
        events=list(_events(view.folder / EVENTS)),
        result=view.result.to_json(),
        kernel=_kernel(view),
        engine=_engine(view),
    )


def prompt_texts(folder: Path) -> Iterator[str]:
    """Every text that was sent or answered, as far as the folder has it; broken lines are passed over."""
    for path in sorted((folder / "requests").glob("c*.jsonl")):
        for line in _lines(path):
            data = _parsed(line)
            yield from _strings(data.get("message") or data.get("head"))
    for path in sorted(folder.glob("evidence/*/*-request.json")):
        yield from _strings(_parsed(_read(path, 64 << 20)))
    for path in sorted(folder.glob("evidence/*/*-response.sse")):
        yield _answer(_read(path, 64 << 20))


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in _lines(path):
        if not line.endswith(b"\n"):
            return
        if data := _parsed(line):
            yield data


def _kernel(view: RunView) -> str:
    """The lines around each told signal; the last ones where none is in the file."""
    path = view.folder / "kernel.log"
    told = {
        line for one in view.faults for raw in (one.fault.raw, *(s.raw for s in one.signals)) if (line := raw.strip())
    }
    lines = [line.decode("utf-8", "replace").rstrip("\r\n") for line in _lines(path)] if path.exists() else []
    if not lines:
        return "\n".join(dict.fromkeys(s.raw for one in view.faults for s in one.signals if s.source == "kernel_log"))
    spots = [
        n for n, line in enumerate(lines) if line.strip() and any(line.strip() in one or one in line for one in told)
    ]
    if not spots:
        return "\n".join(lines[-2 * AROUND :])
    kept = sorted({m for n in spots for m in range(max(0, n - AROUND), min(len(lines), n + AROUND + 1))})
    made: list[str] = []
    for before, n in zip([-1, *kept], kept, strict=False):
        if n - before > 1:
            made.append(f"[{n - before - 1} lines left out]")
        made.append(lines[n])
    return "\n".join(made)


def _engine(view: RunView) -> str:
    """The log's tail as it was frozen at the first faults, and its end."""
    parts: list[str] = []
    names = [case.name for told in view.faults for case in told.cases] or [case.name for case in view.other_cases]
    for name in list(dict.fromkeys(names))[:MOST_TAILS]:
        text = _tail(view.folder / "evidence" / name / "engine-log-tail.txt")
        if text:
            parts.append(f"[the engine's log at {name}]\n{text}")
    end = _tail(view.folder / "engine.log")
    if end and not any(part.endswith(end) for part in parts):
        parts.append(f"[the end of the engine's log]\n{end}")
    return "\n\n".join(parts)


def _tail(path: Path) -> str:
    """Whole lines of the file's end."""
    try:
        with path.open("rb") as stream:
            stream.seek(0, os.SEEK_END)
            size = stream.tell()
            stream.seek(max(0, size - TAIL_BYTES))
            data = stream.read()
    except OSError:
        return ""
    if size >= TAIL_BYTES:  # it may begin in the midst of a line, and of a secret
        data = data.partition(b"\n")[2]
    return "\n".join(data.decode("utf-8", "replace").splitlines()[-LOG_LINES:])


def _answer(data: bytes) -> str:
    """What a streamed or whole answer says."""
    said: list[str] = []
    for line in data.splitlines():
        for choice in _parsed(line.removeprefix(b"data:").strip()).get("choices") or ():
            part: Any = (choice.get("delta") or choice.get("message") or {}) if isinstance(choice, dict) else {}
            said += [str(part[name]) for name in ("content", "reasoning", "reasoning_content") if part.get(name)]
    return "".join(said)


def _strings(data: Any, name: str = "") -> Iterator[str]:
    """Texts of a request; names, roles and ids are none."""
    match data:
        case str() if name not in ("role", "name", "type", "id", "tool_call_id", "model", "$ref"):
            yield data
        case dict():
            for key, value in data.items():
                yield from _strings(value, str(key))
        case list():
            for one in data:
                yield from _strings(one, name)
        case _:
            pass


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as stream:
            yield from (line for line in stream if len(line) < _MOST_LINE or path.name != "kernel.log")
    except OSError:
        return


def _read(path: Path, most: int) -> bytes:
    try:
        return path.read_bytes() if path.stat().st_size <= most else b""
    except OSError:
        return b""


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        data = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def settings_of(manifest: Manifest) -> dict[str, Any]:
    """``settings.json``: what was set, what the engine says it is set to, versions and host."""
    data = manifest.model_dump(mode="json")
    names = ("simulated", "run_id", "reproducer", "plan", "seed", "gates", "accept", "base_url", "model", "launched",
             "kernel_log", "stall_timeout_s", "settings", "fingerprint", "host")  # fmt: skip
    return {name: data[name] for name in names}
