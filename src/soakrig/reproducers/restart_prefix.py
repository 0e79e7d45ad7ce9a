"""``restart-prefix``: the same prompts cold, warm, after eviction and after a restart."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from soakrig.errors import UsageError
from soakrig.record.finding import Finding
from soakrig.record.manifest import Plan
from soakrig.reproducers.fresh import FIRST_GUESS, Ask, FreshConversation, passage, user
from soakrig.reproducers.logprobs import NextToken, NotOfferedError, drift, next_token, prompt_logprobs, same_first
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene, Way
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

PROMPTS = Parameter("prompts", 3, "how many prompts", low=1, high=64)
TOKENS = Parameter("prompt_tokens", 2000, "most length of each, in tokens (estimated)", low=64, high=1 << 22)
EVICT = Parameter("evict", True, "whether to fill the engine's KV cache with other prompts and ask again")
CACHE = Parameter("cache_tokens", 0, "what the KV cache holds, in tokens, where the engine does not say; 0: it does",
                  low=0, high=1 << 30)  # fmt: skip
RESTART = Parameter("restart", True, "whether to stop and start the engine and ask again")
DRIFT = Parameter("max_drift", 0.1, "most mean drift of logprobs, in nats, against a fresh computation; ten times the "
                  "drift of two fresh computations is allowed where that is more", low=0.0, high=100.0)  # fmt: skip
OWN_TIMES = 10.0
FILL = 1.25
"""How much more than the cache holds is sent to empty it of what was there."""


@dataclass
class _Measured:
    """Of each prompt: its own tokens' logprobs and the next token's, both computed afresh."""

    own: list[list[float]] = field(default_factory=list[list[float]])
    following: list[dict[str, float]] = field(default_factory=list[dict[str, float]])


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """None: the phases make their own. Raises ``UsageError`` where a prompt does not fit the context."""
    limit = options.context_limit or probe.context_limit
    if limit is not None and TOKENS.of(options) * 1.25 + options.max_tokens > limit:
        raise UsageError(
            f"prompts of about {TOKENS.of(options)} tokens and {options.max_tokens} of answer do not fit the engine's "
            f"context of {limit}",
            remedy=f"Use --param prompt_tokens={max(64, (limit - options.max_tokens) * 3 // 4)} or less.",
        )
    return []


def plan(options: LoadOptions) -> Plan:
    """One turn a prompt and phase."""
    phases = 2 + EVICT.of(options) + RESTART.of(options)
    return Plan(conversations=1, turns=phases * PROMPTS.of(options))


def check(options: LoadOptions, way: Way) -> None:
    """Raises ``UsageError`` where the engine cannot be restarted by this tool."""
    if RESTART.of(options) and way != "launched":
        raise UsageError(
            "restart-prefix stops and starts the engine, and an attached one is never stopped",
            remedy="Start it with --engine, or leave that phase out with --param restart=false.",
        )


async def procedure(scene: Scene) -> None:
    """Phase by phase; each asks its turns and holds its logprobs against the fresh ones of the first."""
    await _Phases(scene).go()


class _Phases:
    def __init__(self, scene: Scene) -> None:
        self.scene, self.stage, self.options = scene, scene.stage, scene.options
        rng = Random(f"{scene.options.seed}/restart-prefix")
        count, chars = PROMPTS.of(scene.options), TOKENS.of(scene.options) * FIRST_GUESS
        self.prompts = [passage(rng, chars) for _ in range(count)]
        self.number = 0
        self.base: _Measured | None = None
        self.bound = DRIFT.of(scene.options)

    async def go(self) -> None:
        cold = await self._phase("cold")  # first: what is computed afresh fills the cache as well
        if not self.stage.over:
            await self._baseline()
            self._judge("cold", cold)
            await self._phase("warm")
        if EVICT.of(self.options) and not self.stage.over and await self._evict():
            await self._phase("evicted")
        if RESTART.of(self.options) and not self.stage.over and await self._restart():
            await self._phase("restarted")
            await self._own_drift("restarted")

    async def _baseline(self) -> None:
        """Two fresh computations of everything: what differs between them is the engine's own noise."""
        try:
            first, second = await self._fresh(), await self._fresh()
        except NotOfferedError as error:
            self._missing("prefix-drift", f"the drift of logprobs was not measured, outcomes alone are judged: {error}")
            return
        self.base = first
        noise = max(*map(drift, first.following, second.following), _worst(first.own, second.own), 0.0)
        self.bound = max(self.bound, OWN_TIMES * noise) if math.isfinite(noise) else self.bound
        text = f"two fresh computations of the same prompts differ by {noise:.3g} nat: the engine's own noise"
        self.stage.find(Finding("own-drift", text, noise if math.isfinite(noise) else None, "nat"))

    async def _fresh(self) -> _Measured:
        made = _Measured()
        for prompt in self.prompts:
            made.own.append(await prompt_logprobs(self.stage, prompt))
            made.following.append((await next_token(self.stage, prompt, fresh=True)).row)
        return made

    async def _phase(self, name: str) -> list[NextToken]:
        """The turns of a phase, then the next token's logprobs through whatever the cache holds; judged where there is
        something to hold them against."""

        def ask(turn: int, rng: Random, chars: float) -> Ask | None:
            if turn > len(self.prompts):
                return None
            fields = {"max_tokens": self.options.max_tokens, "temperature": self.options.temperature}
            return Ask([user(self.prompts[turn - 1] + "\n\nWhat is this?")], fields)

        conversation = FreshConversation(self.number, self.stage.probe.model, self.options.seed, ask)
        self.number += 1
        await self.stage.run([conversation])
        if self.stage.load.dead or (self.number > 1 and self.base is None):
            return []
        try:
            seen = [await next_token(self.stage, prompt) for prompt in self.prompts]
        except NotOfferedError as error:
            if self.base is not None:
                self._missing(f"prefix-drift-{name}", f"{name}: not measured: {error}")
            return []
        self._judge(name, seen)
        return seen

    def _judge(self, name: str, seen: list[NextToken]) -> None:
        if self.base is None or not seen:
            return
        pairs = list(zip((one.row for one in seen), self.base.following, strict=True))
        worst, same = max(drift(*pair) for pair in pairs), sum(same_first(*pair) for pair in pairs)
        cached = [one.cached for one in seen if one.cached is not None]
        told = f"{sum(cached)} tokens from the cache" if cached else "the engine does not say what was cached"
        if cached and (sum(cached) > 0) is not (name == "warm"):
            what = {
                "warm": "nothing came from the cache, so that no warm prefix was tried: it is off, or too small",
                "evicted": f"{told}: what should have been evicted was still there; more --param cache_tokens= helps",
            }
            if name in what:
                self._missing(f"prefix-{name}", f"{name}: {what[name]}")
        text = (
            f"{name}: the next token's logprobs drift by {worst:.3g} nat from a fresh computation at most, the "
            f"likeliest is the same for {same} of {len(seen)} prompts ({told})"
        )
        self.stage.find(self._drift(f"prefix-drift-{name}", text, worst))

    async def _own_drift(self, name: str) -> None:
        """The prompts' own logprobs, fresh as before."""
        if self.base is None or self.stage.load.dead:
            return
        try:
            own = [await prompt_logprobs(self.stage, prompt) for prompt in self.prompts]
        except NotOfferedError as error:
            self._missing(f"prompt-drift-{name}", f"{name}: not measured: {error}")
            return
        worst = _worst(own, self.base.own)
        text = f"{name}: the prompts' own logprobs drift by {worst:.3g} nat a token at most from before"
        self.stage.find(self._drift(f"prompt-drift-{name}", text, worst))

    def _missing(self, name: str, text: str) -> None:
        self.stage.find(Finding(name, text, unit="nat", says="unknown"))

    def _drift(self, name: str, text: str, value: float) -> Finding:
        bad = not value <= self.bound
        figure = value if math.isfinite(value) else None
        return Finding(name, text, figure, "nat", bound=f"<= {self.bound:.3g} nat", says="fault" if bad else "clean")

    async def _evict(self) -> bool:
        """Send other prompts until the cache cannot hold the first ones any more; False where it is not known when."""
        capacity = CACHE.of(self.options) or await self._capacity()
        if not capacity:
            text = (
                "evicted: the engine does not say what its KV cache holds; --param cache_tokens=N does, or evict=false"
            )
            self._missing("prefix-drift-evicted", text)
            return False
        limit = self.options.context_limit or self.stage.probe.context_limit or 4 * TOKENS.of(self.options)
        chars = min(limit // 2, capacity // 2) * FIRST_GUESS
        rng, sent = Random(f"{self.options.seed}/evict"), 0.0
        while sent < FILL * capacity and not self.stage.over:
            body = {"model": self.stage.probe.model, "prompt": passage(rng, chars), "max_tokens": 1, "temperature": 0}
            answer = await self.stage.post("/v1/completions", body)
            if answer is None or answer.status_code != 200:
                said = "nothing" if answer is None else f"{answer.status_code}: {answer.text[:120]}"
                self._missing("prefix-drift-evicted", f"evicted: a filling prompt got {said}")
                return False
            usage = answer.json().get("usage") or {}
            sent += usage.get("prompt_tokens") or chars / (2 * FIRST_GUESS)
        return not self.stage.over

    async def _capacity(self) -> int:
        """Tokens of the KV cache: the embedded engine says it in its settings, vLLM on its metrics page."""
        config = self.stage.probe.settings.get("config")
        if isinstance(config, dict) and isinstance(config.get("kv_tokens"), int):
            return int(config["kv_tokens"])
        page = await self.stage.client.get("/metrics")
        text = page.text if page is not None and page.status_code == 200 else ""
        line = next((one for one in text.splitlines() if one.startswith("vllm:cache_config_info{")), "")
        found = {name: int(value) for name, value in re.findall(r'(num_gpu_blocks|block_size)="(\d+)"', line)}
        return found.get("num_gpu_blocks", 0) * found.get("block_size", 0)

    async def _restart(self) -> bool:
        control = self.scene.control
        if control is None or not await self.stage.let_go("restart-prefix restarts it"):
            return False
        left = await asyncio.to_thread(control.clean)
        if left:
            self.stage.find(Finding("left-behind", f"the engine did not end: {', '.join(left)}", says="fault"))
            return False
        return await self.scene.start_again("restart-prefix restarted it")


def _worst(one: list[list[float]], other: list[list[float]]) -> float:
    """The greatest mean absolute difference a token of two measurements of the same prompts."""
    means: list[float] = []
    for left, right in zip(one, other, strict=True):
        gaps = [abs(a - b) for a, b in zip(left, right, strict=False)]
        mean = sum(gaps) / len(gaps) if gaps and len(left) == len(right) else math.inf
        means.append(mean if math.isfinite(mean) else math.inf)
    return max(means)


RESTART_PREFIX = Reproducer(
    name="restart-prefix",
    summary="the same prompts cold, warm, after eviction and after a restart, with their logprobs held together",
    provokes="a prefix that the cache, an eviction or a restart gives back changed: turns that fail, or numbers that "
    "drift from those of a fresh computation",
    seen="mamba-style align caching continues from a state that was rounded elsewhere; an eviction battery of another "
    "operator of the same model looks for corruption in just these four states",
    costs="a second start of the engine, and 1.25 times its KV cache in prefill: 375k tokens at 1,500 a second are 5 "
    "minutes",
    clean_means="in these states these prompts gave the numbers of a fresh computation, within the bound that the "
    "report names; it is a bound on gross damage, not a proof of equality",
    signature=(
        "finding prefix-drift",
        "finding prompt-drift",
        "finding restart",
        "finding left-behind",
        "Xid",
        "engine death",
    ),
    load=load,
    parameters=(PROMPTS, TOKENS, EVICT, CACHE, RESTART, DRIFT),
    uses=("seed", "max_tokens", "temperature", "context_limit"),
    usual=LoadOptions(tools=0, max_tokens=32, temperature=0.0),
    procedure=procedure,
    plan=plan,
    needs="an engine that this tool starts (for the restart; --param restart=false leaves it out), and "
    "/v1/completions with logprobs and prompt_logprobs (vLLM, the embedded engine)",
    check=check,
)
