"""What a measurement leaves on disk: its plan, every observation as it came, and what they came to.

``measure.json``, ``observations.jsonl``, ``measurement.json`` and the engines' logs in a folder of their own under the
runs folder. The result can be derived again from the observations alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from soakrig.errors import RecordError, StoreError
from soakrig.record.store import new_run_id, write_private

PLAN, OBSERVATIONS, MEASUREMENT = "measure.json", "observations.jsonl", "measurement.json"


class MeasureFolder:
    """Writes one measurement. A context manager. Raises ``StoreError`` where the disk takes no more."""

    def __init__(self, runs_dir: Path, kind: str, plan: dict[str, Any]) -> None:
        self.path = runs_dir / new_run_id(f"measure-{kind}")
        try:
            self.path.mkdir(mode=0o700, parents=True)
            self._fd = os.open(self.path / OBSERVATIONS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            self._write(PLAN, {"schema": 1, "measures": kind, **plan})
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def observe(self, observation: dict[str, Any]) -> None:
        """Append one observation; on disk when this returns."""
        try:
            os.write(self._fd, orjson.dumps(observation, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
            os.fdatasync(self._fd)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def finish(self, result: dict[str, Any]) -> None:
        """Write what it came to."""
        try:
            self._write(MEASUREMENT, result)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def _write(self, name: str, data: dict[str, Any]) -> None:
        write_private(self.path / name, orjson.dumps(data, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))

    def __enter__(self) -> MeasureFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)


def read_plan(folder: Path) -> dict[str, Any]:
    """The plan of a measurement. Raises ``RecordError`` where the folder is none."""
    try:
        plan = orjson.loads((folder / PLAN).read_bytes())
        return {**plan, "measures": str(plan["measures"])}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise RecordError(
            f"{folder} is no measurement: {PLAN} cannot be read ({error})",
            remedy="Give a folder that `soak measure` has made.",
        ) from error


def read_observations(folder: Path) -> Iterator[dict[str, Any]]:
    """Every whole observation; a cut last line ends the reading. Raises ``RecordError``."""
    try:
        stream = (folder / OBSERVATIONS).open("rb")
    except OSError as error:
        raise RecordError(f"{folder / OBSERVATIONS} cannot be read: {error.strerror}") from error
    with stream:
        for number, line in enumerate(stream, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield orjson.loads(line)
            except orjson.JSONDecodeError as error:
                raise RecordError(f"{OBSERVATIONS} line {number} is no JSON: {error}") from error


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(f"cannot write {path}: {error.strerror}", remedy="Free space or give another --runs-dir.")
