"""Driver and CUDA versions that are known to be bad for the card (versions.toml has the list and its sources)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict

from soakrig.engine.preflight.finding import Finding, ok, refused, unknown
from soakrig.engine.preflight.gpu import cards_of, wants_gpu
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import Entry
from soakrig.engine.vllm.installation import Installation

TABLE = Path(__file__).with_name("versions.toml")
_DIST = re.compile(r"^(?P<name>torch|nvidia_cuda_runtime(?:_cu\d+)?)-(?P<version>[^-]+)\.dist-info$")
_LOCAL = re.compile(r"\+cu(?P<major>\d\d)(?P<minor>\d)")


class Bad(BaseModel):
    """One row of versions.toml."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    cards: str = ""
    driver: str = ""
    cuda: str = ""
    why: str
    remedy: str
    source: str


@dataclass(frozen=True, slots=True)
class Versions:
    """What is installed; None where it could not be told."""

    driver: str | None
    cuda: str | None


@cache
def table() -> tuple[Bad, ...]:
    """The rows of versions.toml."""
    rows = tomllib.loads(TABLE.read_text("utf-8"))["bad"]
    return tuple(Bad.model_validate(row) for row in rows)


def check_versions(entry: Entry, machine: Machine) -> Finding:
    """The card, the driver, and the CUDA that the engine was built for, against the table."""
    name = "versions"
    if not wants_gpu(entry, machine):
        return ok(name, "it computes on the CPU")
    cards = cards_of(entry, machine)
    if isinstance(cards, str):
        return unknown(name, cards)
    found = Versions(driver_version(machine), cuda_version(machine.installation))
    names = sorted({card.name for card in cards})
    text = f"{', '.join(names)}, driver {found.driver or '?'}, CUDA {found.cuda or '?'}"
    for row in table():
        if any(_fits(row, one, found) for one in names):
            ranges = [f"{what} {one}" for what, one in (("driver", row.driver), ("CUDA", row.cuda)) if one]
            return refused(name, f"{text}; {' with '.join(ranges)}: {row.why} ({row.source})", row.remedy)
    missing = [what for what, value in (("driver", found.driver), ("CUDA", found.cuda)) if value is None]
    if missing:
        return unknown(name, f"{text}: the version of {' and '.join(missing)} could not be told")
    return ok(name, f"{text}: nothing bad is known")


def _fits(row: Bad, card: str, found: Versions) -> bool:
    if row.cards and not re.search(row.cards, card):
        return False
    for wanted, has in ((row.driver, found.driver), (row.cuda, found.cuda)):
        if not wanted:
            continue
        try:
            if has is None or Version(has) not in SpecifierSet(wanted):
                return False
        except InvalidVersion:
            return False
    return True


def driver_version(machine: Machine) -> str | None:
    """As NVML told, else as the kernel module says (sys/module/nvidia/version)."""
    if machine.gpu.driver:
        return machine.gpu.driver
    try:
        return (machine.sys / "module/nvidia/version").read_text().strip() or None
    except OSError:
        return None


def cuda_version(installation: Installation | str | None) -> str | None:
    """The CUDA that the engine's torch was built for, by the names of its installed distributions: ``torch-2.9+cu130``
    or, where torch says nothing, the runtime that it brought along (``nvidia_cuda_runtime``)."""
    if not isinstance(installation, Installation):
        return None
    found = dict(_distributions(installation.python))
    local = _LOCAL.search(found.get("torch", ""))
    if local:
        return f"{local['major']}.{local['minor']}"
    runtime = next((version for name, version in sorted(found.items()) if name != "torch"), None)
    return ".".join(runtime.split(".")[:2]) if runtime else None


def _distributions(python: Path) -> Iterator[tuple[str, str]]:
    folders: Sequence[Path] = sorted(python.parents[1].glob("lib*/python3*/site-packages"))
    for folder in folders:
        for path in folder.glob("*.dist-info"):
            if match := _DIST.match(path.name):
                yield match["name"], match["version"]
