"""The offload counters on their way from the engine's page through samples into the run's result and report."""

from __future__ import annotations

import io
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from builders import T0, alive, ended, judged, kernel_live, sent, turns
from soakrig.engine.embedded.config import EngineConfig
from soakrig.engine.embedded.settings import Settings
from soakrig.engine.offload import counters as engine
from soakrig.engine.offload.metrics import OffloadMetrics, window_report
from soakrig.engine.offload.plan import OffloadPlan
from soakrig.errors import UsageError
from soakrig.record import offload as record
from soakrig.record.events import SampleTaken
from soakrig.record.result import Result
from soakrig.reports.series import Series
from soakrig.reports.terminal import print_report
from soakrig.soak.watch.metrics import parse_page

CONFIG = EngineConfig(layers=3)
TWO_GB = 2 * 32 * 3 * 128 * 128 * 4 / 2**30
SMALL = {
    "steps": 10,
    "accesses": 40,
    "hits": 25,
    "unique": 30,
    "unique_hits": 18,
    "clean_steps": 2,
    "fills": 9,
    "evictions": 5,
    "staged": 3,
}
LARGE = {"steps": 2, "accesses": 200, "hits": 90, "unique": 50, "unique_hits": 20, "staged": 30, "groups": 2}
RESIDENT = {"steps": 12, "accesses": 999}


def plan(**environment: str) -> OffloadPlan:
    return OffloadPlan.build(Settings.from_environment(environment), CONFIG.model_shape)


TWO_OF_THREE = plan(CPU_OFFLOAD_GB=f"{TWO_GB:.9f}", VLLM_MOE_HOT_SLOTS="8")


def path(times: int, **counts: int) -> list[int]:
    return [times * counts.get(name, 0) for name in engine.COUNTERS]


def moved(times: int, bad: int = 0) -> list[list[list[int]]]:
    """Counters of two offloaded layers and a resident one."""
    offloaded = [path(times, **SMALL), path(times, **LARGE)]
    resident = path(times, **RESIDENT)
    resident[engine.COUNTERS.index("bad_ids")] = bad
    return [offloaded, offloaded, [resident, path(0)]]


def page(history: engine.History, plan: OffloadPlan = TWO_OF_THREE) -> dict[str, float]:
    """A sample of the metrics watcher, through the page's text."""
    registry = CollectorRegistry()
    registry.register(OffloadMetrics("embedded", plan, history.whole))
    return parse_page(generate_latest(registry).decode())


def sample(at: float, history: engine.History, plan: OffloadPlan = TWO_OF_THREE) -> SampleTaken:
    return SampleTaken(at, at, "metrics", {"generation_tokens": at, **page(history, plan)})


def run_of(*samples: SampleTaken) -> Result:
    return judged(kernel_live(), samples[0], *turns(1, 3), *samples[1:], alive(), ended()).result()


def history(step: int, times: int, bad: int = 0) -> engine.History:
    found = engine.History(3)
    if step:
        found.add(step, moved(times, bad))
    return found


def test_the_record_counts_what_the_engine_counts() -> None:
    assert (*engine.COUNTERS, "bytes_moved") == record.COUNTERS
    assert record.PATHS == engine.PATHS
    assert record.WARM_STEPS == engine.WINDOW_STEPS


def test_a_page_becomes_sums_over_layers_with_the_paths_apart() -> None:
    found = page(history(7, 1, bad=3))
    assert set(found) == set(record.NAMES)
    assert found["moe_engine_steps"] == 7
    for name, count in SMALL.items():
        assert found[f"moe_small_{name}"] == 2 * count
    for name, count in LARGE.items():
        assert found[f"moe_large_{name}"] == 2 * count
    row = TWO_OF_THREE.layers[0].row_bytes
    assert found["moe_small_bytes_moved"] == 2 * row * (SMALL["fills"] + SMALL["staged"])
    assert found["moe_large_bytes_moved"] == 2 * row * LARGE["staged"]
    assert found["moe_small_bad_ids"] == 3, "of the resident layer"


def test_an_engine_that_offloads_nothing_shows_nothing_before_its_first_bad_id() -> None:
    assert page(history(0, 0), plan()) == {}
    assert page(history(0, 0))["moe_engine_steps"] == 0
    found = page(history(5, 1, bad=1), plan())
    assert found["moe_small_bad_ids"] == 1
    assert found.keys().isdisjoint({"moe_small_accesses", "moe_small_steps", "moe_small_hits"})


def test_a_warm_window_is_measured_and_each_rate_has_its_name() -> None:
    result = run_of(sample(T0 - 1, history(300, 5)), sample(T0 + 20, history(900, 9)))
    found = result.offload
    assert found is not None
    assert (found.kind, found.first_step, found.last_step) == ("measured", 300, 900)
    assert found.hit_rate.model_dump() == pytest.approx({"per_access": 25 / 40, "per_unique": 0.6, "per_step": 0.2})
    assert found.misses_per_step_per_layer == pytest.approx(1.2)
    assert found.large.hit_rate.per_unique == pytest.approx(0.4)
    assert found.large.misses_per_step_per_layer == pytest.approx(15.0)
    row = TWO_OF_THREE.layers[0].row_bytes
    assert found.bytes_moved == 4 * 2 * row * (9 + 3 + 30)
    assert found.counters["small"]["evictions"] == 4 * 2 * 5
    assert found.bad_ids == 0
    assert result.verdict == "pass"
    assert Result.from_json(result.to_json()) == result
    older = result.to_json()
    del older["offload"]
    assert Result.from_json(older).offload is None, "a result from before this part is still one"


def test_a_window_with_the_cold_start_in_it_is_uncontrolled() -> None:
    for first in (0, 99):
        found = run_of(sample(T0 - 1, history(first, 0)), sample(T0 + 20, history(900, 9))).offload
        assert found is not None
        assert found.kind == "uncontrolled"


def test_no_step_gives_no_rate() -> None:
    found = run_of(sample(T0 - 1, history(0, 0)), sample(T0 + 20, history(0, 0))).offload
    assert found is not None
    assert found.hit_rate.model_dump() == {"per_access": None, "per_unique": None, "per_step": None}
    assert found.misses_per_step_per_layer is None


def test_an_engine_without_such_counters_has_no_part() -> None:
    plain = [SampleTaken(at, at, "metrics", {"generation_tokens": at}) for at in (T0 - 1, T0 + 20)]
    assert run_of(*plain).offload is None
    other = SampleTaken(T0, T0, "process", {"moe_small_bad_ids": 5.0})
    assert run_of(*plain, other).offload is None


def test_only_bad_ids_of_the_run_itself_fail_it() -> None:
    before = run_of(sample(T0 - 1, history(300, 5, bad=2)), sample(T0 + 20, history(900, 9, bad=2)))
    assert before.verdict == "pass"
    result = run_of(sample(T0 - 1, history(300, 5, bad=2)), sample(T0 + 20, history(900, 9, bad=5)))
    assert (result.verdict, result.exit_code) == ("fail", 1)
    assert result.offload is not None
    assert result.offload.bad_ids == 3
    assert "3 expert ids out of range in the engine's routing" in result.reasons


def test_counters_that_appear_in_mid_run_began_at_nothing() -> None:
    """A resident engine shows them from its first bad id on."""
    bare = SampleTaken(T0 - 1, T0 - 1, "metrics", {"generation_tokens": 1.0})
    result = run_of(
        bare, sample(T0 + 5, history(900, 0, bad=1), plan()), sample(T0 + 9, history(950, 0, bad=2), plan())
    )
    assert result.offload is not None
    assert result.offload.bad_ids == 2
    assert any(reason.startswith("2 expert ids") for reason in result.reasons)


def test_a_restarted_engine_loses_no_count() -> None:
    result = run_of(
        sample(T0 - 1, history(300, 5, bad=1)), sample(T0 + 5, history(900, 9, bad=4)),
        sample(T0 + 9, history(20, 1, bad=2)), sample(T0 + 12, history(40, 2, bad=2)),
    )  # fmt: skip
    found = result.offload
    assert found is not None
    assert found.bad_ids == 3 + 2
    assert found.counters["small"]["steps"] == 2 * 10 * (4 + 2)
    assert (found.kind, found.first_step) == ("uncontrolled", 0)


def shown(result: Result) -> str:
    stream = io.StringIO()
    print_report(Console(file=stream, width=100, highlight=False), result, Series(), None)
    return " ".join(stream.getvalue().split())


def test_the_report_says_which_rate_is_which() -> None:
    text = shown(run_of(sample(T0 - 1, history(300, 5)), sample(T0 + 20, history(900, 9))))
    assert "hits 62.5 % per access, 60.0 % per unique expert, 20.0 % per step; 1.2 misses per step and layer" in text
    assert "(measured; engine steps 300 to 900)" in text
    assert "bad expert id" not in text
    cold = shown(run_of(sample(T0 - 1, history(0, 0)), sample(T0 + 20, history(900, 9, bad=1))))
    assert "uncontrolled, cold start included" in cold
    assert "1 bad expert id" in cold
    assert "expert offload" not in shown(judged(kernel_live(), sent(1, T0)).result())


def test_a_window_is_asked_for_by_both_of_its_steps() -> None:
    kept = engine.History(3)
    for step in range(1, 301):
        kept.add(step, moved(step))
    whole = window_report(TWO_OF_THREE, kept, {})
    assert (whole["kind"], whole["last_step"], set(whole["layers"])) == ("uncontrolled", 300, {"0", "1"})
    window = window_report(TWO_OF_THREE, kept, {"first_step": "100", "last_step": "300"})
    assert (window["kind"], window["engine_steps"]) == ("measured", 200)
    assert window["total"]["small"]["hits"] == 2 * 200 * SMALL["hits"]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"first_step": "100"}, "'first_step' alone"),
        ({"first_step": "100", "last": "200"}, "'last', which is no parameter"),
        ({"first_step": "1e2", "last_step": "200"}, "'1e2' is no engine step"),
        ({"first_step": "100", "last_step": "250"}, "nearest kept are 200 and 300"),
        ({"first_step": "200", "last_step": "100"}, "hold no step"),
    ]
    for query, says in wrong:
        with pytest.raises(UsageError, match=says):
            window_report(TWO_OF_THREE, kept, query)
