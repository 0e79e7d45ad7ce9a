"""What a preflight says: ok, refused with both numbers and a remedy, or unknown with the reason."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["ok", "refused", "unknown"]
GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's answer. ``needs`` and ``has``: the two numbers in ``unit``, where the check compares numbers.

    ``unknown`` is never ok: something that had to be seen could not be. ``forced``: refused, and overridden by name.
    """

    name: str
    state: State
    text: str
    remedy: str = ""
    needs: float | None = None
    has: float | None = None
    unit: str = ""
    forced: bool = False

    @property
    def stands(self) -> bool:
        """Whether it stops a launch."""
        return self.state == "refused" and not self.forced

    def to_json(self) -> dict[str, Any]:
        """As plain data, for ``--json`` and for the record of a launch."""
        return asdict(self)


def ok(name: str, text: str, *, needs: float | None = None, has: float | None = None, unit: str = "") -> Finding:
    """The check was made and nothing stands in the way; also where it does not apply, which ``text`` says."""
    return Finding(name, "ok", text, needs=needs, has=has, unit=unit)


def refused(
    name: str, text: str, remedy: str, *, needs: float | None = None, has: float | None = None, unit: str = ""
) -> Finding:
    """The launch would fail or do harm."""
    return Finding(name, "refused", text, remedy, needs, has, unit)


def unknown(name: str, why: str, remedy: str = "") -> Finding:
    """What the check needs could not be seen."""
    return Finding(name, "unknown", why, remedy)


def gib(count: float) -> str:
    """Bytes as GiB for people: ``95.6 GiB``; below one GiB in MiB."""
    return f"{count / GIB:.1f} GiB" if abs(count) >= GIB else f"{count / MIB:.0f} MiB"
