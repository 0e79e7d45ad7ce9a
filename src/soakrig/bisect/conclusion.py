"""What the arms of a campaign say together, in two sentences, and what they do not say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from soakrig.bisect.drift import drift_p
from soakrig.bisect.evidence import Evidence, Role
from soakrig.bisect.verdicts import Rule, Verdict

ConclusionKind = Literal[
    "no_baseline", "not_in_list", "single", "necessary", "both_needed", "either", "pair", "reduced", "none", "unclear",
    "undecided",
]  # fmt: skip

DRIFT_TOLD = 0.05


@dataclass(frozen=True)
class Conclusion:
    """``variables``: those that the sentence speaks of as the cause or part of it; ``not_said``: one sentence each."""

    kind: ConclusionKind
    text: str
    variables: tuple[str, ...]
    not_said: tuple[str, ...]


def conclude(evidence: Evidence, verdicts: Mapping[str, Verdict], rule: Rule) -> Conclusion:
    """Read-out of a campaign from the verdicts of its arms (``verdicts.judge``).

    Changing one variable says whether it is needed for the fault; putting one back with all others off, whether it
    is enough. Needed and enough: it is the cause. Two needed and none enough: both together. None needed and two
    enough: either of them.
    """
    kind, text, variables = _read_out(evidence, verdicts, rule)
    return Conclusion(kind, text, variables, tuple(_not_said(evidence, verdicts, kind)))


def _read_out(
    evidence: Evidence, verdicts: Mapping[str, Verdict], rule: Rule
) -> tuple[ConclusionKind, str, tuple[str, ...]]:
    seen = max(evidence.control_faults.values(), default=0)
    if seen < rule.min_control_faults:
        text = f"The control faulted {seen} times; below {rule.min_control_faults} faults no arm is judged clean. "
        return "no_baseline", text + "More runs of the control come first.", ()

    off = _of(verdicts, "all_off")
    if any(one.word == "FAULTS" and one.settled for one in off):
        text = "The fault comes with every variable off: the cause is not in the list, or not in the list alone. "
        return "not_in_list", text + "Look outside these variables: driver, hardware, another setting.", ()

    singles, backs = _of(verdicts, "one"), _of(verdicts, "add_back")
    cleared = _variables(singles, "CLEARED")
    reduced = _variables(singles, "REDUCED")
    # one late fault may be what the lowered hazard of all off still brings: settled means that it is not lowered
    enough = tuple(name for one in backs if one.word == "FAULTS" and one.settled for name in one.arm.variables)
    tried = {name for one in backs if one.runs for name in one.arm.variables}
    open_ones = [one for one in singles if one.word in ("UNDECIDED", "VOID") or not one.settled]
    rest = f" {len(open_ones)} of {len(singles)} variables are undecided." if open_ones else ""

    if cleared:
        if not backs and not off and len(cleared) == 1:
            text = f"Changed alone, {_claims(singles)}. "
            text += "It is the only variable, so put back it is the control, which faults: needed, and enough for it."
            return "single", text, cleared
        return _needed(singles, cleared, reduced, enough, tried, rest)
    if reduced:
        text = f"Changing {_names(reduced)} lowers the hazard, and the fault still comes. "
        text += "That is a change of the rate, by part of the cause or by timing."
        back = tuple(name for name in reduced if name in enough)
        text += (f" Put back alone, {_names(back)} brings it at the old rate." if back else "") + rest
        return "reduced", text, reduced
    if open_ones or not singles:
        return "undecided", f"No variable is CLEARED or REDUCED yet.{rest or ' None was tried.'}", ()
    pairs = [one for one in _of(verdicts, "pair") if one.word == "FAULTS"]
    if not off or not any(one.runs for one in off):
        text = "Every variable still faults when it alone is changed. "
        return "none", text + "Whether the cause is in the list at all needs the all-off arm.", ()
    if not any(one.word in ("CLEARED", "REDUCED") for one in off):
        text = "No single change stops the fault, and with every variable off it was seldom or not seen. "
        return "unclear", text + "That is not yet enough to say that the cause is in the list.", ()
    if len(enough) > 1 and set(enough) >= tried:
        text = f"No single change stops the fault, and every variable put back alone brings it ({_names(enough)}). "
        return "unclear", text + "Then all off should fault as well: more runs of it, or a cause outside.", enough
    if len(enough) > 1:
        text = f"No single change stops the fault, and it comes back with any of {_names(enough)} alone. "
        return "either", text + "They are causes of their own; change them together.", enough
    pairs = [one for one in _of(verdicts, "pair") if one.word == "FAULTS" and one.settled]
    if not enough and pairs:
        names = pairs[0].arm.variables
        text = f"No single change stops the fault; with all off but {_names(names)} it comes. "
        return "pair", text + "The pair is enough for it.", names
    text = "No single change stops the fault, yet all of them together do. "
    return "unclear", text + "Several causes, or one that another variable hides: try pairs.", enough


def _needed(
    singles: list[Verdict], cleared: tuple[str, ...], reduced: tuple[str, ...], enough: tuple[str, ...],
    tried: set[str], rest: str,
) -> tuple[ConclusionKind, str, tuple[str, ...]]:  # fmt: skip
    claims = _claims(singles)
    also = f" {_names(reduced)} REDUCED it." if reduced else ""
    first = f"Changed alone, {claims}."
    if len(cleared) == 1:
        if cleared[0] in enough:
            text = f"{first} Put back alone, the fault returns: needed, and enough for it."
            return "single", text + also + rest, cleared
        if cleared[0] in tried:
            text = f"{first} Put back alone, the fault has not returned: it needs a partner, or more runs."
            return "necessary", text + also + rest, cleared
        return "necessary", f"{first} Whether it is enough for the fault was not tried." + also + rest, cleared
    if not set(cleared) & set(enough):
        text = f"{first} Each is needed; none was seen to be enough alone."
        return "both_needed", text + also + rest, cleared
    text = f"{first} Yet {_names(tuple(n for n in cleared if n in enough))} alone brings it back, which one cause each"
    return "unclear", text + " does not explain: look for a variable that only hides the fault." + also + rest, cleared


def _claims(singles: list[Verdict]) -> str:
    return "; ".join(
        f"{_names(one.arm.variables)} is {one.claim} ({one.exposure:g} clean, posterior {one.posterior or 0:.3f})"
        for one in singles
        if one.word == "CLEARED"
    )


def _of(verdicts: Mapping[str, Verdict], role: Role) -> list[Verdict]:
    return [one for one in verdicts.values() if one.arm.role == role]


def _variables(verdicts: list[Verdict], word: str) -> tuple[str, ...]:
    # A variable may have several values, each an arm of its own.
    return tuple(dict.fromkeys(name for one in verdicts if one.word == word for name in one.arm.variables))


def _names(names: tuple[str, ...]) -> str:
    return " and ".join(names)


def _not_said(evidence: Evidence, verdicts: Mapping[str, Verdict], kind: ConclusionKind) -> list[str]:
    said = ["Nothing about another load, cap, host, driver or engine build than the one that ran."]
    if any(one.word == "CLEARED" for one in verdicts.values()):
        said.append("Not that the fault is gone: a hazard lower than by the stated factor would have looked the same.")
        said.append("Not by which mechanism: a variable that shifts timing or memory layout can hide a fault.")
    clean = [one.arm.name for one in verdicts.values() if one.word == "UNDECIDED" and one.runs]
    if clean:
        said.append(f"Nothing against the fault in {', '.join(clean)}: clean so far is not cleared.")
    void = [one.arm.name for one in verdicts.values() if one.word == "VOID"]
    if void:
        said.append(f"Nothing of {', '.join(void)}: no run of it counts.")
    if kind in ("not_in_list", "none"):
        said.append("Not that these variables do nothing: two causes, or one outside, would look the same.")
    p = drift_p(evidence)
    if p is not None and p < DRIFT_TOLD:
        said.append(
            f"Not that the host stood still: the control's first and second half differ (p = {p:.2g}). "
            "Arms were compared with controls of their own hours."
        )
    return said
