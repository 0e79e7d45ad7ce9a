"""``soak measure speed``: is B faster or slower than A? Time to first token and decode are two questions.

Launches alternate (A B, B A, ...); in each, one request at a time, the same fresh prompts on both sides, the first
ones for warming up. A pair is the same prompt in the same block of two launches. The interval of a ratio is the wider
of two: over pairs, and over blocks, since all pairs of a launch share what that launch was dealt (memory layout, clock,
neighbours). Where the interval holds 1 and is wide, nothing is said.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from soakrig.clock import RealClock
from soakrig.errors import EngineStartError, InconclusiveError
from soakrig.reproducers.measure.folder import MeasureFolder, read_observations
from soakrig.reproducers.measure.sides import Bench, Side, running
from soakrig.reproducers.measure.turns import TurnShape, one_turn
from soakrig.soak.client import ChatClient, Timeouts
from soakrig.soak.probe import probe

Answer = Literal["faster", "slower", "same", "cannot tell"]
FIGURES = {"ttft_s": "time to first token", "decode_s": "decode, time per token"}
LEAST_PAIRS = 8
RESAMPLES = 4000
Floats = NDArray[np.float64]
WARM_UP = 2


@dataclass(frozen=True)
class SpeedPlan:
    """``blocks`` of one launch of each side, ``prompts`` measured in each. ``resolution``: the largest difference that
    is called the same; ``alpha``: error allowed for each of the two questions."""

    blocks: int = 4
    prompts: int = 12
    prompt_words: int = 400
    output_tokens: int = 64
    seed: str = "0"
    alpha: float = 0.05
    resolution: float = 0.05


def measure_speed(
    bench: Bench, control: Side, change: Side, plan: SpeedPlan, folder: MeasureFolder,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:  # fmt: skip
    """Launch, time, judge; the result as ``judge_speed``. An engine that does not start or dies ends it, said so."""
    for block in range(1, plan.blocks + 1):
        for side in (control, change) if block % 2 else (change, control):
            tell(f"block {block} of {plan.blocks}, {side.name}: {side.text()}")
            try:
                with running(bench, side, folder.path / f"{side.name}{block}") as target:
                    client = ChatClient(target, RealClock(), Timeouts())
                    asyncio.run(_time(client, side, block, plan, folder))
            except (EngineStartError, InconclusiveError) as error:
                folder.observe({"what": "dead", "side": side.name, "block": block, "why": error.message})
                return judge_speed(read_observations(folder.path), plan)
    return judge_speed(read_observations(folder.path), plan)


async def _time(client: ChatClient, side: Side, block: int, plan: SpeedPlan, folder: MeasureFolder) -> None:
    async with client:
        probed = await probe(client)
        shape = TurnShape(plan.prompt_words, plan.output_tokens, bool(probed.settings or probed.version))
        # An attached engine lives through all blocks: its prompts have to differ from block to block to stay fresh.
        salt = f"{plan.seed}/{block}" if side.url else plan.seed
        for number in range(-WARM_UP, plan.prompts):
            turn = await one_turn(client, probed.model, shape, f"{salt}/{number}")
            turn.pop("text")
            turn |= {"side": side.name, "block": block, "prompt": number, "simulated": probed.simulated}
            folder.observe({"what": "turn" if number >= 0 else "warm-up", **turn})
            if turn["outcome"] in ("refused", "hung"):
                raise InconclusiveError(f"the engine does not answer any more: {turn['outcome']} {turn['why']}")


def judge_speed(observations: Iterable[dict[str, Any]], plan: SpeedPlan) -> dict[str, Any]:
    """The result from the observations alone: an answer for each figure with its ratio B/A and interval."""
    seen = list(observations)
    turns = [one for one in seen if one["what"] == "turn"]
    bad = [one for one in turns if one["outcome"] != "ok"]
    dead = next((one for one in seen if one["what"] == "dead"), None)
    figures = {name: _figure(turns, name, plan) for name in FIGURES}
    answers: list[Answer] = [figure["answer"] for figure in figures.values()]
    reasons = [f"{FIGURES[name]}: {figure['text']}" for name, figure in figures.items()]
    if dead is not None:
        reasons.insert(0, f"{dead['side']} died or did not start: {dead['why']}")
    if bad:
        reasons.append(
            f"{len(bad)} turns were not ok and are left out, the first: {bad[0]['side']} {bad[0]['outcome']}"
        )
    if dead is not None:
        verdict = "fail" if dead["side"] == "B" else "inconclusive"
    elif "slower" in answers:
        verdict = "fail"
    elif "cannot tell" in answers or bad:
        verdict = "inconclusive"
    else:
        verdict = "pass"
    return {
        "schema": 1,
        "measures": "speed",
        "verdict": verdict,
        "exit_code": {"pass": 0, "fail": 1, "inconclusive": 2}[verdict],
        "reasons": reasons,
        "simulated": any(one.get("simulated") for one in turns),
        "figures": figures,
        "turns": len(turns),
        "left_out": len(bad),
        "fresh": not any(one["cached_tokens"] for one in turns if one["cached_tokens"] is not None),
    }


def _figure(turns: Sequence[dict[str, Any]], name: str, plan: SpeedPlan) -> dict[str, Any]:
    values: dict[str, dict[tuple[int, int], float]] = {"A": {}, "B": {}}
    for turn in turns:
        if turn["outcome"] == "ok" and turn[name] is not None:
            values[turn["side"]][turn["block"], turn["prompt"]] = turn[name]
    keys = sorted(values["A"].keys() & values["B"].keys())
    found: dict[str, Any] = {
        side: {"median_s": float(np.median(list(by_key.values()))) if by_key else None, "kind": "measured"}
        for side, by_key in values.items()
    }
    logs = np.array([math.log(values["B"][key] / values["A"][key]) for key in keys])
    blocks = [logs[[key[0] == block for key in keys]] for block in sorted({block for block, _ in keys})]
    found |= {"pairs": len(logs), "blocks": len(blocks)}
    if len(logs) < LEAST_PAIRS:
        text = f"{len(logs)} pairs of ok turns, at least {LEAST_PAIRS} are needed"
        return {**found, "ratio": None, "p": None, "answer": "cannot tell", "text": text}
    low, high, p = _interval(logs, blocks, plan.alpha)
    estimate = math.exp(float(logs.mean()))
    answer = _answer(low, high, p, plan)
    text = (
        f"B takes {estimate:.3f} times A's ({1 - plan.alpha:.0%} interval {low:.3f} to {high:.3f}, "
        f"Wilcoxon p = {p:.2g}, {len(logs)} pairs in {len(blocks)} blocks): "
        + ("" if answer == "cannot tell" else "B is ")
        + answer
    )
    ratio = {"low": low, "estimate": estimate, "high": high, "confidence": 1 - plan.alpha, "kind": "derived"}
    return {**found, "ratio": ratio, "p": p, "answer": answer, "text": text}


def _interval(logs: Floats, blocks: Sequence[Floats], alpha: float) -> tuple[float, float, float]:
    """Bounds of the ratio, the wider of those over pairs (bootstrap) and over blocks (Student's t), and Wilcoxon's p.

    With fewer than two blocks there is nothing that launches vary by: no bound but infinity.
    """
    from scipy.stats import bootstrap, t, wilcoxon  # slow to import

    p = float(wilcoxon(logs).pvalue) if logs.any() else 1.0  # pyright: ignore
    if len(blocks) < 2:
        return 0.0, math.inf, p
    if np.ptp(logs) > 0:
        over = bootstrap(
            (logs,), np.mean, confidence_level=1 - alpha, n_resamples=RESAMPLES, rng=np.random.default_rng(0)
        ).confidence_interval
        low, high = float(over.low), float(over.high)
    else:
        low = high = float(logs[0])
    means = np.array([block.mean() for block in blocks])
    reach = float(t.ppf(1 - alpha / 2, len(means) - 1)) * float(means.std(ddof=1)) / math.sqrt(len(means))
    middle = float(means.mean())
    return math.exp(min(low, middle - reach)), math.exp(max(high, middle + reach)), p


def _answer(low: float, high: float, p: float, plan: SpeedPlan) -> Answer:
    if low > 1.0 and p < plan.alpha:
        return "slower"
    if high < 1.0 and p < plan.alpha:
        return "faster"
    if low >= 1.0 / (1.0 + plan.resolution) and high <= 1.0 + plan.resolution:
        return "same"
    return "cannot tell"
