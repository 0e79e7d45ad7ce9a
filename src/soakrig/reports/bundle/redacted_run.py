"""A run with nobody in it: the same record, every text redacted, written as a run folder that reports can read."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import RecordError
from soakrig.record.events import Note, dump, parse
from soakrig.record.manifest import Manifest
from soakrig.record.quotes import Quotes
from soakrig.record.redactor import Redactor
from soakrig.record.result import Result
from soakrig.record.store import EVENTS, MANIFEST, RESULT
from soakrig.reports.bundle.texts import RunTexts
from soakrig.reports.run_view import RunView, read_run

_MARK = "SIMULATED: a planted fault took part in this run"


@dataclasses.dataclass(frozen=True, slots=True)
class RedactedRun:
    """``files``: those of the run folder that go into a bundle; ``view``: what a report of them is made of."""

    files: dict[str, bytes]
    view: RunView
    kernel: str
    engine: str


class Cleaner:
    """Hides quotations of prompts, then redacts. ``quotes`` None: prompts are kept."""

    def __init__(self, redactor: Redactor, quotes: Quotes | None) -> None:
        self.redactor, self.quotes = redactor, quotes

    def text(self, text: str) -> str:
        """Of a log: lines stay lines."""
        return self.redactor.text(text if self.quotes is None else self.quotes.hide(text))

    def data(self, data: Any) -> Any:
        """Of plain data."""
        return self.redactor.data(data if self.quotes is None else self._hidden(data))

    def _hidden(self, data: Any) -> Any:
        match data:
            case str() if self.quotes is not None:
                return self.quotes.hide(data)
            case dict():
                return {key: self._hidden(value) for key, value in data.items()}
            case list():
                return [self._hidden(one) for one in data]
            case _:
                return data


def redacted_run(view: RunView, texts: RunTexts, cleaner: Cleaner) -> RedactedRun:
    """The redacted run. Raises ``RecordError`` where a redacted record is none any more."""
    try:
        manifest = Manifest.model_validate(cleaner.redactor.data(texts.manifest))
        result = Result.from_json(cleaner.data(texts.result))
    except ValueError as error:
        raise RecordError(f"{view.folder.name} is no record any more once it is redacted: {error}") from error
    lines = [orjson.dumps(cleaner.data(event)) + b"\n" for event in texts.events]
    for number, line in enumerate(lines, 1):
        parse(line, where=f"{EVENTS} line {number}, redacted,")
    if view.simulated and texts.events:
        first = texts.events[0]
        lines.insert(0, dump(Note(first["time"], first["mono"], _MARK)))
    files = {
        MANIFEST: _pretty(manifest.model_dump(mode="json")),
        RESULT: _pretty(result.to_json()),
        EVENTS: b"".join(lines),
    }
    with tempfile.TemporaryDirectory(prefix="soakrig-bundle-") as place:
        folder = Path(place) / "run"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        _cases(view, folder, cleaner)
        made = read_run(folder)
    made = dataclasses.replace(
        made,
        folder=Path(cleaner.redactor.text(view.folder.name)),
        missing=[cleaner.text(one) for one in view.missing],
        stored=view.stored,
        running=view.running,
    )
    return RedactedRun(files, made, cleaner.text(texts.kernel), cleaner.text(texts.engine))


def _cases(view: RunView, folder: Path, cleaner: Cleaner) -> None:
    """The evidence that the page shows: causes, shapes of requests, samples, the engine's log."""
    for case in [*(case for told in view.faults for case in told.cases), *view.other_cases]:
        place = folder / "evidence" / cleaner.redactor.text(case.name)
        place.mkdir(parents=True, exist_ok=True)
        cause = {"time": case.time, "raw": cleaner.text(case.cause)}
        (place / "cause.json").write_bytes(orjson.dumps(cause))
        (place / "engine-log-tail.txt").write_text(cleaner.text(case.log), "utf-8")
        for shape in case.shapes:
            facts = dataclasses.asdict(shape) | {"response_status": shape.status}
            stem = f"c{shape.conversation:04}-t{shape.turn:05}"
            (place / f"{stem}.json").write_bytes(orjson.dumps(facts))
            (place / f"{stem}-request.json").write_bytes(
                orjson.dumps(
                    {
                        "messages": [{"role": role} for role, count in shape.messages.items() for _ in range(count)],
                        "max_tokens": shape.max_tokens,
                        "stream": shape.stream,
                        **({"tools": [{}] * shape.tools} if shape.tools is not None else {}),
                    }
                )
            )
        samples = [
            _samples(name, n, value)
            for one in case.samples
            for name in [one.name]
            for n, value in enumerate(one.values)
        ]
        (place / "samples.jsonl").write_bytes(b"".join(samples))


def _samples(name: str, number: int, value: float) -> bytes:
    source, _, figure = name.partition(".")
    event = {"time": 0.0, "mono": float(number), "source": source, "values": {figure: value}, "kind": "sample"}
    return orjson.dumps(event) + b"\n"


def _pretty(data: Any) -> bytes:
    return orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
