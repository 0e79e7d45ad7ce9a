"""The routing trace: every routed id of every engine step, as the engine saw them; what the planner replays.

A file is the magic, the header's length (uint32, little-endian), the header (JSON, padded with spaces so that rows
begin at a multiple of 64 bytes), then rows of little-endian int16, one for each row of the engine's flat batch:
``[mark, first, ids...]``. ``mark``: 0 decode, 1 prefill, 2 padding; ``first``: 1 where an engine step begins, else 0;
ids: layer by layer, ``top_k`` each, -1 for a sentinel, -2 for an id that named no expert.
"""

from __future__ import annotations

import fcntl
import io
import os
from collections.abc import Generator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from soakrig.errors import UsageError

from .json_file import JsonFile, as_data, broken, keys
from .plan import MOST_TRACED_EXPERTS, STAGING_ROWS, OffloadPlan

MAGIC = b"SRTRACE1"
SCHEMA = "soakrig.trace/1"
DECODE, PREFILL, PADDING = 0, 1, 2
SENTINEL, BAD_ID = -1, -2
ALIGN = 64
BUFFER_BYTES = 1 << 20
"""Whole steps wait for the next write until so many bytes have come together."""
CHECK_BYTES = 16 << 20
"""How much of a trace is held in memory while its values are checked."""
_ID = np.dtype("<i2")
_LENGTH = np.dtype("<u4")
_PREFIX = len(MAGIC) + _LENGTH.itemsize


class _Header(JsonFile):
    schema_: Literal["soakrig.trace/1"] = Field(alias="schema")
    model: str
    experts: Annotated[int, Field(ge=1, le=MOST_TRACED_EXPERTS)]
    layers: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    top_k: Annotated[int, Field(ge=1)]
    staging_rows: Annotated[int, Field(ge=1)]
    plan: dict[str, Any] | None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if len(set(self.layers)) != len(self.layers):
            raise ValueError(f"a layer is named twice: {self.layers}")
        if self.top_k > self.experts:
            raise ValueError(f"top_k is {self.top_k}, of {self.experts} experts")
        return self


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """What the ids mean: ``layers`` are the numbers of all MoE layers of the model, ``experts`` those of one layer (the
    most of any), ``plan`` how the engine that wrote the trace offloaded them.
    """

    model: str
    experts: int
    layers: tuple[int, ...]
    top_k: int
    staging_rows: int = STAGING_ROWS
    plan: OffloadPlan | None = None

    @classmethod
    def of(cls, plan: OffloadPlan) -> TraceHeader:
        """The header of an engine that runs this plan."""
        layers = plan.model.layers
        return cls(
            plan.model.name,
            max(layer.experts for layer in layers),
            tuple(layer.layer for layer in layers),
            plan.model.top_k,
            plan.staging_rows,
            plan,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the file."""
        return _ID.itemsize * (2 + len(self.layers) * self.top_k)


class TraceWriter:
    """Appends engine steps to a new file (an old one is replaced).

    Only whole steps are written, up to about ``BUFFER_BYTES`` at a time: what a killed engine leaves ends in whole
    steps, unless it was killed within a write. ``flush`` writes what is waiting.

    Raises UsageError for a header that no trace can have; OSError, once, where the file cannot be written. Then the
    trace ends with what was written before: steps behind a gap would read as a whole trace of other traffic.
    """

    def __init__(self, path: str, header: TraceHeader) -> None:
        start = _packed(header)
        self._header = header
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._file = io.FileIO(path, "a+")
        try:
            # Two engines on one file would overwrite each other, and leave what reads as a whole trace.
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            raise UsageError(
                f"the routing trace {path} is being written by another engine",
                remedy="give each engine a file of its own",
            ) from error
        self._file.truncate(0)
        self._end = 0
        self._ended = False
        self._write(start)

    def append(self, marks: NDArray[Any], ids: NDArray[Any]) -> None:
        """One engine step: ``marks`` uint8 [rows], ``ids`` int16 [rows, layers, top_k]. A step without rows leaves
        nothing.

        Raises ValueError for other shapes, marks or ids.
        """
        header = self._header
        shape = (len(marks), len(header.layers), header.top_k)
        if marks.ndim != 1 or ids.shape != shape:
            raise ValueError(f"marks {marks.shape} and ids {ids.shape} of a step; ids {shape} were expected")
        if not len(marks):
            return
        if marks.min() < DECODE or marks.max() > PADDING:
            raise ValueError(f"marks {int(marks.min())} to {int(marks.max())}; {DECODE} to {PADDING} were expected")
        if ids.min() < BAD_ID or ids.max() >= header.experts:
            raise ValueError(
                f"ids {int(ids.min())} to {int(ids.max())}; {BAD_ID} to {header.experts - 1} were expected"
            )
        rows = np.zeros((len(marks), header.row_bytes // _ID.itemsize), dtype=_ID)
        rows[:, 0] = marks
        rows[0, 1] = 1
        rows[:, 2:] = ids.reshape(len(marks), -1)
        if self._ended:
            return
        self._waiting.append(rows.tobytes())
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand what is waiting to the system."""
        data = b"".join(self._waiting)
        self._waiting.clear()
        self._waiting_bytes = 0
        if data:
            self._write(data)

    def close(self) -> None:
        """Flush and close; closing twice is nothing."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            self._ended = True
            # A part of a row in the middle would shift everything behind it.
            self._file.truncate(self._end)
            self._file.seek(self._end)
            raise
        self._end += len(data)


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace as it lies on disk. ``marks`` uint8 [rows], ``first`` bool [rows], ``ids`` int16 [rows, layers, top_k].

    ``torn_bytes``: bytes of a last row that is not whole, left out; the last step may then lack rows.
    """

    header: TraceHeader
    marks: NDArray[np.uint8]
    first: NDArray[np.bool_]
    ids: NDArray[np.int16]
    torn_bytes: int

    def steps(self) -> Generator[tuple[NDArray[np.uint8], NDArray[np.int16]]]:
        """One engine step after another: ``marks`` [rows] and ``ids`` [rows, layers, top_k]."""
        starts = [*np.flatnonzero(self.first).tolist(), len(self.first)]
        for start, stop in pairwise(starts):
            yield self.marks[start:stop], self.ids[start:stop]


def read_trace(path: str) -> Trace:
    """Map a trace into memory; its values are checked once, in pieces.

    Raises UsageError for a header that is not one and for values that no engine wrote, with row and layer.
    """
    header, start = _read_header(path)
    row_bytes = header.row_bytes
    rows, torn = divmod(Path(path).stat().st_size - start, row_bytes)
    shape = (rows, row_bytes // _ID.itemsize)
    # numpy maps no empty range
    mapped = np.memmap(path, dtype=_ID, mode="r", offset=start, shape=shape) if rows else np.empty(shape, dtype=_ID)
    values: NDArray[np.int16] = np.asarray(mapped)
    _check_values(path, header, values)
    return Trace(
        header,
        values[:, 0].astype(np.uint8),
        values[:, 1].astype(np.bool_),
        values[:, 2:].reshape(rows, len(header.layers), header.top_k),
        torn,
    )


def _packed(header: TraceHeader) -> bytes:
    try:
        content = _Header(
            schema=SCHEMA,
            model=header.model,
            experts=header.experts,
            layers=list(header.layers),
            top_k=header.top_k,
            staging_rows=header.staging_rows,
            plan=None if header.plan is None else header.plan.to_json(),
        )
    except ValidationError as error:
        raise UsageError(
            f"no trace can be written of {header.model}: {broken(error)}", remedy="unset VLLM_MOE_ROUTING_TRACE"
        ) from error
    text = orjson.dumps(as_data(content))
    text += b" " * (-(_PREFIX + len(text)) % ALIGN)
    return MAGIC + np.array(len(text), dtype=_LENGTH).tobytes() + text


def _read_header(path: str) -> tuple[TraceHeader, int]:
    """The header, and where rows begin, in bytes."""
    remedy = "give a file that VLLM_MOE_ROUTING_TRACE named"
    try:
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            prefix = file.read(_PREFIX)
            if len(prefix) < _PREFIX or not prefix.startswith(MAGIC):
                raise UsageError(
                    f"{path} is no trace: it begins with {prefix[: len(MAGIC)]!r}, expected {MAGIC!r} and a length",
                    remedy=remedy,
                )
            length = int(np.frombuffer(prefix, dtype=_LENGTH, offset=len(MAGIC))[0])
            start = _PREFIX + length
            if start > size or start % ALIGN:
                raise UsageError(
                    f"{path}: its header claims {length} bytes, so that rows would begin at byte {start} of {size}; "
                    f"a multiple of {ALIGN} within the file was expected",
                    remedy=remedy,
                )
            text = file.read(length)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy=remedy) from error
    try:
        content = _Header.model_validate_json(text)
        plan = None if content.plan is None else OffloadPlan.from_json(content.plan)
    except ValidationError as error:
        raise UsageError(
            f"{path}: its header is none of a trace: {broken(error)}; keys: {', '.join(keys(_Header))}", remedy=remedy
        ) from error
    except UsageError as error:
        raise UsageError(f"{path}: the plan in its header: {error.message}", remedy=remedy) from error
    header = TraceHeader(
        content.model, content.experts, tuple(content.layers), content.top_k, content.staging_rows, plan
    )
    if plan is not None and TraceHeader.of(plan) != header:
        raise UsageError(
            f"{path}: its header speaks of {content.model}, layers {content.layers}, top {content.top_k} of "
            f"{content.experts} experts, and the plan in it of another model",
            remedy=remedy,
        )
    return header, start


def _check_values(path: str, header: TraceHeader, values: NDArray[np.int16]) -> None:
    piece = max(CHECK_BYTES // header.row_bytes, 1)
    for start in range(0, len(values), piece):
        rows = values[start : start + piece]
        for column, name, most in ((0, "mark", PADDING), (1, "first", 1)):
            wrong = np.flatnonzero((rows[:, column] < 0) | (rows[:, column] > most))
            if len(wrong):
                raise UsageError(
                    f"{path}: row {start + wrong[0]}: {name} {rows[wrong[0], column]}; 0 to {most} was expected",
                    remedy="the file is damaged; take the trace anew",
                )
        ids = rows[:, 2:]
        if ids.min() < BAD_ID or ids.max() >= header.experts:
            row, at = np.argwhere((ids < BAD_ID) | (ids >= header.experts))[0]
            raise UsageError(
                f"{path}: row {start + row}, layer {header.layers[at // header.top_k]}: id {ids[row, at]}; "
                f"{BAD_ID} to {header.experts - 1} was expected",
                remedy="the file is damaged; take the trace anew",
            )
    if len(values) and values[0, 1] != 1:
        raise UsageError(
            f"{path}: row 0 begins no step: first is {values[0, 1]}, expected 1",
            remedy="the file is damaged; take the trace anew",
        )
