"""``soak plan``: what is printed, what is refused with which exit code, and JSON on standard output alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from plan_builders import BUDGET, captured, raw, traffic
from soakrig.cli.main import invoke
from soakrig.engine.offload.slot_map import SlotMap, read_slot_map, write_slot_map
from soakrig.engine.planning.replay import replay_trace, uniform_slots
from soakrig.engine.planning.trace import TraceShape, open_trace
from soakrig.engine.vllm.tiny import make_tiny
from soakrig.engine.vllm.tiny_spec import TinySpec

LAYERS, TOP_K, EXPERTS = 4, 2, 16
SHAPE = ["--layers", "4", "--top-k", "2", "--experts", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("plan")
    ids = traffic(1200, LAYERS, TOP_K, EXPERTS)
    raw(found / "t.i16", ids)
    captured(found / "t.trace", [ids[:1], ids[1:3], ids[3:40]], EXPERTS)
    (found / "cut.i16").write_bytes((found / "t.i16").read_bytes()[:-3])
    (found / "card.toml").write_text(BUDGET)
    (found / "over.toml").write_text(BUDGET.replace('"39.2 GB"', '"90 GiB"'))
    (found / "gb.toml").write_text(BUDGET.replace('"48 GiB"', '"48 GB"'))
    (found / "bare.toml").write_text(BUDGET[: BUDGET.index("[step]")])
    make_tiny(found / "tiny", TinySpec(layers=2, experts=8, top_k=2, hidden=64), force=False)
    write_slot_map(str(found / "map.json"), SlotMap(EXPERTS, {0: 2, 1: 6, 2: 4, 3: 4}))
    write_slot_map(str(found / "foreign.json"), SlotMap(32, {0: 2}))
    return found


def run(folder: Path, capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    words = [str(folder / word) if (folder / word).exists() and word else word for word in argv]
    assert invoke(["plan", *words]) == code
    told = capsys.readouterr()
    return told.out, told.err


def as_json(folder: Path, capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    out, _ = run(folder, capsys, *argv, "--json")
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.mark.parametrize("policy", ["lru", "static", "lfru", "clock", "opt"])
@pytest.mark.parametrize("semantics", ["step", "sequential"])
def test_replay_prints_the_contract(
    folder: Path, capsys: pytest.CaptureFixture[str], policy: Any, semantics: Any
) -> None:
    argv = ["replay", "t.i16", *SHAPE, "--slots", "5", "--policy", policy, "--semantics", semantics]
    planned = open_trace(str(folder / "t.i16"), TraceShape(LAYERS, TOP_K, EXPERTS))
    expected = replay_trace(planned, uniform_slots(planned, 5), policy, semantics)
    found = as_json(folder, capsys, *argv)
    assert found == expected.to_json()
    assert (found["policy"], found["semantics"], found["accesses"]) == (policy, semantics, 1200 * LAYERS * TOP_K)
    out, err = run(folder, capsys, *argv)
    assert f"misses {found['misses']:,} of" in out
    assert "1,200 decode rows, 4 layers, top-2 of 16" in err


def test_replay_takes_maps_arenas_and_engines_traces(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(folder, capsys, "replay", "t.i16", *SHAPE, "--map", "map.json")
    assert [one["slots"] for one in found["per_layer"]] == [2, 6, 4, 4]
    arena = as_json(folder, capsys, "replay", "t.trace", "--slots", "arena:16")
    assert [one["slots"] for one in arena["per_layer"]] == [None] * 4
    assert arena["rows"] == {"decode": 3, "prefill": 37, "padding": 0, "left_out": 0}
    kept = as_json(folder, capsys, "replay", "t.i16", *SHAPE, "--slots", "4", "--only-layers", "1-2")
    assert [one["layer"] for one in kept["per_layer"]] == [1, 2]
    assert "in one arena" in run(folder, capsys, "replay", "t.trace", "--slots", "arena:16")[0]


def test_curve(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = as_json(folder, capsys, "curve", "t.i16", *SHAPE, "--rows-per-step", "2")
    assert whole["sizes"] == list(range(EXPERTS + 1))
    assert whole["misses_per_step_per_layer"] == sorted(whole["misses_per_step_per_layer"], reverse=True)
    some = as_json(folder, capsys, "curve", "t.i16", *SHAPE, "--policy", "clock", "--sizes", "4,8-9")
    replayed = as_json(folder, capsys, "replay", "t.i16", *SHAPE, "--policy", "clock", "--slots", "8")
    assert some["sizes"] == [4, 8, 9]
    assert some["misses_per_step_per_layer"][1] == replayed["misses_per_step_per_layer"]
    assert sum(one[1] for one in some["per_layer"].values()) == replayed["misses"]
    held_out = as_json(folder, capsys, "curve", "t.i16", *SHAPE, "--policy", "static", "--train", "0.5")
    assert held_out["misses_per_step_per_layer"][0] == TOP_K
    out, _ = run(folder, capsys, "curve", "t.i16", *SHAPE)
    assert "one more saves" in out


def test_allocate_writes_the_map_that_replay_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out_file = str(tmp_path / "best.json")
    found = as_json(
        folder, capsys, "allocate", "t.i16", *SHAPE, "--total", "20", "--policy", "static", "--out", out_file
    )
    best = found["maps"][-1]
    assert [one["name"] for one in found["maps"]] == ["uniform", "demand", "greedy", "best"]
    assert read_slot_map(out_file).slots == {int(layer): count for layer, count in best["slots"].items()}
    replayed = as_json(folder, capsys, "replay", "t.i16", *SHAPE, "--map", out_file, "--policy", "static")
    assert replayed["misses"] == best["misses"]
    assert best["misses_change"] <= 0
    for argv in (["--total", "20", "--train", "0.5"], ["--total", "400 B", "--row", "20 B"]):
        out, _ = run(folder, capsys, "allocate", "t.i16", *SHAPE, *argv)
        assert "best" in out
        assert "20" in out


def test_screen(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["screen", "t.i16", *SHAPE, "--slots", "4", "--map", "map.json", "--arena", "--best-map", "--predict"]
    found = as_json(folder, capsys, *argv, "--budget", "card.toml")
    assert [one["policy"] for one in found["candidates"]] == [
        "lru",
        "static",
        "lfru",
        "clock",
        "opt",
        "lru",
        "lru",
        "lru",
    ]
    assert {one["slots"] for one in found["candidates"]} == {16}
    assert all(one["step"]["kind"] == "modelled" for one in found["candidates"])
    assert len(found["predictors"]) == 12
    assert all(isinstance(one["fits"], bool) for one in found["predictors"])
    out, _ = run(folder, capsys, *argv)
    assert "predictors, judged on steps that they were not fitted on" in out
    assert "adjacent layer" in out


def test_budget_and_levers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(folder, capsys, "budget", "card.toml")
    assert found["unattributed"]["amount"]["unit"] == "B"
    out, _ = run(folder, capsys, "budget", "card.toml")
    assert "UNATTRIBUTED" in out
    assert "34.25" in out
    levers = as_json(folder, capsys, "levers", "card.toml")
    assert levers["levers"][0]["name"] == "KV cache to host memory"
    assert levers["levers"][0]["gain"] == pytest.approx(0.1635, abs=1e-3)
    assert levers["ceiling"]["factor"] == pytest.approx(1.783, abs=1e-3)
    out, _ = run(folder, capsys, "levers", "card.toml")
    assert "if every miss were free: 1.78 x" in out
    assert "+20.3%" in out


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(folder, capsys, "inspect", "tiny", "--slots", "3", "--device", "0.5GiB")
    placed = found["placement"]
    assert placed["left"]["value"] == 2**29 - placed["device"]["value"]
    assert found["experts"] == [8]
    out, _ = run(folder, capsys, "inspect", "tiny")
    assert "routed experts" in out
    assert "top-2" in out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["replay", "t.i16", *SHAPE], "one of the three was expected"),
        (["replay", "t.i16", *SHAPE, "--slots", "4", "--as-captured"], "one of the three was expected"),
        (["replay", "t.i16", *SHAPE, "--slots", "-4"], "a whole number of slots"),
        (["replay", "t.i16", *SHAPE, "--slots", "17"], "layer 0 is given 17 slots; 0 to 16"),
        (["replay", "t.i16", *SHAPE, "--slots", "4", "--policy", "lfu"], "'lfru' was probably meant"),
        (["replay", "t.i16", *SHAPE, "--slots", "4", "--semantics", "steps"], "'step' was probably meant"),
        (["replay", "t.i16", *SHAPE, "--slots", "arena:9", "--policy", "opt"], "'opt' is none of static"),
        (["replay", "t.i16", *SHAPE, "--slots", "arena:9", "--semantics", "sequential"], "as the engine ran, in steps"),
        (["replay", "t.i16", *SHAPE, "--as-captured"], "does not say how its engine was offloaded"),
        (["replay", "t.i16", *SHAPE, "--map", "foreign.json"], "made for 32 experts a layer, and the trace has 16"),
        (["replay", "t.i16", *SHAPE, "--map", "card.toml"], "is no slot map"),
        (["replay", "t.i16", "--slots", "4"], "its shape has to be said"),
        (["replay", "cut.i16", *SHAPE, "--slots", "4"], "and 13 bytes over"),
        (["replay", "t.i16", "--layers", "7", *SHAPE[2:], "--slots", "4"], "over; whole rows"),
        (["replay", "t.i16", "--layers", "6", *SHAPE[2:], "--slots", "4"], "repeat themselves every 4 groups of 2"),
        (["replay", "t.i16", *SHAPE[:-1], "12", "--slots", "4"], "-1 to 11 was expected"),
        (["replay", "t.trace", "--layers", "5", "--slots", "4"], "written with --layers 4, and 5 was given"),
        (["replay", "nowhere", *SHAPE, "--slots", "4"], "cannot be read"),
        (["replay", "t.i16", *SHAPE, "--slots", "4", "--only-layers", "3-9"], "has no layer"),
        (["replay", "t.i16", *SHAPE, "--slots", "4", "--only-layers", "b"], "is no number or range"),
        (["curve", "t.i16", *SHAPE, "--policy", "opt"], "has no curve in one pass"),
        (["curve", "t.i16", *SHAPE, "--sizes", "4,99"], "'99' is no number or range from 0 to 16"),
        (["curve", "t.i16", *SHAPE, "--train", "0.5"], "LRU is fitted to nothing"),
        (["allocate", "t.i16", *SHAPE, "--total", "999"], "999 slots for 4 layers of 0 to 16 each: 0 to 64"),
        (["allocate", "t.i16", *SHAPE, "--total", "48 GB", "--row", "20 B"], "has two readings"),
        (["allocate", "t.i16", *SHAPE, "--total", "48 GiB"], "a whole number of slots was expected"),
        (["allocate", "t.i16", *SHAPE, "--total", "9", "--out", "/nowhere/map.json"], "cannot be written"),
        (["screen", "t.i16", *SHAPE, "--slots", "5", "--map", "map.json"], "map.json has 16 slots and uniform 5 20"),
        (["budget", "gb.toml"], "has two readings: 48,000,000,000 B"),
        (["budget", "over.toml"], "the budget sums above its capacity"),
        (["budget", "card.toml", "--engine-log", "card.toml"], "has no line on memory"),
        (["levers", "bare.toml"], "[curve] with points, or --trace is missing"),
        (["inspect", "tiny", "--device", "1 GiB"], "--device without --offload or --slots"),
        (["inspect", "tiny", "--offload", "125 GB"], "has two readings"),
        (["inspect", "tiny", "--slots", "9"], "9 slots in layer 0, which has 8 experts"),
        (["inspect", "nowhere"], "is not there"),
        (["relpay"], "Did you mean 'replay'"),
    ],
)
def test_bad_input_is_told_and_ends_with_64(
    folder: Path, capsys: pytest.CaptureFixture[str], argv: list[str], says: str
) -> None:
    out, err = run(folder, capsys, *argv, code=64)
    assert says in err
    assert not out
    if argv[-1] != "relpay":
        out, _ = run(folder, capsys, *argv, "--json", code=64)
        assert says in (found := json.loads(out))["error"] + found["remedy"]
        assert found["exit_code"] == 64


def test_a_lever_can_be_priced_on_a_traces_own_curve(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = BUDGET[: BUDGET.index("[curve]")].replace("count = 5792\nlayers = 75", "count = 24\nlayers = 4")
    text = text.replace("misses = 4.24\naccesses = 16", "misses = 0.6\naccesses = 2")
    (tmp_path / "card.toml").write_text(text)
    found = as_json(folder, capsys, "levers", str(tmp_path / "card.toml"), "--trace", "t.i16", *SHAPE)
    assert found["curve"] == "derived"
    assert found["levers"][0]["curve_ended"], "48 GiB hold every expert of this model"
    assert found["levers"][0]["gain"] <= found["ceiling"]["gain"]
