"""Sides and sweeps as people write them, the table of backends, and the table of a decode step."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from soakrig.errors import PreflightRefusedError, RecordError, UsageError
from soakrig.reproducers.measure.backends import Sweep, judge_backends, parse_sweep
from soakrig.reproducers.measure.folder import MeasureFolder, read_observations, read_plan
from soakrig.reproducers.measure.profile import measure_profile
from soakrig.reproducers.measure.sides import Bench, Side, parse_side
from soakrig.reproducers.measure.step_table import kind_of, read_trace, step_table


def test_sides_are_settings_flags_or_a_url() -> None:
    side = parse_side("B", "VLLM_MOE_DMA_STAGING=0 --max-num-seqs=4 'X=a b'")
    assert side == Side("B", {"VLLM_MOE_DMA_STAGING": "0", "X": "a b"}, ("--max-num-seqs=4",))
    assert parse_side("A", "default") == parse_side("A", "  ") == Side("A")
    assert parse_side("A", "http://127.0.0.1:8000/v1/").url == "http://127.0.0.1:8000"
    assert Side("A").text() == "default"
    assert parse_side("A", "API_KEY=abc").text() != "API_KEY=abc", "secrets are hidden"
    order = Bench("embedded", "", {"C": "1"}, ("--layers=2",)).order(side)
    assert order.settings == {"C": "1", "VLLM_MOE_DMA_STAGING": "0", "X": "a b"}
    assert list(order.flags) == ["--layers=2", "--max-num-seqs=4"]


@pytest.mark.parametrize(
    ("text", "says"),
    [("nonsense", "neither NAME=VALUE"), ("http://127.0.0.1:1 A=1", "takes no settings"), ("A='1", "quotation"),
     ("http://x:abc", "no URL"), ("A=1 A=2", "twice"), ("1A=2", "no NAME=VALUE")],
)  # fmt: skip
def test_other_words_are_refused(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        parse_side("B", text)


def test_what_is_set_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="C is set in B and for both"):
        Bench(settings={"C": "1"}).order(parse_side("B", "C=0"))


def test_sweeps() -> None:
    assert parse_sweep("--moe-backend=marlin,triton") == ("--moe-backend", ("marlin", "triton"))
    assert Sweep("--x", ("a", "b")).side("a") == Side("a", flags=("--x=a",))
    assert Sweep("X", ("a", "b")).side("b") == Side("b", {"X": "b"})
    for text in ("--x", "--x=a", "--x=a,a", "--x=a,,b", "=a,b", "--=a,b"):
        with pytest.raises(UsageError, match="is no sweep"):
            parse_sweep(text)


def value(
    name: str, *, level: float = -2.0, first: list[str] | None = None, outcome: str = "ok"
) -> list[dict[str, Any]]:
    turn = {"value": name, "outcome": outcome, "why": "x", "ttft_s": 0.1, "decode_s": 0.01}
    english = {"what": "english", "value": name, "logprobs": [level] * 4, "first": first or list("abcd")}
    return [{"what": "accepted", "value": name}, {"what": "canary", **turn}, english, {"what": "turn", **turn}]


def table(*seen: list[dict[str, Any]], values: str) -> dict[str, Any]:
    found = judge_backends([one for part in seen for one in part], Sweep("--x", tuple(values)))
    return {**found, "states": {row["value"]: row["state"] for row in found["rows"]}}


def test_accepted_refused_loudly_and_accepted_and_wrong() -> None:
    refused = [{"what": "refused", "value": "c", "why": "needs another card"}]
    found = table(value("a"), value("b", first=["a", "b", "c", "x"]), refused, values="abc")
    assert found["states"] == {"a": "accepted", "b": "accepted", "c": "refused"}
    assert (found["verdict"], found["exit_code"]) == ("pass", 0)
    assert [row["top1_agreement"] for row in found["rows"]] == [1.0, 0.75, None]
    assert found["rows"][0]["perplexity"] == pytest.approx(7.389, abs=1e-3)
    garbage = value("b", level=-11.0, first=["!"] * 4)
    found = table(value("a"), garbage, values="ab")
    assert found["states"] == {"a": "accepted", "b": "wrong"}
    assert (found["verdict"], found["exit_code"]) == ("fail", 1)
    assert "a's at 0%" in found["rows"][1]["why"]
    first_wrong = table(value("b", level=-11.0, first=["!"] * 4), value("a"), values="ba")
    assert first_wrong["states"] == {"a": "accepted", "b": "wrong"}, "the order of values decides nothing"
    assert table(value("a"), value("b", outcome="degenerate"), values="ab")["states"]["b"] == "wrong"
    none = value("b")
    none[2]["logprobs"] = None
    assert table(value("a"), none, values="ab")["states"]["b"] == "wrong"
    dead = [{"what": "accepted", "value": "b"}, {"what": "dead", "value": "b", "why": "gone"}]
    assert table(value("a"), dead, values="ab")["states"]["b"] == "died"
    assert table(refused, [{**refused[0], "value": "d"}], values="cd")["exit_code"] == 2


def test_without_logprobs_canaries_alone_judge() -> None:
    seen = [one for one in value("a") if one["what"] != "english"]
    row = table(seen, values="ab")["rows"][0]
    assert row["state"] == "accepted"
    assert "canaries alone" in row["why"]


# -- a decode step -----------------------------------------------------------------------------------------------------


def event(name: str, ts: float, dur: float, cat: str, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid}


def gpu_trace() -> list[dict[str, Any]]:
    events = [event("execute_context_1(24)_generation_0(0)", 0, 900, "gpu_user_annotation")]
    events.append(event("ampere_bf16_gemm", 10, 800, "kernel"))
    for step in range(3):
        at = 1000.0 * (step + 1)
        events += [
            event("execute_context_0(0)_generation_1(1)", at, 900, "gpu_user_annotation"),
            event("Memcpy HtoD (Pinned -> Device)", at, 340 + step, "gpu_memcpy", 7),
            event("moe_wna16_marlin_gemm", at + 100, 36, "kernel"),
            event("sm90_xmma_gemm_bf16", at + 200, 190, "kernel"),
            event("flash_fwd_splitkv_kernel", at + 400, 5, "kernel"),
            event("rms_norm_kernel", at + 500, 14, "kernel"),
        ]
    events.append(event("sm90_xmma_gemm_bf16", 9000, 999, "kernel"))  # after the last step
    return events


def test_kernels_are_summed_by_kind_and_decode_step() -> None:
    table = step_table(gpu_trace())
    rows = {row["what"]: row["ms"] for row in table["rows"]}
    assert rows == pytest.approx({"copies and gather": 0.341, "dense GEMM": 0.19, "experts": 0.036,
                                  "norm, activation, other": 0.014, "attention": 0.005})  # fmt: skip
    assert table["rows"][0]["what"] == "copies and gather"
    assert (table["device"], table["steps"]) == ("gpu", 3)
    assert table["wall_ms"] == pytest.approx(0.9)
    assert table["busy_ms"] == pytest.approx(0.586)
    assert sum(row["share"] for row in table["rows"]) == pytest.approx(1.0)
    assert all(row["kind"] == "measured" for row in table["rows"])


def test_without_a_device_operators_count_without_what_is_nested_in_them() -> None:
    events = [
        event("execute_context_0(0)_generation_1(1)", 0, 1000, "user_annotation"),
        event("vllm::moe_forward", 0, 500, "cpu_op"),
        event("aten::mm", 100, 200, "cpu_op"),
        event("aten::linear", 600, 300, "cpu_op"),
        event("aten::addmm", 650, 200, "cpu_op"),
        event("aten::silu", 650, 40, "cpu_op", tid=2),
    ]
    table = step_table(events)
    rows = {row["what"]: row["ms"] for row in table["rows"]}
    assert rows["experts"] == pytest.approx(0.5), "a product within the experts is the experts'"
    assert rows["dense GEMM"] == pytest.approx(0.3)
    assert rows["norm, activation, other"] == pytest.approx(0.04)
    assert table["device"] == "cpu"


def test_a_trace_without_decode_steps_has_no_table() -> None:
    assert step_table([event("aten::mm", 0, 10, "cpu_op")]) is None
    assert step_table([event("execute_context_1(9)_generation_0(0)", 0, 10, "user_annotation")]) is None


@pytest.mark.parametrize(
    ("name", "kind"),
    [("void at::native::vectorized_gather_kernel", "copies and gather"), ("fused_moe_kernel", "experts"),
     ("cutlass_80_tensorop_bf16", "dense GEMM"), ("_C::onednn_mm", "dense GEMM"), ("aten::bmm", "dense GEMM"),
     ("aten::common", "norm, activation, other"), ("unified_attention_2d", "attention"),
     ("silu_and_mul", "norm, activation, other")],
)  # fmt: skip
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_traces_are_read_gzipped_or_not(tmp_path: Path) -> None:
    data = json.dumps({"traceEvents": [*gpu_trace(), {"ph": "M", "name": "process_name"}]}).encode()
    (tmp_path / "a.pt.trace.json").write_bytes(data)
    (tmp_path / "b.pt.trace.json.gz").write_bytes(gzip.compress(data))
    assert read_trace(tmp_path / "a.pt.trace.json") == read_trace(tmp_path / "b.pt.trace.json.gz") == gpu_trace()
    for raw in (b"no json", b"[]", b'{"traceEvents": 1}'):
        (tmp_path / "c.pt.trace.json").write_bytes(raw)
        with pytest.raises(RecordError, match="no trace of a torch profiler"):
            read_trace(tmp_path / "c.pt.trace.json")


def test_an_engine_without_a_profiler_is_refused(tmp_path: Path) -> None:
    with MeasureFolder(tmp_path, "profile", {}) as folder:
        with pytest.raises(PreflightRefusedError, match="no /start_profile"):
            measure_profile(Bench("embedded"), Side("x"), folder, 8)
        with pytest.raises(PreflightRefusedError, match="is not known"):
            measure_profile(Bench("embedded"), Side("x", url="http://127.0.0.1:9"), folder, 8)


def test_a_measurement_is_readable_after_any_cut(tmp_path: Path) -> None:
    with MeasureFolder(tmp_path, "speed", {"options": {"blocks": 2}}) as folder:
        folder.observe({"what": "turn", "n": 1})
        folder.observe({"what": "turn", "n": 2})
    assert read_plan(folder.path)["options"] == {"blocks": 2}
    path = folder.path / "observations.jsonl"
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert [one["n"] for one in read_observations(folder.path)] == [1, 2][: whole[:cut].count(b"\n")]
    path.write_bytes(b"{broken\n" + whole)
    with pytest.raises(RecordError, match="line 1 is no JSON"):
        list(read_observations(folder.path))
    with pytest.raises(RecordError, match="is no measurement"):
        read_plan(tmp_path)
    assert (folder.path.stat().st_mode & 0o777, path.stat().st_mode & 0o777) == (0o700, 0o600)
