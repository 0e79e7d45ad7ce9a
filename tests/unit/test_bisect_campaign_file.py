"""The campaign file: what it says, what the command line changes, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.bisect.campaign_file import Campaign, merge_campaign, read_campaign
from soakrig.bisect.variables import parse_variables
from soakrig.errors import RecordError, UsageError
from soakrig.record.outcome import CONTENT
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
    assert campaign.options == LoadOptions(tools=5, max_tokens=16)
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
        ("unit = 'tokens'", "unit = 'tokens': .*'turns' or 'output_tokens'"),
        ("port = 65536", "port = 65536: .*less than 65536"),
        ("executor = 'slurm'", "executor = 'slurm'"),
        ("notify = 'json://x'", "notify = 'json://x': .*list"),
        ("allow_reboot = -1", "allow_reboot = -1"),
        ("signature = ''", "signature = ''"),
        ("at_least = 0.5", "at_least = 0.5: .*greater than or equal to 1"),
        ("budget = 0", "budget = 0: .*greater than 0"),
        ("[limits]\nstart = 0", "limits.start = 0: .*greater than 0"),
        ("[limits]\nteardown = '0s'", "limits.teardown = '0s'"),
        ("[limits]\ncooldown = -1", "limits.cooldown = -1"),
        ("[limits]\nmax_bad = 0", "limits.max_bad = 0"),
        ("[limits]\nstal = '2m'", "limits.stal is no key of a campaign.*\n.*limits.stall was probably meant"),
        ("[limits]\nrun = 'long'", "limits.run = 'long'.*8h, 90m or 1h30m"),
        ("cooldown = '5s'", "cooldown is no key of a campaign.*\n.*cooldown belongs under .limits."),
    ],
)
def test_a_file_is_refused_with_its_name_the_key_and_what_was_expected(tmp_path: Path, text: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        read(tmp_path, text)
    assert "campaign.toml" in caught.value.message
    assert caught.value.remedy


REST = """
signature = "Xid 31"
unit = "output_tokens"
kernel_log = "none"
port = 8123
executor = "ray"
notify = ["json://user:word@127.0.0.1:8080"]
allow_reboot = 2
at_least = 3

[load]
conversations = 2
max_tokens = 10

[limits]
start = "90s"
run = "2h"
stall = 30
first_byte = "20m"
teardown = "1m30s"
cooldown = "5s"
max_bad = 3

[variables]
A = [1, 0]
"""


def test_the_rest_of_the_keys_and_the_limits(tmp_path: Path) -> None:
    campaign = read(tmp_path, REST)
    assert (campaign.signature, campaign.unit, campaign.kernel_log) == ("Xid 31", "output_tokens", "none")
    assert (campaign.port, campaign.executor, campaign.allow_reboot) == (8123, "ray", 2)
    assert campaign.notify == ["json://user:word@127.0.0.1:8080"]
    assert campaign.limits.model_dump() == {
        "start": 90.0, "run": 7200.0, "stall": 30.0, "first_byte": 1200.0, "teardown": 90.0, "cooldown": 5.0,
        "max_bad": 3,
    }  # fmt: skip
    assert campaign.cap == 60 * 2 * 10, "the most that so many turns can generate"
    assert campaign.rule.at_least == 3
    assert Campaign.from_json(json.loads(json.dumps(campaign.to_json()))) == campaign
    assert "word" not in json.dumps(campaign.shown())
    assert campaign.shown()["notify"] == ["[redacted]"]


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    campaign = read(tmp_path, "[variables]\nA = [1, 0]\n")
    assert (campaign.signature, campaign.unit, campaign.kernel_log, campaign.port) == (None, "turns", "auto", 0)
    assert (campaign.executor, campaign.notify, campaign.allow_reboot, campaign.at_least) == ("local", [], 0, 2.0)
    assert campaign.limits.model_dump() == {
        "start": None, "run": None, "stall": 120.0, "first_byte": 1800.0, "teardown": 120.0, "cooldown": 0.0,
        "max_bad": 1,
    }  # fmt: skip
    assert campaign.cap == 60


def test_the_command_line_wins_over_limits_one_by_one(tmp_path: Path) -> None:
    merged = merge_campaign(
        read(tmp_path, REST.replace("none", "auto").replace('executor = "ray"', "")),
        {"port": 0, "notify": None, "unit": "turns", "allow_reboot": 0, "notify_not": None},
        limits={"start": None, "run": 60.0, "cooldown": 0.0, "max_bad": 5},
    )
    assert (merged.limits.start, merged.limits.run, merged.limits.cooldown, merged.limits.max_bad) == (90, 60, 0, 5)
    assert (merged.port, merged.allow_reboot, merged.unit, merged.cap) == (0, 0, "turns", 120)
    assert merged.notify == ["json://user:word@127.0.0.1:8080"], "what was not given stays"


def test_what_the_model_wrote_is_no_fault_unless_it_is_what_is_looked_for() -> None:
    assert Campaign().tolerated == CONTENT
    assert Campaign(signature="Xid 31").tolerated == CONTENT
    assert Campaign(signature="turn degenerate").tolerated == CONTENT - {"degenerate"}
    assert Campaign(signature="turn error_frame").tolerated == CONTENT


def test_the_error_is_shared_by_what_could_be_named_as_the_cause() -> None:
    """All-off, four single arms of three variables, and a pair; what is put back is no cause."""
    spec: dict[str, object] = {"variables": {"A": ["1", "0"], "B": ["1", "0", "2"], "C": ["1", "0"]}}
    assert Campaign.from_json(spec).rule.arms == 1 + 4
    paired = Campaign.from_json({**spec, "pairs": [["A", "B"]], "confidence": 0.9}).rule
    assert (paired.arms, paired.confidence) == (1 + 4 + 1, 0.9)


def test_an_order_has_what_the_campaign_says_of_every_launch(tmp_path: Path) -> None:
    campaign = read(tmp_path, REST + 'B = [{ unset = true }, 1]\n"--x" = [1, 2]\n')
    caller = {"PATH": "/bin", "B": "of the caller", "VLLM_FORGOTTEN": "1", "CUDA_VISIBLE_DEVICES": "3"}
    order = campaign.order(campaign.arm("control"), caller=caller, mark="m#1")
    assert (order.name, order.port, order.start_s, order.mark, order.flags) == (
        "embedded", 8123, 90.0, "m#1", ("--x=1",),
    )  # fmt: skip
    assert order.caller == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "3", "A": "1"}
    assert campaign.order(campaign.arm("control"), caller={}).caller == {"A": "1"}, "of nobody, not of this process"
    with pytest.raises(RecordError, match="no arm 'nobody'"):
        campaign.arm("nobody")


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
        ({"kernel_log": "/nowhere/at/all"}, ["A=1,0"], "/nowhere/at/all"),
    ],
)
def test_the_effective_campaign_is_refused_before_anything_starts(
    given: dict[str, object], words: list[str], match: str
) -> None:
    with pytest.raises(UsageError, match=match):
        merge_campaign(Campaign(), given, variables=parse_variables(words))
