"""`soak measure` on real engines: equal settings are equal, a stale slot and partial sums are not, slow is slow.

The faults are planted by ``tests/plants/sitecustomize.py``, which only a test puts on an engine's path.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from soakrig.cli.measure import app
from soakrig.errors import PreflightRefusedError, SoakrigError, UsageError
from soakrig.reproducers.measure.equivalence import EquivalencePlan, judge_equivalence, measure_equivalence
from soakrig.reproducers.measure.folder import MeasureFolder, read_observations
from soakrig.reproducers.measure.sides import Bench, Side, parse_side
from wire import loopback

PLANTS = Path(__file__).parent.parent / "plants"
SMALL = ("--experts=96", "--layers=2", "--hidden=64", "--threads=1")
OFFLOADED = {"CPU_OFFLOAD_GB": "1", "VLLM_MOE_HOT_SLOTS": "8"}


def measure(*argv: str) -> int:
    """`soak measure ...` in this process; its exit code."""
    return typer.main.get_command(app).main(args=list(argv), prog_name="soak measure", standalone_mode=False)


def compare(folder: Path, change: str, *flags: str, **plan: Any) -> dict[str, Any]:
    bench = Bench("embedded", settings=OFFLOADED, flags=(*SMALL, *flags))
    options = {"launches": 1, "prompts": 10, "tokens": 320, "cuts": 8, **plan}
    with MeasureFolder(folder, "equivalence", {}) as kept:
        return measure_equivalence(bench, Side("A"), parse_side("B", change), EquivalencePlan(**options), kept)


def test_identical_settings_are_equal_and_can_be_judged_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--launches", "1", "--prompts", "10", "--tokens", "160", "--cuts", "4", "--arg=--layers=1", "--json"]
    assert measure("equivalence", "default", "default", *options, "--runs-dir", str(tmp_path)) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["verdict"] == "pass"
    assert result["equal_bits"]
    assert result["change"]["places"] > 900
    assert result["control"]["cached"]["from_cache"] == 40
    assert result["control"]["cached"]["mean_abs_difference"] > 0, "cached places round in their own way"
    assert "equivalence: PASS" in err
    folder = Path(result["folder"])
    assert {path.name for path in folder.iterdir()} >= {"measure.json", "observations.jsonl", "measurement.json", "A1"}
    assert json.loads((folder / "measurement.json").read_text()) == result
    assert measure("show", str(folder), "--json") == 0
    assert json.loads(capsys.readouterr().out) == result


def test_staging_off_is_equal_to_staging_on(tmp_path: Path) -> None:
    found = compare(tmp_path, "VLLM_MOE_DMA_STAGING=0")
    assert (found["verdict"], found["equal_bits"]) == ("pass", True)
    settings = [json.loads(line) for line in next(tmp_path.rglob("observations.jsonl")).read_text().splitlines()]
    told = {
        one["side"]: one["settings"]["VLLM_MOE_DMA_STAGING"]["value"] for one in settings if one["what"] == "launch"
    }
    assert str(told["A"]) != str(told["B"]), "the engines say themselves that they differ"


def test_one_stale_copy_in_500_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLANTS))
    found = compare(tmp_path, "SOAKRIG_TEST_PLANT=stale")
    assert found["verdict"] == "fail"
    assert {one["name"] for one in found["questions"] if one["worse"]} >= {"tail"}
    assert found["change"]["largest"] > 1e-3


def test_partial_sums_in_bfloat16_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(PLANTS))
    found = compare(tmp_path, "SOAKRIG_TEST_PLANT=partial_sums", "--dtype=bfloat16", tokens=1000, cuts=24)
    assert found["verdict"] == "fail"
    assert {one["name"] for one in found["questions"] if one["worse"]} >= {"level"}
    assert found["ratio"]["low"] > 1.5


def test_partial_sums_in_float32_fail_although_they_are_within_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tenth of what a cached prefix does to the same numbers; an engine that repeats itself shows it all the same."""
    monkeypatch.setenv("PYTHONPATH", str(PLANTS))
    found = compare(tmp_path, "SOAKRIG_TEST_PLANT=partial_sums", launches=2)
    assert (found["verdict"], found["equal_bits"], found["size"]) == ("fail", False, "below")
    assert "where the control repeats itself to the bit" in found["reasons"][0]
    assert "--against cached" in found["reasons"][-1]
    assert found["ratio"]["high"] < 1
    seen = list(read_observations(next(tmp_path.iterdir())))
    tolerant = judge_equivalence(seen, EquivalencePlan(launches=2, basis="cached"))
    assert tolerant["verdict"] == "pass"
    assert "B does not compute the same" in tolerant["notes"][0]
    once = judge_equivalence([one for one in seen if not one["what"].startswith("again")], EquivalencePlan(launches=1))
    assert once["verdict"] == "inconclusive"
    assert "use --launches 2" in once["reasons"][0]


@pytest.mark.slow
def test_smaller_prefill_chunks_round_otherwise_and_pass(tmp_path: Path) -> None:
    found = compare(tmp_path, "--max-num-batched-tokens=100", "--dtype=bfloat16", prompts=24, tokens=1000, cuts=48,
                    basis="cached")  # fmt: skip
    assert found["verdict"] in ("pass", "inconclusive"), found["reasons"]
    assert not found["equal_bits"]


def taking(first_s: float, token_s: float) -> loopback.Handler:
    """A server whose answers take so long to begin, and so long a token."""

    async def answer(x: loopback.Exchange) -> None:
        await x.head()
        await asyncio.sleep(first_s)
        for part in loopback.words(12):
            await x.chunk(part)
            await asyncio.sleep(token_s)
        await x.chunk(loopback.delta(finish="stop") + loopback.usage(completion=12) + loopback.DONE)
        await x.end()

    return answer


def test_a_slower_first_token_and_a_faster_decode_are_two_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> int:
        async with loopback.serve(taking(0.02, 0.03)) as a, loopback.serve(taking(0.2, 0.003)) as b:
            options = ["--blocks", "3", "--prompts", "4", "--prompt-words", "5", "--json", "--runs-dir", str(tmp_path)]
            return await asyncio.to_thread(measure, "speed", a, b, *options)

    code = asyncio.run(run())
    result = json.loads(capsys.readouterr().out)
    figures = result["figures"]
    # A machine without time to spare makes it harder to tell, and never turns it round.
    assert figures["ttft_s"]["answer"] in ("slower", "cannot tell"), result["reasons"]
    assert figures["decode_s"]["answer"] in ("faster", "cannot tell"), result["reasons"]
    assert figures["ttft_s"]["ratio"]["estimate"] > 1 > figures["decode_s"]["ratio"]["estimate"]
    assert code == (1 if figures["ttft_s"]["answer"] == "slower" else 2)
    assert figures["ttft_s"]["A"]["kind"] == "measured"
    assert result["turns"] == 24
    assert measure("show", result["folder"], "--json") == code
    assert json.loads(capsys.readouterr().out) == result


def test_an_engine_that_dies_under_the_change_is_a_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--blocks", "2", "--prompts", "2", "--json", "--runs-dir", str(tmp_path), "--arg=--layers=1"]
    assert measure("speed", "default", """'SOAKRIG_PLANT={"action": "sigkill", "after": 2}'""", *options) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["simulated"]
    assert result["reasons"][0].startswith("B died or did not start")


def test_backends_accepted_refused_and_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant = '{"action": "one_token", "when": {"VLLM_MOE_DMA_STAGING": "0"}}'
    options = ["--set", f"SOAKRIG_PLANT={plant}", "--arg=--layers=1", "--runs-dir", str(tmp_path), "--json"]
    assert measure("backends", "VLLM_MOE_DMA_STAGING=1,0,maybe", *options) == 1
    result = json.loads(capsys.readouterr().out)
    rows = {row["value"]: row for row in result["rows"]}
    assert {value: row["state"] for value, row in rows.items()} == {"1": "accepted", "0": "wrong", "maybe": "refused"}
    assert "degenerate" in rows["0"]["why"]
    assert "VLLM_MOE_DMA_STAGING" in rows["maybe"]["why"]
    assert rows["1"]["ttft_s"] > 0
    assert rows["1"]["top1_agreement"] == 1.0


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for argv, says in (
        (["equivalence", "default", "A=1", "--by", "greedy-text"], "greedy-text is no evidence"),
        (["equivalence", "default", "A=1", "--against", "nothing"], "one of auto, cached, again"),
        (["speed", "http://127.0.0.1:9", "http://127.0.0.1:9/v1"], "same running engine"),
        (["speed", "default", "nonsense"], "neither NAME=VALUE"),
        (["speed", "default", "A=1", "--engine", "embeded"], "'embedded' was meant"),
        (["backends", "X=1"], "is no sweep"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            measure(*argv)
        assert caught.value.exit_code == 64
    with pytest.raises(UsageError) as caught:
        measure("equivalence", "default", "A=1", "--by", "greedy-text")
    assert "rounding" in caught.value.remedy
    with pytest.raises(PreflightRefusedError, match="no /start_profile"):
        measure("profile", "default", "--engine", "embedded")
    assert not any(tmp_path.glob("runs/*speed*")), "what is refused leaves nothing"


def test_an_engine_without_prompt_logprobs_is_refused(tmp_path: Path) -> None:
    async def plain(x: loopback.Exchange) -> None:
        if x.path == "/tokenize":
            await x.json({"count": 900, "tokens": [1] * 900})
        else:
            await x.json({"choices": [{"text": "x", "logprobs": None}]})

    async def run() -> SoakrigError:
        async with loopback.serve(plain) as a, loopback.serve(plain) as b:
            with pytest.raises(PreflightRefusedError, match="gives no prompt_logprobs") as caught:
                await asyncio.to_thread(measure, "equivalence", a, b, "--runs-dir", str(tmp_path), "--tokens", "200")
            return caught.value

    assert asyncio.run(run()).exit_code == 3
