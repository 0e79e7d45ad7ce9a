"""Free text of a healthy engine is never degenerate: no cycle, no repeated token, no garbage, at any temperature."""

from __future__ import annotations

import zlib
from dataclasses import asdict

import pytest

from soakrig.engine.embedded.config import EngineConfig
from soakrig.engine.embedded.reply_script import ReplySpec
from soakrig.engine.embedded.runner import Runner
from soakrig.engine.embedded.sampling import SamplingParams
from soakrig.engine.embedded.sequence import from_request
from soakrig.engine.embedded.settings import Settings
from soakrig.engine.embedded.tokenizer import Tokenizer
from soakrig.engine.offload.plan import OffloadPlan

TOKENIZER = Tokenizer()
LENGTH = 700


def written(prompts: list[list[int]], sampling: SamplingParams) -> list[list[int]]:
    """The tokens of one long text for each prompt, from the default model, in one batch."""
    config = EngineConfig()
    runner = Runner(config, OffloadPlan.build(Settings.from_environment({}), config.model_shape))
    sequences = [
        from_request(
            {
                "id": str(number),
                "prompt": prompt,
                "max_tokens": LENGTH,
                "sampling": asdict(sampling),
                "reply": asdict(ReplySpec(text_tokens=LENGTH + 1)),
                "logprobs": None,
                "prompt_logprobs": None,
                "stop": [],
                "planted": False,
            },
            number,
            TOKENIZER,
        )
        for number, prompt in enumerate(prompts)
    ]
    for sequence in sequences:
        runner.scheduler.add(sequence)
    while runner.scheduler.has_work:
        runner.step()
    return [sequence.tokens[sequence.prompt_tokens :] for sequence in sequences]


def longest_cycle(tokens: list[int], longest_period: int = 64) -> int:
    """The most tokens in a row that repeat what stands one period before them, over all short periods."""
    worst = 0
    for period in range(1, longest_period + 1):
        run = 0
        for place in range(period, len(tokens)):
            run = run + 1 if tokens[place] == tokens[place - period] else 0
            worst = max(worst, run)
    return worst


def test_the_cycle_finder_finds_cycles() -> None:
    assert longest_cycle([5] * 100) == 99
    assert longest_cycle([1, 2, 3] * 50) == 147
    assert longest_cycle(list(range(100))) == 0


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=2.0, seed=1)], ids=str
)
def test_long_texts_do_not_cycle(sampling: SamplingParams) -> None:
    # The prompts are what breaks a weak model: one token over and over, a short cycle, its own kind of text.
    prompts = [[300] * 64, [300, 301, 302] * 40, TOKENIZER.encode("def main() -> None:\n    return None\n" * 5)]
    for tokens in written(prompts, sampling):
        assert len(tokens) == LENGTH
        assert longest_cycle(tokens) <= 4
        assert len(set(tokens)) > 200
        assert max(tokens.count(token) for token in set(tokens)) < LENGTH // 20
        text = TOKENIZER.decode(tokens)
        assert text.isprintable()
        assert "�" not in text
        assert text.isascii()
        # Information: a degenerate text shrinks to nothing.
        assert len(zlib.compress(text.encode())) > 0.4 * len(text)


def test_texts_of_different_prompts_differ() -> None:
    one, other = written([[300] * 64, [301] * 64], SamplingParams(temperature=0.0))
    same = sum(a == b for a, b in zip(one, other, strict=True))
    assert same < LENGTH // 2
