"""The three-valued verdict and how parts of one compose."""

from __future__ import annotations

from dataclasses import dataclass, field

from soakrig.record.result import VerdictName

_RANK: dict[VerdictName, int] = {"pass": 0, "inconclusive": 1, "fail": 2}


@dataclass
class Verdict:
    """Starts as a pass and can only get worse: unknown beats pass, fail beats unknown.

    Reasons of the final kind come first; a fail still lists what could not be seen.
    """

    name: VerdictName = "pass"
    _reasons: list[tuple[VerdictName, str]] = field(default_factory=list[tuple[VerdictName, str]])

    def fail(self, reason: str) -> None:
        self._add("fail", reason)

    def unknown(self, reason: str) -> None:
        self._add("inconclusive", reason)

    def remark(self, reason: str) -> None:
        """A reason that does not change the verdict (a bound, a leniency that was used)."""
        self._add("pass", reason)

    @property
    def reasons(self) -> list[str]:
        """Worst first, else in the order in which they were found."""
        return [text for _, text in sorted(self._reasons, key=lambda item: -_RANK[item[0]])]

    @property
    def unknowns(self) -> list[str]:
        """What could not be seen or done, also where the verdict is fail."""
        return [text for name, text in self._reasons if name == "inconclusive"]

    def _add(self, name: VerdictName, reason: str) -> None:
        self._reasons.append((name, reason))
        if _RANK[name] > _RANK[self.name]:
            self.name = name
