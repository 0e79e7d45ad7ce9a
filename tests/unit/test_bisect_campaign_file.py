"""The campaign file: what it says, what the command line changes, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.bisect.campaign_file import Campaign, merge_campaign, read_campaign
from soakrig.bisect.variables import parse_variables
from soakrig.errors import UsageError
from soakrig.reproducers.reproducer import LoadOptions

WHOLE = """
engine = "embedded"
reproducer = "agent-loop"
turns = 12
budget = "1h30m"
confidence = 0.95
flags = ["--threads=1"]
pairs = [["VLLM_MOE_DMA_STAGING", "--max-num-seqs"]]

[load]
tools = 5
max_tokens = 16

[settings]
OMP_NUM_THREADS = 1
HF_TOKEN = "hidden"

[variables]
VLLM_MOE_DMA_STAGING = [1, 0]
VLLM_MOE_HOT_SLOTS = [{ unset = true }, 8]
"--max-num-seqs" = [8, "1"]
"--no-prefix-cache" = [{ unset = true }, ""]
"""


def read(tmp_path: Path, text: str) -> Campaign:
    path = tmp_path / "campaign.toml"
    path.write_text(text)
    return read_campaign(path)


def test_a_whole_file(tmp_path: Path) -> None:
    campaign = merge_campaign(read(tmp_path, WHOLE), {})
    assert (campaign.turns, campaign.budget, campaign.confidence) == (12, 5400.0, 0.95)
    assert campaign.load.options() == LoadOptions(tools=5, max_tokens=16)
    control, all_off, first, *rest = campaign.arms
    assert dict(control.settings) == {"OMP_NUM_THREADS": "1", "HF_TOKEN": "hidden", "VLLM_MOE_DMA_STAGING": "1"}
    assert control.flags == ("--threads=1", "--max-num-seqs=8")
    assert control.unset == ("VLLM_MOE_HOT_SLOTS",)
    assert all_off.flags == ("--threads=1", "--max-num-seqs=1", "--no-prefix-cache")
    assert first.name == "VLLM_MOE_DMA_STAGING=0"
    assert rest[-1].name == "pair:VLLM_MOE_DMA_STAGING+--max-num-seqs"
    assert campaign.order(all_off).settings["VLLM_MOE_HOT_SLOTS"] == "8"


def test_it_survives_json_and_shows_no_secret(tmp_path: Path) -> None:
    campaign = read(tmp_path, WHOLE + 'MY_API_KEY = ["one-key", { unset = true }]\n')
    data = json.loads(json.dumps(campaign.to_json()))
    assert Campaign.from_json(data) == campaign
    assert list(data["variables"]) == list(campaign.variables)  # the order of the arms
    shown = json.dumps(campaign.shown())
    assert "hidden" not in shown
    assert "one-key" not in shown
    assert campaign.shown()["variables"]["VLLM_MOE_HOT_SLOTS"] == [{"unset": True}, "8"]


def test_the_command_line_wins(tmp_path: Path) -> None:
    base = read(tmp_path, WHOLE)
    merged = merge_campaign(
        base,
        {"turns": 3, "confidence": None, "budget": "2h"},
        load={"seed": 4, "tools": None},
        settings={"OMP_NUM_THREADS": "2", "NEW": "1"},
        flags=["--threads=2", "--layers=2"],
        variables=parse_variables(["VLLM_MOE_HOT_SLOTS=,4", "CUDA_LAUNCH_BLOCKING=,1"]),
        pairs=[("VLLM_MOE_DMA_STAGING", "VLLM_MOE_HOT_SLOTS")],
    )
    assert (merged.turns, merged.confidence, merged.budget, merged.load.seed, merged.load.tools) == (
        3,
        0.95,
        7200,
        4,
        5,
    )
    assert merged.settings == {"OMP_NUM_THREADS": "2", "HF_TOKEN": "hidden", "NEW": "1"}
    assert merged.flags == ["--threads=2", "--layers=2"]
    assert list(merged.variables) == [*base.variables, "CUDA_LAUNCH_BLOCKING"]
    assert merged.variables["VLLM_MOE_HOT_SLOTS"] == [None, "4"]
    assert [arm.name for arm in merged.arms if arm.role == "pair"] == [
        "pair:VLLM_MOE_DMA_STAGING+VLLM_MOE_HOT_SLOTS", "pair:VLLM_MOE_DMA_STAGING+--max-num-seqs",
    ]  # fmt: skip
    assert base == read(tmp_path, WHOLE)  # untouched


def test_variables_of_the_command_line_alone() -> None:
    merged = merge_campaign(Campaign(), {}, variables=parse_variables(["VLLM_MOE_DMA_STAGING=1,0"]))
    assert [arm.name for arm in merged.arms] == ["control", "VLLM_MOE_DMA_STAGING=0"]
    assert (merged.turns, merged.budget, merged.confidence, merged.engine) == (60, 28800, 0.99, "embedded")


def test_another_engine_drops_the_files_model(tmp_path: Path) -> None:
    base = read(tmp_path, 'engine = "vllm"\nmodel = "/m"\n[variables]\nVLLM_MOE_DMA_STAGING = [1, 0]\n')
    assert merge_campaign(base, {}).model == "/m"
    assert merge_campaign(base, {"engine": "embedded"}).model == ""


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("engin = 'embedded'", "engin is no key of a campaign.*\n.*engine was probably meant"),
        ("tools = 3", "tools is no key of a campaign.*\n.*tools belongs under"),
        ("[load]\ntolls = 3", "load.tolls is no key of a campaign.*\n.*load.tools was probably meant"),
        ("turns = '60'", "turns = '60': input should be a valid integer"),
        ("turns = 0", "turns = 0: .*greater than or equal to 1"),
        ("budget = '8 hours'", "budget = '8 hours'.*8h, 90m or 1h30m"),
        ("confidence = 1.0", "confidence = 1.0: input should be less than 1"),
        ("flags = ['threads']", "flags.0 = 'threads'"),
        ("[settings]\n'A B' = '1'", "settings.A B"),
        ("[settings]\nA = 1.5", "settings.A = 1.5"),
        ("[variables]\nA = '1,0'", "variables.A = '1,0': input should be a valid list"),
        ("[variables]\nA = [true, false]", "variables.A.0 = True"),
        ("[variables]\nA = [{unst = true}, 1]", "variables.A.0 = {'unst': True}"),
        ("pairs = [['A']]", "pairs.0 = .*at least 2"),
        ("format = 2", "format = 2: input should be 1"),
        ("turns = 0\nconfidence = 2", "turns = 0.*confidence = 2"),
        ("turns = ", "is no TOML"),
    ],
)
def test_a_file_is_refused_with_its_name_the_key_and_what_was_expected(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        read(tmp_path, text)
    assert "campaign.toml" in caught.value.message
    assert caught.value.remedy


def test_a_file_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no\.toml cannot be read"):
        read_campaign(tmp_path / "no.toml")
    (tmp_path / "b.toml").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is no TOML"):
        read_campaign(tmp_path / "b.toml")


@pytest.mark.parametrize(
    ("given", "words", "match"),
    [
        ({"engine": "embeded"}, ["A=1,0"], "'embedded' was meant"),
        ({"engine": "vllm"}, ["A=1,0"], "--engine vllm needs a model"),
        ({"reproducer": "agent-lop"}, ["A=1,0"], "'agent-loop' was meant"),
        ({}, [], "no variable"),
        ({}, ["VLLM_MOE_DMA_STAGGING=1,0"], "VLLM_MOE_DMA_STAGING was probably meant"),
        ({}, ["VLLM_MOE_DMA_STAGING=1,"], "both 1"),
        ({}, ["--arg:--thread=1,2"], "arm control: --thread=1 is no flag"),
        ({}, ["VLLM_MOE_HOT_SLOTS=8,", "CPU_OFFLOAD_GB=1,0"], "arm CPU_OFFLOAD_GB=0: .*does not go with"),
        ({"turns": 0}, ["A=1,0"], "the command line: turns = 0"),
    ],
)
def test_the_effective_campaign_is_refused_before_anything_starts(
    given: dict[str, object], words: list[str], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        merge_campaign(Campaign(), given, variables=parse_variables(words))
