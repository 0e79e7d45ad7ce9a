"""Traces as the planner takes them: an engine's own file, or raw int16 ids whose shape the caller has to say.

Raw (``.i16``): rows of little-endian int16, one a token, layer by layer, ``top_k`` ids each, -1 where nothing was
routed; nothing else. It says neither where steps begin nor what was prefill, so the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from soakrig.engine.offload.plan import STAGING_ROWS
from soakrig.engine.offload.trace import DECODE, MAGIC, PADDING, PREFILL, SENTINEL, Trace, TraceHeader, read_trace
from soakrig.errors import UsageError

_ID = np.dtype("<i2")
_PIECE_ROWS = 4096
SAMPLED_TOKENS = 4000
"""Tokens of one layer that are compared when the period of a raw file is looked for."""
LEAST_TOKENS = 2000
LONGEST_PERIOD = 200
LEAST_OVERLAP, MANY_DEVIATIONS = 0.02, 12.0
"""How far a period has to stand out: in shared experts, and in median deviations of all the lags."""
MOST_EXPERTS = 2**15 - 1


@dataclass(frozen=True, slots=True)
class TraceShape:
    """What the caller says of a trace. All three are needed for a raw file; for an engine's they have to agree.

    ``rows_per_step``: tokens of one engine step in a raw file (2 with one speculative token).
    """

    layers: int | None = None
    top_k: int | None = None
    experts: int | None = None
    rows_per_step: int = 1


@dataclass(frozen=True, slots=True)
class PlannedTrace:
    """A trace to replay, and ``notes`` on what looks odd in it."""

    path: str
    trace: Trace
    notes: tuple[str, ...] = ()
    left_out: int = 0
    """Rows of a torn last step that are in the file and not in ``trace``."""

    @property
    def rows(self) -> dict[str, int]:
        """Rows by kind, those of the last torn step apart: ``decode``, ``prefill``, ``padding``, ``left_out``."""
        marks = self.trace.marks
        names = {"decode": DECODE, "prefill": PREFILL, "padding": PADDING}
        return {**{name: int((marks == mark).sum()) for name, mark in names.items()}, "left_out": self.left_out}


def open_trace(path: str, shape: TraceShape | None = None, *, allow_torn: bool = False) -> PlannedTrace:
    """Map a trace into memory; a file that begins with the engine's magic is the engine's, any other is raw.

    Raises UsageError for a size that is no whole number of rows (``allow_torn``: an engine's torn last step is left
    out instead), for ids out of range with row and layer, and where ``shape`` contradicts the file.
    """
    shape = shape or TraceShape()
    for name in ("layers", "top_k", "experts", "rows_per_step"):
        value = getattr(shape, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} {value}: 1 or more was expected", remedy="give a count")
    try:
        with Path(path).open("rb") as file:
            own = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a routing trace") from error
    return _engines(path, shape, allow_torn=allow_torn) if own else _raw(path, shape)


def only_layers(planned: PlannedTrace, layers: list[int]) -> PlannedTrace:
    """The same rows with these layers alone. Raises UsageError naming one that the trace does not have."""
    header = planned.trace.header
    missing = [layer for layer in layers if layer not in header.layers]
    if missing or not layers:
        raise UsageError(
            f"{planned.path} has no layer {missing or 'at all to keep'}; it has {header.layers[0]} to "
            f"{header.layers[-1]}, {len(header.layers)} of them",
            remedy="name layers of the trace",
        )
    places = [header.layers.index(layer) for layer in layers]
    ids = planned.trace.ids
    whole = places == list(range(places[0], places[-1] + 1))
    kept = ids[:, places[0] : places[-1] + 1] if whole else ids[:, places]
    trace = replace(planned.trace, header=replace(header, layers=tuple(layers), plan=None), ids=kept)
    return replace(planned, trace=trace)


def split_trace(trace: Trace, share: float) -> tuple[Trace, Trace]:
    """The first ``share`` of the steps, and the rest: what is fitted on one is judged on the other.

    Raises UsageError where one of them would be empty.
    """
    starts = np.flatnonzero(trace.first)
    cut = round(share * len(starts))
    if not 0 < cut < len(starts):
        raise UsageError(
            f"{share:g} of {len(starts)} steps leaves nothing to fit on or nothing to judge by",
            remedy="give a share between 0 and 1, and a longer trace",
        )
    row = int(starts[cut])
    return _part(trace, slice(0, row)), _part(trace, slice(row, None))


def small_steps(trace: Trace) -> Trace:
    """The steps of at most 64 routed ids a layer alone: those in which a cache policy acts."""
    starts = np.append(np.flatnonzero(trace.first), len(trace.first))
    small = np.diff(starts) * trace.header.top_k <= STAGING_ROWS
    if small.all():
        return trace
    rows = np.repeat(small, np.diff(starts))
    return replace(trace, marks=trace.marks[rows], first=trace.first[rows], ids=trace.ids[rows])


def _part(trace: Trace, rows: slice) -> Trace:
    return replace(trace, marks=trace.marks[rows], first=trace.first[rows], ids=trace.ids[rows], torn_bytes=0)


def _engines(path: str, shape: TraceShape, *, allow_torn: bool) -> PlannedTrace:
    trace = read_trace(path)
    header = trace.header
    said = {"--layers": shape.layers, "--top-k": shape.top_k, "--experts": shape.experts}
    found = {"--layers": len(header.layers), "--top-k": header.top_k, "--experts": header.experts}
    wrong = [name for name, value in said.items() if value not in (None, found[name])]
    if wrong:
        raise UsageError(
            f"{path} was written with {', '.join(f'{name} {found[name]}' for name in wrong)}, and "
            f"{', '.join(f'{said[name]}' for name in wrong)} was given",
            remedy="leave them out: the file's header says it",
        )
    if shape.rows_per_step != 1:
        raise UsageError(
            f"{path} marks its own steps, and --rows-per-step {shape.rows_per_step} was given", remedy="leave it out"
        )
    if not trace.torn_bytes:
        return PlannedTrace(path, trace)
    size = Path(path).stat().st_size
    if not allow_torn:
        raise UsageError(
            f"{path} is cut off: {size:,} bytes, of which the last {trace.torn_bytes} are no whole row of "
            f"{header.row_bytes}",
            remedy="take the trace anew, or give --allow-torn to leave its last step out",
        )
    last = int(np.flatnonzero(trace.first)[-1]) if trace.first.any() else 0
    left = len(trace.first) - last
    return PlannedTrace(
        path, _part(trace, slice(0, last)), (f"the last step, cut off, was left out ({left} rows)",), left
    )


def _raw(path: str, shape: TraceShape) -> PlannedTrace:
    layers, top_k, experts = shape.layers, shape.top_k, shape.experts
    if layers is None or top_k is None or experts is None:
        raise UsageError(
            f"{path} has no header (an engine's trace begins with {MAGIC!r}): its shape has to be said",
            remedy="give --layers, --top-k and --experts, or a file that VLLM_MOE_ROUTING_TRACE named",
        )
    if experts > MOST_EXPERTS or top_k > experts:
        raise UsageError(
            f"--experts {experts}, --top-k {top_k}: at most {MOST_EXPERTS} experts, and no more ids than experts, fit "
            "16-bit ids",
            remedy="give the model's own numbers",
        )
    size, row_bytes = Path(path).stat().st_size, layers * top_k * _ID.itemsize
    rows, over = divmod(size, row_bytes)
    if over or not rows:
        raise UsageError(
            f"{path} has {size:,} bytes: {rows:,} rows of {layers} layers x {top_k} ids x 2 bytes = {row_bytes:,}, and "
            f"{over} bytes over; whole rows, at least one, were expected",
            remedy=_dividing(size, layers, top_k),
        )
    ids: NDArray[np.int16] = np.asarray(np.memmap(path, dtype=_ID, mode="r", shape=(rows, layers, top_k)))
    _check_ids(path, ids, experts)
    first = np.zeros(rows, dtype=np.bool_)
    first[:: shape.rows_per_step] = True
    header = TraceHeader(Path(path).name, experts, tuple(range(layers)), top_k)
    trace = Trace(header, np.zeros(rows, dtype=np.uint8), first, ids, 0)
    notes = _oddities(path, ids)
    if rows % shape.rows_per_step:
        notes.append(f"the last step has {rows % shape.rows_per_step} of {shape.rows_per_step} rows")
    return PlannedTrace(path, trace, tuple(notes))


def _dividing(size: int, layers: int, top_k: int) -> str:
    near = [n for n in range(max(1, layers - 8), layers + 9) if size % (n * top_k * _ID.itemsize) == 0]
    if near:
        return f"the size fits --layers {', '.join(map(str, near))} at --top-k {top_k}; or the file is cut off"
    return "the file is cut off, or --layers or --top-k is not that of the model"


def _check_ids(path: str, ids: NDArray[np.int16], experts: int) -> None:
    for start in range(0, len(ids), _PIECE_ROWS):
        piece = ids[start : start + _PIECE_ROWS]
        if piece.min() >= SENTINEL and piece.max() < experts:
            continue
        row, layer, at = np.argwhere((piece < SENTINEL) | (piece >= experts))[0]
        raise UsageError(
            f"{path}: row {start + row}, layer {layer}: id {piece[row, layer, at]}; {SENTINEL} to {experts - 1} was "
            "expected",
            remedy="check --experts, --layers and --top-k against the model, or take the trace anew",
        )


def _oddities(path: str, ids: NDArray[np.int16]) -> list[str]:
    """Notes on a raw trace. Raises UsageError where ids repeat with a period that the layers given cannot have."""
    rows, layers, top_k = ids.shape
    notes: list[str] = []
    sample = ids[:: max(1, rows // SAMPLED_TOKENS)].reshape(-1, top_k)
    ordered = np.sort(sample, axis=1)
    doubled = float(((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(axis=1).mean())
    if doubled > 0:
        notes.append(f"{doubled:.1%} of tokens name one expert twice in a layer: is --top-k {top_k} right?")
    period = repeats_after(ids)
    if period and layers % period:
        raise UsageError(
            f"{path}: the ids repeat themselves every {period} groups of {top_k}, and --layers {layers} was given: "
            "with that, one column would hold the ids of several layers",
            remedy=f"give --layers {period}, or check --top-k",
        )
    if period and layers != period:
        notes.append(f"the ids repeat themselves every {period} groups: is --layers {layers} right?")
    return notes


def repeats_after(ids: NDArray[np.int16]) -> int:
    """After how many groups of ``top_k`` ids the same experts come back, as they do a token later in the same layer;
    0 where no number stands out (too short, or without skew and locality).
    """
    groups = ids.reshape(-1, ids.shape[2])
    longest = min(max(LONGEST_PERIOD, 2 * ids.shape[1]), len(groups) // 4)
    if len(groups) < LEAST_TOKENS or longest < 3:
        return 0
    starts = np.random.default_rng(0).integers(0, len(groups) - longest, size=SAMPLED_TOKENS)
    here = groups[starts][:, :, None]
    valid = here >= 0
    overlap = np.array(
        [((here == groups[starts + lag][:, None, :]) & valid).sum() for lag in range(1, longest + 1)], dtype=np.float64
    ) / max(int(valid.sum()), 1)
    usual, most = float(np.median(overlap)), float(overlap.max())
    noise = float(np.median(np.abs(overlap - usual)))
    if most - usual < max(LEAST_OVERLAP, MANY_DEVIATIONS * noise):
        return 0
    return int(np.flatnonzero(overlap >= usual + 0.7 * (most - usual))[0]) + 1
