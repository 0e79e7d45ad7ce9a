"""The words of a bisect: FAULTS, REDUCED, CLEARED to at least R times, UNDECIDED, VOID. Never "fixed"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from soakrig.bisect.evidence import Arm, Evidence
from soakrig.bisect.posterior import DEFAULT_PRIOR, Prior, RatioPosterior, ratio_posteriors
from soakrig.bisect.statistics import (
    Cell,
    Interval,
    chance_of_so_few,
    chance_of_so_few_crashes,
    ratio_at_most,
    ratio_interval,
)
from soakrig.errors import UsageError

Word = Literal["FAULTS", "REDUCED", "CLEARED", "UNDECIDED", "VOID"]

CLEAN_SHARE = 0.6
"""Share of an arm's error that its clean verdict may spend; the rest is halved from one number of faults to the next.

An arm is looked at after every run. For each number of faults there is one exposure from which on so few are too few,
so the errors of all looks add up to at most the arm's.
"""

ALL_OFF_CARE = 3.0
"""An all-off arm that faults ends the campaign, so it takes this much more to give it up: the cause may lie in a
variable whose change only lowers the hazard, and that faults as well."""


@dataclass(frozen=True)
class Rule:
    """When evidence is enough.

    ``confidence``: that no arm of the campaign is wrongly CLEARED or REDUCED. ``arms``: among how many its error is
    split. ``at_least``: the factor that CLEARED has to show; 2 keeps a variable that only shifts the timing from
    passing for the cause. ``worth``: the factor that is looked for; an arm that hardly lowers the hazard so much gets
    no more runs. ``min_control_faults``: below them nothing is judged but a fault. ``enough``: P(``at_least``) at
    which an arm that is CLEARED or REDUCED needs no more runs; ``hopeless``: 1 - P(``worth``) at which any arm is left
    alone. The words come from the exact test; these two only say when to stop.
    """

    confidence: float = 0.99
    arms: int = 1
    at_least: float = 2.0
    worth: float = 5.0
    min_control_faults: int = 3
    enough: float = 0.995
    hopeless: float = 0.98

    def __post_init__(self) -> None:
        chances = (self.confidence, self.enough, self.hopeless)
        if not all(0.5 <= chance < 1.0 for chance in chances):
            raise UsageError(
                f"confidence, enough and hopeless are {chances}, expected chances from 0.5 to below 1",
                remedy="0.99 means: one campaign in a hundred may name a wrong variable.",
            )
        if self.arms < 1 or self.at_least < 1.0 or self.min_control_faults < 2:
            raise UsageError(
                f"arms {self.arms}, at_least {self.at_least:g}, min_control_faults {self.min_control_faults}; expected "
                "at least 1, 1 and 2",
                remedy="One fault of the control is no baseline: the interval of its mean spans a factor of 200.",
            )

    def level(self, faults: int) -> float:
        """Error that a verdict on an arm with so many faults may spend."""
        whole = (1.0 - self.confidence) / self.arms
        return whole * (CLEAN_SHARE if faults == 0 else (1.0 - CLEAN_SHARE) * 0.5**faults)


@dataclass(frozen=True)
class Verdict:
    """What the evidence says of one arm.

    ``exposure``: turns (or tokens) done; ``expected``: faults of the control in as much work; ``p``: chance of so few
    faults if the arm changed nothing, None where it is not judged; ``posterior``: P(hazard at least ``Rule.at_least``
    times lower); ``promise``: the same for ``Rule.worth``, 1 where nothing is known; ``factor``: the R of CLEARED and
    REDUCED, at the campaign's confidence; ``settled``: more runs of it are not worth their time.
    """

    arm: Arm
    word: Word
    why: str
    runs: int
    exposure: float
    faults: int
    expected: float
    void: int
    p: float | None
    posterior: float | None
    promise: float
    factor: float | None
    settled: bool
    cells: tuple[Cell, ...]

    @cached_property
    def ratio(self) -> Interval | None:
        """Hazard over the control's, with the 95 % interval of this arm alone; None where nothing can be compared."""
        return ratio_interval(self.cells) if self.p is not None else None

    @property
    def claim(self) -> str:
        """The verdict as people read it."""
        if self.word == "CLEARED" and self.factor is not None:
            return f"CLEARED to at least {_down(self.factor)} times"
        if self.word == "REDUCED" and self.ratio is not None:
            low, estimate, high = self.ratio
            return f"REDUCED to {estimate:.2g} of the control ({low:.2g} to {high:.2g})"
        return self.word


def _down(factor: float) -> str:
    """One decimal, rounded down: a claim must not be rounded up."""
    return f"{int(factor * 10) / 10:g}"


def judge(evidence: Evidence, arms: Sequence[Arm], rule: Rule, *, prior: Prior = DEFAULT_PRIOR) -> dict[str, Verdict]:
    """Verdict of each arm but the control, by name, in the order of ``arms``."""
    usable = [name for name, faults in evidence.control_faults.items() if faults >= rule.min_control_faults]
    control = {name: totals for name, totals in evidence.totals(evidence.control).items() if name in usable}
    treated = [arm for arm in arms if arm.role != "control"]
    totals = {arm.name: evidence.totals(arm.name) for arm in treated}
    chances = ratio_posteriors(control, totals, prior=prior) if control else {}
    return {arm.name: _verdict(evidence, arm, rule, chances.get(arm.name)) for arm in treated}


def word_by_runs(control_runs: int, control_crashed: int, arm_runs: int, arm_crashed: int, rule: Rule) -> Word:
    """Word for an arm of which only runs and crashes are known: Fisher's exact test, a run being one trial.

    Any crash is FAULTS, as lengths that are not known cannot show a reduction. For published counts, and for faults
    that come in the first turn, where the test of rates is too cautious.
    """
    if arm_crashed:
        return "FAULTS"
    if control_crashed < rule.min_control_faults:
        return "UNDECIDED"
    p = chance_of_so_few_crashes(control_runs, control_crashed, arm_runs, arm_crashed)
    return "CLEARED" if p <= rule.level(0) else "UNDECIDED"


def _verdict(evidence: Evidence, arm: Arm, rule: Rule, chances: RatioPosterior | None) -> Verdict:
    counted = evidence.counted(arm.name)
    void = evidence.void(arm.name)
    faults = sum(run.signature is not None for run in counted)
    known = evidence.control_faults_within(arm.name)
    usable = [name for name, seen in known.items() if seen >= rule.min_control_faults]
    cells = tuple(evidence.cells(arm.name, usable=usable)) if usable else ()
    p = chance_of_so_few(cells) if cells else None
    posterior = chances.at_least(rule.at_least) if chances else None
    promise = chances.at_least(rule.worth) if chances else 1.0
    judged = sum(cell.arm_faults for cell in cells)
    word: Word = "UNDECIDED"
    factor: float | None = None
    settled = False
    if not counted:
        word = "VOID" if void else "UNDECIDED"
        why = f"no run counts; the last was void: {void[-1][1]}" if void else "not run yet"
    elif p is None or posterior is None:
        word = "FAULTS" if faults else "UNDECIDED"
        seen = max(known.values(), default=0)
        why = f"the control has {seen} faults in as long runs, {rule.min_control_faults} are needed to judge this"
        if faults:
            why = "the fault came with this setting; how often beside the control cannot be said yet"
    elif faults == 0:
        low = chance_of_so_few(cells, 1.0 / rule.at_least)
        shown = low <= rule.level(0)
        word = "CLEARED" if shown else "UNDECIDED"
        settled = shown and posterior >= rule.enough
        why = f"so long without a fault has chance {low:.2g} if the hazard were only {rule.at_least:g} times lower"
        if not shown:
            why += f"; {rule.level(0):.2g} is asked for"
    else:
        word = "FAULTS"
        why = f"{faults} faults where the control would have had {sum(cell.arm_exposure for cell in cells):.1f}"
        if p <= rule.level(faults) and judged == faults:
            word = "REDUCED"
            settled = posterior >= rule.enough
    if word in ("CLEARED", "REDUCED"):
        factor = 1.0 / max(ratio_at_most(cells, rule.level(faults)), 1e-9)
    if faults and promise <= (1.0 - rule.hopeless) / (ALL_OFF_CARE if arm.role == "all_off" else 1.0):
        settled = True
    return Verdict(
        arm=arm, word=word, why=why, runs=len(counted), exposure=sum(run.exposure for run in counted), faults=faults,
        expected=sum(exposure for _, exposure in evidence.totals(arm.name).values()), void=len(void), p=p,
        posterior=posterior, promise=promise, factor=factor, settled=settled, cells=cells,
    )  # fmt: skip
