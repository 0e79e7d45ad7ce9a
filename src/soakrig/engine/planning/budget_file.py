"""The budget of one engine on one card, in TOML: who owns memory, what a slot costs, how long a step takes.

Every amount has a unit and a ``kind`` (measured, derived, modelled, uncontrolled), so that none passes for another.
``docs/planning.md`` has the tables and a whole example.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self, get_args, get_origin

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from soakrig.errors import UsageError

from .ledger import Ledger, Pool, SlotPrice, slot_pools
from .levers import Curve, Lever, OperatingPoint
from .quantity import Figure, Kind, parse_bytes, parse_figure
from .steptime import StepModel

SCHEMA = "soakrig.budget/1"


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Amount(_Table):
    amount: str
    kind: Kind
    source: str = ""


class _Pool(_Table):
    name: Annotated[str, Field(min_length=1)]
    amount: str | None = None
    each: str | None = None
    count: Annotated[int, Field(ge=1)] | None = None
    log: Literal["weights", "kv", "graphs"] | None = None
    kind: Kind = "derived"
    source: str = ""
    role: Literal["kv", ""] = ""
    dtype: str = ""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = (self.amount is not None, self.each is not None and self.count is not None, self.log is not None)
        if sum(ways) != 1 or (self.each is None) != (self.count is None):
            raise ValueError("either amount, or each and count, or log (a line of --engine-log) was expected")
        if self.amount is not None and "kind" not in self.model_fields_set:
            raise ValueError("an amount was given without its kind")
        return self


class _Slots(_Table):
    count: Annotated[int, Field(ge=0)]
    layers: Annotated[int, Field(ge=1)]
    weights: str
    scales: str = "0 B"
    kind: Kind = "derived"
    source: str = ""


class _Step(_Table):
    fixed: str | None = None
    per_row: str | None = None
    points: list[tuple[float, str]] = []
    kind: Kind = "measured"
    link: str | None = None
    row: str | None = None
    misses: Annotated[float, Field(ge=0)] | None = None
    accesses: Annotated[float, Field(gt=0)] | None = None
    tokens_per_second: Annotated[float, Field(gt=0)] | None = None
    tokens_per_step: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        given = self.fixed is not None and self.per_row is not None
        if given == bool(self.points) or (self.fixed is None) != (self.per_row is None):
            raise ValueError("either fixed and per_row, or points of [missed rows, time] was expected")
        if self.tokens_per_second is not None and self.tokens_per_step is not None:
            raise ValueError("tokens_per_second and tokens_per_step say the same; give one")
        return self


class _Curve(_Table):
    points: list[tuple[float, float]] = []
    slope: float | None = None
    kind: Kind = "measured"


class _Lever(_Table):
    name: Annotated[str, Field(min_length=1)]
    frees: str
    scaleless: bool = False


class _File(_Table):
    schema_: Literal["soakrig.budget/1"] = Field(alias="schema")
    device: str = ""
    capacity: _Amount | None = None
    free: _Amount | None = None
    slots: _Slots | None = None
    pool: list[_Pool] = []
    step: _Step | None = None
    curve: _Curve | None = None
    lever: list[_Lever] = []


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget file, read: its ``ledger``, and what levers need, None where the file does not say it. ``link``: B/s,
    ``row``: B/row that a miss fetches."""

    device: str
    ledger: Ledger
    model: StepModel | None
    now: OperatingPoint | None
    curve: Curve | None
    slope: float | None
    link: Figure | None
    row: Figure | None
    levers: tuple[Lever, ...]


def read_budget(
    path: str,
    log: Mapping[str, Figure] | None = None,
    nvml: tuple[Figure, Figure] | None = None,
) -> Budget:
    """Read a budget; ``log``: amounts of an engine's log by name; ``nvml``: capacity and free, instead of the file's.

    Raises UsageError for unknown keys with the nearest known one, for amounts without a unit or with two readings, for
    a sum above the capacity, and for a price of a row that the link cannot carry.
    """
    file = _read(path)
    capacity, free = nvml or (_amount(file.capacity, path, "capacity"), _amount(file.free, path, "free"))
    price = None
    if file.slots is not None:
        weights, scales = (
            parse_bytes(text, file.slots.kind, file.slots.source, what=f"{path}: slots.{name}")
            for name, text in (("weights", file.slots.weights), ("scales", file.slots.scales))
        )
        price = SlotPrice(weights, scales)
    pools = [_pool(pool, path, log or {}) for pool in file.pool]
    count, layers = (0, 0) if file.slots is None else (file.slots.count, file.slots.layers)
    if price is not None:
        pools = [*slot_pools(count, price), *pools]
    ledger = Ledger(capacity, free, tuple(pools), count, price, layers)
    levers = tuple(
        Lever(one.name, parse_bytes(one.frees, "derived", one.name, what=f"{path}: lever {one.name}"), one.scaleless)
        for one in file.lever
    )
    curve = _curve(file.curve) if file.curve is not None and file.curve.points else None
    slope = None if file.curve is None else file.curve.slope
    step = file.step
    if step is None:
        return Budget(file.device, ledger, None, None, curve, slope, None, None, levers)
    model = _model(step, path)
    link = None if step.link is None else parse_figure(step.link, "GB/s", step.kind, what=f"{path}: step.link")
    row = _row(step, price, path)
    if link is not None and row is not None:
        model.check_link(row, link)
    now = _now(step, model, count, layers)
    return Budget(file.device, ledger, model, now, curve, slope, link, row, levers)


def _read(path: str) -> _File:
    remedy = f"write it as docs/planning.md has it, with schema = {SCHEMA!r}"
    try:
        data = tomllib.loads(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", remedy="give a budget in TOML") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}", remedy=remedy) from error
    try:
        return _File.model_validate_json(orjson.dumps(data))
    except ValidationError as error:
        raise UsageError(f"{path} is no budget: {_wrong(error)}", remedy=remedy) from error


def _wrong(error: ValidationError) -> str:
    found: list[str] = []
    for one in error.errors()[:3]:
        place = ".".join(str(part) for part in one["loc"])
        if one["type"] == "extra_forbidden":
            known = _keys_at(one["loc"][:-1])
            near = difflib.get_close_matches(str(one["loc"][-1]), known, n=1, cutoff=0.5)
            hint = f"{near[0]!r} was probably meant" if near else f"known: {', '.join(known)}"
            found.append(f"{place}: an unknown key; {hint}")
        else:
            read = "" if isinstance(one["input"], dict | list | tuple) else f" (read: {one['input']!r})"
            found.append(f"{place}: {one['msg']}{read}")
    return "; ".join(found)


def _keys_at(place: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at a place of the file."""
    table: type[BaseModel] = _File
    for part in place:
        if isinstance(part, int):
            continue
        field = next(field for name, field in table.model_fields.items() if (field.alias or name) == part)
        options = [field.annotation, *get_args(field.annotation)]
        found = [
            one for one in options if isinstance(one, type) and get_origin(one) is None and issubclass(one, BaseModel)
        ]
        table = found[0] if found else table
    return [field.alias or name for name, field in table.model_fields.items()]


def _amount(table: _Amount | None, path: str, name: str) -> Figure:
    if table is None:
        raise UsageError(
            f"{path} has no [{name}]", remedy=f"add [{name}] with amount, kind and source, or give --nvml INDEX"
        )
    return parse_bytes(table.amount, table.kind, table.source, what=f"{path}: {name}")


def _pool(pool: _Pool, path: str, log: Mapping[str, Figure]) -> Pool:
    what = f"{path}: pool {pool.name!r}"
    if pool.amount is not None:
        amount = parse_bytes(pool.amount, pool.kind, pool.source, what=what)
    elif pool.each is not None and pool.count is not None:
        source = pool.source or f"{pool.count} x {pool.each}"
        amount = (parse_bytes(pool.each, pool.kind, what=what) * pool.count).labelled(source)
    elif pool.log is not None and pool.log in log:
        amount = log[pool.log]
    else:
        have = f"it has {', '.join(sorted(log))}" if log else "none was given"
        raise UsageError(
            f"{what} is to come from the engine log's line on {pool.log}, and {have}", remedy="give --engine-log FILE"
        )
    return Pool(pool.name, amount, pool.role, pool.dtype)


def _curve(table: _Curve) -> Curve:
    points = sorted(table.points)
    return Curve(tuple(slots for slots, _ in points), tuple(misses for _, misses in points), table.kind)


def _model(step: _Step, path: str) -> StepModel:
    if step.fixed is not None and step.per_row is not None:
        return StepModel(
            parse_figure(step.fixed, "ms/step", step.kind, what=f"{path}: step.fixed"),
            parse_figure(step.per_row, "ms/row", step.kind, what=f"{path}: step.per_row"),
        )
    return StepModel.fit(
        [
            (
                Figure.of(rows, "row/step", step.kind),
                parse_figure(time, "ms/step", step.kind, what=f"{path}: step.points"),
            )
            for rows, time in step.points
        ]
    )


def _row(step: _Step, price: SlotPrice | None, path: str) -> Figure | None:
    if step.row is not None:
        return parse_bytes(step.row, step.kind, what=f"{path}: step.row") / Figure.of(1, "row")
    return None if price is None else price.whole / Figure.of(1, "row")


def _now(step: _Step, model: StepModel, slots: int, layers: int) -> OperatingPoint | None:
    if step.misses is None or step.accesses is None or not slots or not layers:
        return None
    time = model.step(Figure.of(step.misses * layers, "row/step"))
    if step.tokens_per_second is not None:
        tokens = Figure.of(step.tokens_per_second, "token/s", step.kind) * time
    else:
        tokens = Figure.of(step.tokens_per_step or 1.0, "token/step", step.kind)
    return OperatingPoint(slots, layers, step.misses, step.accesses, tokens)
