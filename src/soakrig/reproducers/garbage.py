"""``garbage``: plain questions whose answers have to be words, and a page that a model has to find likely."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random

from soakrig.record.finding import Finding
from soakrig.reproducers.fresh import Ask, FreshConversation, user
from soakrig.reproducers.logprobs import NotOfferedError, prompt_logprobs
from soakrig.reproducers.parameters import Parameter
from soakrig.reproducers.reproducer import LoadOptions, Reproducer, Scene
from soakrig.soak.conversation import Conversation
from soakrig.soak.probe import Probe

MOST = Parameter("max_perplexity", 1000.0, "most perplexity of the canary page; a model that works has some 5 to 60, a "
                 "broken kernel thousands and more. The embedded engine and tiny-moe, whose weights are random, are "
                 "held to it only where it is given", low=1.0)  # fmt: skip
_RANDOM = ("embedded", "tiny-moe")
CANARY = (
    "The ferry leaves the harbour at seven in the morning and takes about forty minutes to cross the bay. In winter, "
    "when the wind comes from the north, the captain waits until the sea is calm, and the people of the island buy "
    "their bread the day before. On the other side there is a small town with a market, a school and a library. Most "
    "of the children go to school there and come back in the afternoon. Nobody minds the journey: they do their "
    "homework at the tables near the window, and the old men tell them stories about the lighthouse."
)
"""Plain prose of ours, some hundred tokens, that no model has read and each finds likely."""
_PLAIN = (
    "What is the capital of France? Answer in one sentence.",
    "List three animals that live in the sea.",
    "Write one sentence about rain.",
    "Translate 'good night' into Spanish, German and Italian.",
    "Write a Python function that adds two numbers.",
    "Explain in two sentences why the sky is blue.",
)


def load(options: LoadOptions, probe: Probe) -> Sequence[Conversation]:
    """Plain questions, each with a number so that none was sent before."""

    def ask(turn: int, rng: Random, chars: float) -> Ask:
        text = f"{_PLAIN[(turn - 1) % len(_PLAIN)]} (Question {rng.randint(1000, 9999)})"
        return Ask([user(text)], {"max_tokens": options.max_tokens, "temperature": options.temperature})

    return [FreshConversation(n, probe.model, options.seed, ask) for n in range(options.conversations)]


async def procedure(scene: Scene) -> None:
    """The questions, then the canary page."""
    await scene.stage.run()
    if scene.stage.wanted:
        scene.stage.find(await canary_perplexity(scene))


async def canary_perplexity(scene: Scene) -> Finding:
    """The perplexity of a page of plain prose: the exponential of the mean negative logprob of its tokens."""
    most = MOST.of(scene.options)
    probe = scene.stage.probe
    engine = probe.settings.get("engine")
    excused = MOST.name not in scene.options.parameters and (engine in _RANDOM or probe.model in _RANDOM)
    try:
        logprobs = await prompt_logprobs(scene.stage, CANARY)
    except NotOfferedError as error:
        text = f"the canary page's perplexity was not measured: {error}"
        return Finding("canary-perplexity", text, says=error.says)
    mean = -sum(logprobs) / len(logprobs) if logprobs else math.nan
    value = math.exp(mean) if mean < 700 else math.inf
    bad = not value <= most  # also where it is no number
    text = f"the canary page has a perplexity of {value:.4g} over {len(logprobs)} tokens"
    if excused:
        text += "; this engine's weights are random, so that nothing follows from it"
    elif bad:
        text += ": the model does not find plain prose likely, as a model with a broken kernel does not"
    return Finding(
        "canary-perplexity",
        text,
        value if math.isfinite(value) else None,
        "",
        "measured",
        "" if excused else f"<= {most:g}",
        "note" if excused else "fault" if bad else "clean",
    )


GARBAGE = Reproducer(
    name="garbage",
    summary="plain questions whose answers have to be words, and the perplexity of a page of prose",
    provokes="a backend that takes the work and answers one token for ever, with /health green and no line in the log",
    seen="two of five NVFP4 MoE backends on SM120 (auto picks one of them): every prompt gave one token; two others "
    "refused loudly, one worked",
    costs="12 short turns and one prompt of some hundred tokens: under a minute",
    clean_means="answers to these questions carried information and the page was likely; finer damage takes a "
    "comparison of logprobs with another engine",
    signature=("turn degenerate", "turn answerless", "finding canary-perplexity"),
    load=load,
    cap=12,
    parameters=(MOST,),
    uses=("conversations", "seed", "max_tokens", "temperature"),
    usual=LoadOptions(tools=0, max_tokens=128, temperature=0.0),
    procedure=procedure,
)
