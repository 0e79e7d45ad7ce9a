"""Edges of the offload core that random traffic seldom meets: exact sizes, exact fits, broken caches, two engines."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from soakrig.engine.embedded.settings import Settings
from soakrig.engine.offload.bank import Bank
from soakrig.engine.offload.core import ExpertStore
from soakrig.engine.offload.counters import COUNTERS
from soakrig.engine.offload.host_memory import HostMemory
from soakrig.engine.offload.optimum import fewest_misses
from soakrig.engine.offload.plan import LayerPlan, LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.policy import LFRU_SHIFT, Policy, victim
from soakrig.engine.offload.profile import read_profile
from soakrig.engine.offload.settings import OffloadSettings
from soakrig.engine.offload.trace import TraceHeader, TraceWriter, read_trace
from soakrig.errors import EngineStartError, SoakrigError, UsageError

CPU = torch.device("cpu")


def plan(experts: int, top_k: int = 8, slots: int = 4, layers: int = 1, **fields: object) -> OffloadPlan:
    """Every layer offloaded; a row is one float."""
    shapes = tuple(LayerShape(layer, experts, 4) for layer in range(layers))
    whole = OffloadPlan(
        model=ModelShape("model", shapes, top_k), layers=tuple(LayerPlan(one.layer, experts, 4, slots, "lru", ())
        for one in shapes), arena=0, staging=True, groups=True, staging_rows=64, asked_gb=None, trace=None, skew=None,
        warnings=(),
    )  # fmt: skip
    return replace(whole, **fields)


def store(one: OffloadPlan, resident: int = 0) -> ExpertStore:
    """A finished store; the first ``resident`` layers stay."""
    one = replace(one, layers=one.layers[resident:])
    made = ExpertStore(one, CPU, 80)
    for shape in one.model.layers:
        made.add_layer(shape.layer, {"weight": torch.arange(float(shape.experts)).view(-1, 1)})
    made.finish()
    return made


def counted(made: ExpertStore, layer: int, path: int) -> dict[str, int]:
    return dict(zip(COUNTERS, made.counters()[layer][path], strict=True))


def distinct(tokens: int, top_k: int) -> torch.Tensor:
    return torch.arange(tokens * top_k).view(tokens, top_k)


def test_a_mapping_is_as_long_as_the_pages_of_what_was_asked() -> None:
    memory = HostMemory()
    asked = 5 * mmap.PAGESIZE + 1
    memory.empty((asked,), torch.uint8).fill_(1)
    (region,) = memory.regions
    assert len(region.memory) == asked
    assert memory.resident() == 6 * mmap.PAGESIZE, "pages, and not the next power of two"
    assert memory.empty((0, 7), torch.float32).shape == (0, 7)
    assert memory.asked == asked


def test_a_refusal_by_the_gather_stops_the_engine_rather_than_compute_with_wrong_weights() -> None:
    made = store(plan(8, 2))
    made.begin_step(np.zeros(1, dtype=np.uint8))
    made.offloaded[0].staging.gather(np.array([99], dtype=np.int32), np.array([0], dtype=np.int32))
    with pytest.raises(SoakrigError, match="refused 1 ids of the slot cache's own books"):
        made.end_step()


def test_a_restart_forgets_the_profile_too(tmp_path: Path) -> None:
    made = store(plan(8, 2, skew=str(tmp_path / "p.json")))
    for ids in ([[1, 2]], [[3, 3]]):
        made.begin_step(np.zeros(1, dtype=np.uint8))
        list(made.parts(0, torch.tensor(ids)))
        made.end_step()
        if ids == [[1, 2]]:
            made.restart()
    made.close()
    assert read_profile(str(tmp_path / "p.json")).counts[0].tolist() == [0, 0, 0, 1, 0, 0, 0, 0]


def test_a_layer_that_was_not_routed_in_a_step_has_sentinels_in_the_trace(tmp_path: Path) -> None:
    path = str(tmp_path / "a.trace")
    made = store(plan(8, 2, layers=2, trace=path))
    for layers in ((0, 1), (0,)):
        made.begin_step(np.zeros(1, dtype=np.uint8))
        for layer in layers:
            list(made.parts(layer, torch.tensor([[4, 5]])))
        made.end_step()
    made.close()
    assert read_trace(path).ids.tolist() == [[[4, 5], [4, 5]], [[4, 5], [-1, -1]]]


def test_the_id_behind_the_last_expert_is_none_for_the_optimum() -> None:
    assert fewest_misses([np.array([5, 4])], 5, 1) == 1


@pytest.mark.parametrize(("missing", "groups"), [(64, 1), (65, 2)])
def test_what_fits_the_staging_rows_exactly_is_one_group(missing: int, groups: int) -> None:
    made = store(plan(80, 5, slots=0))
    ids = distinct(13, 5)
    ids[ids >= missing] = 0
    parts = list(made.parts(0, ids))
    assert (counted(made, 0, 1)["staged"], counted(made, 0, 1)["groups"], len(parts)) == (missing, groups, groups)
    assert [part.tokens for part in parts] == ([slice(0, 13)] if groups == 1 else [None, None])


def test_ranges_of_tokens_are_filled_to_the_last_staging_row() -> None:
    made = store(plan(128, 8, slots=0, split="rows"))
    assert [part.tokens for part in made.parts(0, distinct(16, 8))] == [slice(0, 8), slice(8, 16)]


def test_a_small_layer_step_is_one_part_of_whole_tokens() -> None:
    (part,) = store(plan(90, 8)).parts(0, distinct(8, 8))
    assert part.tokens == slice(0, 8)


def test_sixty_four_ids_are_small_and_sixty_five_are_not() -> None:
    made = store(plan(90, 1, layers=2), resident=1)
    for layer in (0, 1):
        for tokens in (64, 65):
            made.begin_step(np.zeros(tokens, dtype=np.uint8))
            list(made.parts(layer, distinct(tokens, 1)))
        assert [counted(made, layer, path)["accesses"] for path in (0, 1)] == [64, 65]


def test_banks_that_do_not_fit_are_refused() -> None:
    memory = HostMemory()
    made = ExpertStore(plan(8, 2), CPU, 64)
    with pytest.raises(EngineStartError, match="has 9 experts of 4 bytes"):
        made.add_bank(Bank(0, 9, {"weight": torch.zeros(9, 1)}, memory))
    with pytest.raises(EngineStartError, match="has 8 experts of 8 bytes"):
        made.add_bank(Bank(0, 8, {"weight": torch.zeros(8, 2)}, memory))
    made.add_bank(Bank(0, 8, {"weight": torch.zeros(8, 1)}, memory))
    with pytest.raises(EngineStartError, match="there is a bank already"):
        made.add_bank(Bank(0, 8, {"weight": torch.zeros(8, 1)}, memory))
    with pytest.raises(EngineStartError, match="none of those that the plan leaves"):
        made.add_foreign(0)


def test_one_arena_needs_one_row_shape_not_only_one_size() -> None:
    made = ExpertStore(plan(8, 2, layers=2, arena=3), CPU, 64)
    made.add_layer(0, {"weight": torch.zeros(8, 1)})
    made.add_layer(1, {"weight": torch.zeros(8, 2, dtype=torch.float16)})
    with pytest.raises(EngineStartError, match="2 different row shapes; one arena needs one"):
        made.finish()


def test_lfru_tells_rates_apart_that_differ_in_the_fourth_digit() -> None:
    """Three uses in a thousand steps against two in seven hundred: in small units both are nothing."""
    now = 10_000
    last = np.array([now + 1 - 1000, now + 1 - 700], dtype=np.int64)
    uses = np.array([3, 2], dtype=np.int64)
    keys, ref, clock = np.array([0, 1], dtype=np.int32), np.zeros(2, dtype=np.int32), np.zeros(2, dtype=np.int64)
    assert victim(int(Policy.LFRU), now, keys, last, uses, ref, clock) == 1
    assert (2**31 - 1) << LFRU_SHIFT < 2**63


def test_a_broken_cache_of_compiled_code_costs_no_start(tmp_path: Path) -> None:
    """As a power loss leaves it: the index files are there and empty."""
    code = (
        "import numpy; from soakrig.engine.offload.optimum import fewest_misses; "
        "print(fewest_misses([numpy.arange(2)], 4, 1))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )

    assert run().stdout == "2\n"
    indices = list(tmp_path.rglob("*.nbi"))
    assert indices
    for index in indices:
        index.write_bytes(b"")
    done = run()
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    assert "numba's cache is not used" in done.stderr


def test_two_engines_do_not_write_one_trace(tmp_path: Path) -> None:
    header = TraceHeader("model", 8, (0,), 2)
    first = TraceWriter(str(tmp_path / "a.trace"), header)
    with pytest.raises(UsageError, match="is being written by another engine"):
        TraceWriter(str(tmp_path / "a.trace"), header)
    first.append(np.zeros(1, dtype=np.uint8), np.array([[[1, 2]]], dtype=np.int16))
    first.close()
    assert len(list(read_trace(str(tmp_path / "a.trace")).steps())) == 1
    TraceWriter(str(tmp_path / "a.trace"), header).close()
    assert len(list(read_trace(str(tmp_path / "a.trace")).steps())) == 0, "a new trace replaces an old one"


@pytest.mark.parametrize("text", ["1_0", " 1", "\u0661", "1e"])
def test_a_number_of_gib_is_plain(text: str) -> None:
    with pytest.raises(UsageError, match="a number of GiB"):
        OffloadSettings.from_environment({"CPU_OFFLOAD_GB": text})


def test_what_this_engine_cannot_obey_is_refused() -> None:
    with pytest.raises(UsageError, match="VLLM_MOE_PREFILL_SPLIT is not obeyed here"):
        Settings.from_environment({"VLLM_MOE_PREFILL_SPLIT": "rows"})
    with pytest.raises(UsageError, match="no slot for a policy to decide about"):
        Settings.from_environment({"CPU_OFFLOAD_GB": "1", "VLLM_MOE_SLOT_POLICY": "lru"})
