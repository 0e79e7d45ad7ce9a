"""What more hours would buy: the clean work that an open arm still needs, at the pace that was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

from soakrig.bisect.evidence import Evidence
from soakrig.bisect.statistics import clean_exposure, rate_interval
from soakrig.bisect.verdicts import Rule, Verdict

PER_UNIT = {"turns": "turns", "output_tokens": "output tokens"}


def outlook(
    evidence: Evidence, verdicts: Mapping[str, Verdict], rule: Rule, seconds: float, unit: str
) -> tuple[str, ...]:
    """A sentence for each thing that is worth more hours. Modelled: the hazard and the pace stay what they were.

    ``seconds``: spent on all launches. Empty where nothing is open, or nothing was measured.
    """
    work = sum(run.exposure for run in evidence.runs)
    if work <= 0.0 or seconds <= 0.0:
        return ()
    faults = max(evidence.control_faults.values(), default=0)
    control = evidence.counted(evidence.control)
    turns = sum(run.exposure for run in control)
    if faults < rule.min_control_faults:
        if turns <= 0:
            return ()
        if not faults:
            text = f"The control did {turns:g} {PER_UNIT[unit]} without the fault: at 97.5 %, its hazard is at most "
            text += f"{rate_interval(0, turns).high:.2g} a unit. A load that provokes it comes before more hours."
            return (text,)
        need = (rule.min_control_faults - faults) * turns / faults
        return (f"The control needs some {need:.0f} more {PER_UNIT[unit]}, about {_hours(need, work, seconds)}.",)
    mean = turns / faults
    needed = clean_exposure(rule.level(0), at_least=rule.at_least, control_faults=faults) * mean
    found: list[str] = []
    for one in verdicts.values():
        if one.arm.role != "one" or one.word not in ("UNDECIDED", "VOID") or one.faults:
            continue
        more = max(needed - one.exposure, mean)
        if math.isfinite(more):
            text = f"{one.arm.name}: some {more:.0f} more clean {PER_UNIT[unit]}, about {_hours(more, work, seconds)}, "
            found.append(f"{text}would clear it to at least {rule.at_least:g} times; a fault would settle it sooner.")
    return tuple(found)


def _hours(need: float, work: float, seconds: float) -> str:
    return f"{need * seconds / work / 3600.0:.2g} h at the pace so far"
