"""``soak measure backends``: every value of a launch flag (or variable) through canary, garbage check and speed.

A backend that loads, answers /health and returns nonsense is the dangerous kind: nothing refuses it. So each value that
the engine accepts has to answer canaries, and is asked how likely plain English is to it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soakrig.clock import RealClock
from soakrig.errors import EngineStartError, InconclusiveError, PreflightRefusedError, UsageError
from soakrig.reproducers.measure.folder import MeasureFolder, read_observations
from soakrig.reproducers.measure.scoring import Scorer
from soakrig.reproducers.measure.sides import Bench, Side, running
from soakrig.reproducers.measure.turns import TurnShape, one_turn
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.probe import probe

PASSAGE = (
    "The train left the station a little after eight in the morning. It was raining, and most of the seats were empty. "
    "A woman with a red umbrella sat down by the window and opened a newspaper. She read the first page slowly, then "
    "folded the paper and looked out at the fields. There were cows under the trees, and the river was higher than "
    "usual. When the conductor came by, he asked for her ticket and told her that they would be ten minutes late."
)
"""Plain English of our own, which every language model finds likely."""
CANARY_WORDS, CANARY_TOKENS = 12, 96
AGREES = 0.5
"""Places at which a working backend names the same likeliest token as another: far more than half. Not a tolerance of
rounding, but the mark between rounding and nonsense."""


@dataclass(frozen=True)
class Sweep:
    """``name``: of the flag (with its dashes) or variable; ``values`` in order. ``canaries``: short answers that each
    value has to give; ``prompts``: turns that time it."""

    name: str
    values: tuple[str, ...]
    canaries: int = 3
    prompts: int = 8
    prompt_words: int = 200
    output_tokens: int = 48
    seed: str = "0"

    def side(self, value: str) -> Side:
        if self.name.startswith("-"):
            return Side(value, flags=(f"{self.name}={value}",))
        return Side(value, {self.name: value})


def parse_sweep(text: str) -> tuple[str, tuple[str, ...]]:
    """``--moe-backend=marlin,triton`` or ``NAME=1,0``. Raises ``UsageError``."""
    name, equals, rest = text.partition("=")
    values = tuple(rest.split(","))
    if not equals or not name.strip("-") or len(values) < 2 or not all(values) or len(set(values)) < len(values):
        raise UsageError(
            f"{text!r} is no sweep: a flag or variable and at least two different values were expected",
            remedy="Example: soak measure backends -- --moe-backend=marlin,triton,flashinfer_cutlass",
        )
    return name, values


def measure_backends(
    bench: Bench, sweep: Sweep, folder: MeasureFolder, tell: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """One launch for each value; the table as ``judge_backends``."""
    for value in sweep.values:
        tell(f"{sweep.name}={value}")
        try:
            with running(bench, sweep.side(value), folder.path / f"value-{sweep.values.index(value)}") as target:
                client = ChatClient(target, RealClock(), Timeouts(stall=60.0))
                asyncio.run(_look(client, value, sweep, folder))
        except (UsageError, PreflightRefusedError) as error:
            folder.observe({"what": "refused", "value": value, "why": error.message})
        except EngineStartError as error:
            folder.observe({"what": "refused", "value": value, "why": f"it did not come up: {error.message}"})
        except InconclusiveError as error:
            folder.observe({"what": "dead", "value": value, "why": error.message})
    return judge_backends(read_observations(folder.path), sweep)


async def _look(client: ChatClient, value: str, sweep: Sweep, folder: MeasureFolder) -> None:
    async with client:
        probed = await probe(client)
        extended = bool(probed.settings or probed.version)
        folder.observe({"what": "accepted", "value": value, "simulated": probed.simulated})
        for number in range(sweep.canaries):
            shape = TurnShape(CANARY_WORDS, CANARY_TOKENS, extended)
            turn = await one_turn(client, probed.model, shape, f"{sweep.seed}/canary/{number}")
            folder.observe({"what": "canary", "value": value, **turn})
            if turn["outcome"] in ("refused", "hung"):
                raise InconclusiveError(f"it does not answer any more: {turn['outcome']} {turn['why']}")
        try:
            scorer = Scorer(client, probed.model)
            scored = await scorer.text(await scorer.tokens(PASSAGE))
            values, first = [one for one, _ in scored], [top.first for _, top in scored]
            finite = all(map(math.isfinite, values))
            folder.observe({"what": "english", "value": value, "logprobs": values if finite else None, "first": first})
        except PreflightRefusedError as error:
            folder.observe({"what": "no logprobs", "value": value, "why": error.message})
        for number in range(sweep.prompts):
            shape = TurnShape(sweep.prompt_words, sweep.output_tokens, extended)
            turn = await one_turn(client, probed.model, shape, f"{sweep.seed}/speed/{number}")
            turn.pop("text")
            folder.observe({"what": "turn", "value": value, **turn})


def judge_backends(observations: Iterable[dict[str, Any]], sweep: Sweep) -> dict[str, Any]:
    """The table from the observations alone: one row a value, ``state`` accepted, refused, died or wrong."""
    seen = list(observations)
    english = {one["value"]: one for one in seen if one["what"] == "english"}
    sound = {value: one for value, one in english.items() if one["logprobs"]}
    reference = max(sound, key=lambda value: float(np.mean(sound[value]["logprobs"])), default=None)
    rows = [_row(value, [one for one in seen if one["value"] == value], english, reference) for value in sweep.values]
    states = [row["state"] for row in rows]
    verdict = "fail" if {"wrong", "died"} & set(states) else "pass" if "accepted" in states else "inconclusive"
    return {
        "schema": 1,
        "measures": "backends",
        "verdict": verdict,
        "exit_code": {"pass": 0, "fail": 1, "inconclusive": 2}[verdict],
        "reasons": [f"{row['value']}: {row['state']}: {row['why']}" for row in rows if row["state"] != "accepted"],
        "simulated": any(one.get("simulated") for one in seen),
        "name": sweep.name,
        "reference": reference,
        "rows": rows,
    }


def _row(
    value: str, seen: Sequence[dict[str, Any]], english: dict[str, dict[str, Any]], reference: str | None
) -> dict[str, Any]:
    by = {what: [one for one in seen if one["what"] == what] for what in ("refused", "dead", "canary", "turn")}
    own = english.get(value)
    agreement = _agreement(own, english.get(reference or ""))
    ok = [one for one in by["turn"] if one["outcome"] == "ok"]
    row: dict[str, Any] = {
        "value": value,
        "canaries_ok": sum(one["outcome"] == "ok" for one in by["canary"]),
        "perplexity": math.exp(-float(np.mean(own["logprobs"]))) if own and own["logprobs"] else None,
        "top1_agreement": agreement,
        "ttft_s": _median(ok, "ttft_s"),
        "decode_s": _median(ok, "decode_s"),
        "kind": "measured",
    }
    bad = next((one for one in by["canary"] + by["turn"] if one["outcome"] != "ok"), None)
    if by["refused"]:
        state, why = "refused", by["refused"][0]["why"]
    elif by["dead"]:
        state, why = "died", by["dead"][0]["why"]
    elif bad is not None:
        state, why = "wrong", f"a canary or turn was {bad['outcome']}: {bad['why']}"
    elif own is not None and not own["logprobs"]:
        state, why = "wrong", "the log-probabilities of plain English are no numbers"
    elif agreement is not None and agreement < AGREES:
        state = "wrong"
        why = f"its likeliest tokens are {reference}'s at {agreement:.0%} of the places of plain English"
    else:
        state, why = "accepted", "" if own else "no log-probabilities to judge by: canaries alone"
    return {**row, "state": state, "why": why}


def _agreement(own: dict[str, Any] | None, other: dict[str, Any] | None) -> float | None:
    if own is None or other is None or len(own["first"]) != len(other["first"]) or not own["first"]:
        return None
    return float(np.mean([a == b for a, b in zip(own["first"], other["first"], strict=True)]))


def _median(turns: Sequence[dict[str, Any]], name: str) -> float | None:
    values = [one[name] for one in turns if one[name] is not None]
    return float(np.median(values)) if values else None
