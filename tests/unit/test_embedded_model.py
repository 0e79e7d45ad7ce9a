"""The decoder: what it computes does not depend on how the work was cut into steps, blocks and batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from soakrig.engine.embedded.config import VOCABULARY, EngineConfig
from soakrig.engine.embedded.experts import ResidentExperts, by_expert, gathered
from soakrig.engine.embedded.kv_cache import BlockTable, KVCache
from soakrig.engine.embedded.model import Decoder, SequenceSpan, StepBatch
from soakrig.engine.embedded.weights import Seeded
from soakrig.errors import UsageError

CONFIG = EngineConfig(hidden=64, layers=2, experts=8, top_k=2, max_model_len=1024, kv_tokens=2048, block_size=16)
MODEL = Decoder(CONFIG)
TOKENS = torch.randint(VOCABULARY, (700,), generator=torch.Generator().manual_seed(1)).tolist()
IN_ORDER = list(range(64))
SCATTERED = torch.randperm(128, generator=torch.Generator().manual_seed(2)).tolist()[:64]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def compute(cache: KVCache, blocks: list[int], start: int, stop: int) -> torch.Tensor:
    """Logits of the tokens ``start``..``stop``, with what is before them in the cache."""
    places = torch.arange(start, stop)
    table = torch.tensor(blocks)
    batch = StepBatch(
        ids=torch.tensor(TOKENS[start:stop]),
        positions=places,
        slots=table[places // 16] * 16 + places % 16,
        spans=[SequenceSpan(0, stop - start, start, BlockTable(blocks[: -(-stop // 16)], torch.device("cpu")))],
        logit_rows=torch.arange(stop - start),
    )
    return MODEL.forward(batch, cache)


def whole() -> torch.Tensor:
    return compute(KVCache(CONFIG), IN_ORDER, 0, len(TOKENS))


@pytest.mark.parametrize("blocks", [IN_ORDER, SCATTERED], ids=["contiguous", "scattered"])
@pytest.mark.parametrize("cuts", [[0, 300, 301, 302, 700], [0, 16, 699, 700], [0, 256, 512, 700]])
def test_chunks_give_the_logits_of_the_whole(blocks: list[int], cuts: list[int]) -> None:
    cache = KVCache(CONFIG)
    parts = [compute(cache, blocks, start, stop) for start, stop in pairwise(cuts)]
    torch.testing.assert_close(torch.cat(parts), whole(), **CLOSE)


def test_a_token_sees_what_is_before_it_and_nothing_after() -> None:
    logits = whole()
    changed = list(TOKENS)
    changed[600] = (changed[600] + 1) % VOCABULARY
    original, TOKENS[:] = list(TOKENS), changed
    try:
        other = whole()
    finally:
        TOKENS[:] = original
    torch.testing.assert_close(other[:600], logits[:600], **CLOSE)
    change = (other[600:] - logits[600:]).abs().amax(dim=1)
    assert change.min() > 3e-4
    assert change[1:].max() > 0.1


def test_several_sequences_in_a_step_do_not_see_each_other() -> None:
    cache = KVCache(CONFIG)
    first, second = list(range(32)), list(range(32, 64))
    places = torch.arange(100)
    table = torch.tensor([first, second])
    batch = StepBatch(
        ids=torch.tensor(TOKENS[:100] + TOKENS[200:300]),
        positions=torch.cat([places, places]),
        slots=torch.cat([table[i][places // 16] * 16 + places % 16 for i in (0, 1)]),
        spans=[
            SequenceSpan(0, 100, 0, BlockTable(first[:7], torch.device("cpu"))),
            SequenceSpan(100, 200, 0, BlockTable(second[:7], torch.device("cpu"))),
        ],
        logit_rows=torch.tensor([99]),
    )
    together = MODEL.forward(batch, cache)
    torch.testing.assert_close(together, whole()[99:100], **CLOSE)


def test_the_order_of_what_was_before_counts() -> None:
    # In one layer without rotary positions, attention would not see the order of earlier tokens.
    config = EngineConfig(hidden=64, layers=1, experts=4, top_k=2, max_model_len=64, kv_tokens=64)
    model = Decoder(config)
    last: list[torch.Tensor] = []
    for tokens in ([5, 6, 7, 8, 9], [8, 7, 6, 5, 9]):
        places = torch.arange(5)
        span = SequenceSpan(0, 5, 0, BlockTable([0], torch.device("cpu")))
        batch = StepBatch(torch.tensor(tokens), places, places, [span], torch.tensor([4]))
        last.append(model.forward(batch, KVCache(config)))
    assert (last[0] - last[1]).abs().max() > 1e-2


def test_the_longest_context_does_not_change_the_weights() -> None:
    longer = Decoder(replace(CONFIG, max_model_len=2048))
    assert isinstance(MODEL.experts, ResidentExperts)
    assert isinstance(longer.experts, ResidentExperts)
    assert all(torch.equal(one, other) for one, other in zip(MODEL.experts.down, longer.experts.down, strict=True))
    assert torch.equal(MODEL.weights.positions, longer.weights.positions[:1024])


def test_position_counts_beside_content() -> None:
    cache = KVCache(CONFIG)
    one = compute(cache, IN_ORDER, 0, 2)
    assert (one[0] - one[1]).abs().max() > 1.0


def test_experts_one_by_one_equal_experts_gathered() -> None:
    experts = ResidentExperts(Seeded(5, CONFIG), CONFIG)
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(12, 64, generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:2] for _ in range(12)])
    weights = torch.rand(12, 2, generator=generator)
    by_hand = torch.zeros(12, 64)
    for token in range(12):
        for place in range(2):
            expert = int(ids[token, place])
            both = experts.gate_up[1][expert] @ hidden[token]
            inner = torch.nn.functional.silu(both[: experts.inner]) * both[experts.inner :]
            by_hand[token] += weights[token, place] * (experts.down[1][expert] @ inner)
    torch.testing.assert_close(gathered(experts.parts(1, ids), hidden, weights), by_hand, **CLOSE)
    torch.testing.assert_close(by_expert(experts.parts(1, ids), hidden, weights), by_hand, **CLOSE)


def test_routing_is_skewed_and_differs_by_layer() -> None:
    config = EngineConfig(layers=2)
    model = Decoder(config)
    states = torch.nn.functional.rms_norm(torch.randn(2000, 128, generator=torch.Generator().manual_seed(3)), (128,))
    counts = [
        torch.bincount(model.route(layer, states)[0].flatten(), minlength=32).sort(descending=True)
        for layer in model.weights.layers
    ]
    for found in counts:
        assert found.values[:8].sum() > 2 * found.values[-16:].sum()
    assert counts[0].indices[:8].tolist() != counts[1].indices[:8].tolist()
    ids, weights = model.route(model.weights.layers[0], states)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(2000))
    assert all(len(set(row)) == 4 for row in ids[:50].tolist())


def test_a_seed_means_these_weights() -> None:
    one, same, other = (Seeded(seed, CONFIG).tensor(3, 5, std=1.0) for seed in (0, 0, 1))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    # Uniform draws of a Mersenne twister, scaled: exact on every machine.
    assert one[0, :3].tolist() == pytest.approx([-0.0129676, 0.9291475, -1.4255559], abs=1e-6)
    # The order of the draws is part of what a seed means: profiles and traces name the model by its seed.
    experts = MODEL.experts
    assert isinstance(experts, ResidentExperts)
    last = [tensor[7, 63, 0].item() for tensor in (*experts.gate_up, *experts.down)]
    assert last == pytest.approx([0.0477600, -0.1891246, -0.4025966, 0.0233021], abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"hidden": 100}, "--hidden 100"),
        ({"top_k": 9, "experts": 8}, "--top-k 9"),
        ({"layers": 0}, "--layers 0"),
        ({"device": "tpu"}, "--device tpu"),
        ({"kv_tokens": 16}, "--kv-tokens 16"),
        ({"max_num_batched_tokens": 4}, "--max-num-batched-tokens 4"),
    ],
)
def test_impossible_shapes_are_refused_by_flag(flags: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        EngineConfig(**flags)  # pyright: ignore[reportArgumentType]
