"""What a reproducer declares: parameters, options, needs, its page, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soakrig.bisect.campaign_file import Campaign, merge_campaign
from soakrig.bisect.variables import parse_variables
from soakrig.cli.main import invoke
from soakrig.engine.bundled import Order
from soakrig.errors import PreflightRefusedError, UsageError
from soakrig.record.outcome import CONTENT
from soakrig.reproducers.parameters import Parameter, read_parameters, split_parameters
from soakrig.reproducers.registry import REPRODUCERS, find_reproducer
from soakrig.reproducers.reproducer import GENERAL, LoadOptions
from soakrig.soak.probe import Probe

ROWS = (
    "agent-loop long-prefill mixed-burst short-decode long-decode restart-prefix garbage thinking-budget amnesia "
    "tool-tags dead-proxy kv-offload-shm host-ram idle wedge"
).split()
PAGE = (Path(__file__).parents[2] / "docs/reproducers.md").read_text()


def test_the_fifteen_rows_in_their_order() -> None:
    assert list(REPRODUCERS) == ROWS


@pytest.mark.parametrize("name", ROWS)
def test_a_row_says_everything(name: str) -> None:
    row = find_reproducer(name)
    shown = row.shown()
    assert shown["name"] == name
    assert all(len(str(shown[key])) > 20 for key in ("summary", "provokes", "seen", "costs", "clean_means"))
    assert row.signature
    assert not any(one and row.is_its(one) for one in ("", "turn aborted"))
    assert all(row.is_its(f"{one} and more") for one in row.signature)
    assert set(row.uses) <= set(GENERAL)
    assert all(one.help and one.read(one.default) == one.default for one in row.parameters)
    assert json.loads(json.dumps(shown)) == shown


@pytest.mark.parametrize("name", ROWS)
def test_the_page_and_the_code_agree(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| `{name}` |")]
    row = find_reproducer(name)
    for parameter in row.parameters:
        default = str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default
        said = f"`{parameter.name}`" if isinstance(default, str) and "," in default else f"`{parameter.name}={default}`"
        assert said in line, said
    assert ("own plan" in line) == (row.plan is not None)
    if row.plan is None:
        assert f"{row.cap} turns" in line
    assert ("not in a bisect" in line) == bool(row.not_in_bisect)


def test_show_prints_every_parameter(capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke(["repro", "show", "wedge"]) == 0
    text = capsys.readouterr().out
    assert "--param ways=both" in text
    assert "only a reboot clears it" in " ".join(text.split())
    assert invoke(["repro", "show", "idle", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["in_a_bisect"].startswith("no: ")
    assert shown["parameters"][0]["name"] == "seconds"


COUNT = Parameter("count", 3, "a count", low=1, high=9)
SHARE = Parameter("share", 0.5, "a share", low=0.0)
FLAG = Parameter("flag", True, "a switch")
WORD = Parameter("word", "a", "a word", choices=("a", "b"))


def test_values_are_read_as_the_default_s_type() -> None:
    given = {"count": "7", "share": "2", "flag": "no", "word": "b"}
    assert read_parameters("x", (COUNT, SHARE, FLAG, WORD), given) == {
        "count": 7, "share": 2.0, "flag": False, "word": "b",
    }  # fmt: skip
    options = LoadOptions(parameters={"count": 7})
    assert (COUNT.of(options), SHARE.of(options)) == (7, 0.5)
    assert COUNT.read(4) == 4  # of TOML


@pytest.mark.parametrize(
    ("parameter", "value", "expected"),
    [
        (COUNT, "0", "a whole number from 1 to 9"),
        (COUNT, "10", "a whole number from 1 to 9"),
        (COUNT, "3.5", "a whole number"),
        (COUNT, 3.5, "a whole number"),
        (COUNT, True, "a whole number"),
        (SHARE, "nan", "a number from 0 up"),
        (SHARE, "inf", "a number from 0 up"),
        (COUNT, float("inf"), "a whole number"),
        (COUNT, 10**400, "a whole number"),
        (SHARE, "-1", "a number from 0 up"),
        (FLAG, "maybe", "true or false"),
        (WORD, "c", "one of a, b"),
    ],
)
def test_a_wrong_value_says_what_was_expected(parameter: Parameter[int], value: str, expected: str) -> None:
    with pytest.raises(UsageError, match=f"--param {parameter.name}={value}: expected {expected}"):
        parameter.read(value)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [(["count"], "is no NAME=VALUE"), (["=3"], "is no NAME=VALUE"), (["count=1", "count=2"], "names count twice")],
)
def test_pairs_that_are_none(pairs: list[str], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        split_parameters(pairs)


@pytest.mark.parametrize(
    ("argv", "code", "expected"),
    [
        (["long-prefill", "--param", "rung=3"], 64, "long-prefill has no such parameter; 'rungs' was meant?"),
        (["long-prefill", "--param", "rungs=1"], 64, "expected a whole number from 2 to 64"),
        (["long-prefill", "--tools", "3"], 64, "--tools means nothing to long-prefill"),
        (["idle", "--turns", "3"], 64, "--turns means nothing to idle: it has a plan of its own"),
        (["wedge", "--for", "3s"], 64, "--for means nothing to wedge"),
        (["agent-loop", "--param", "x=1"], 64, "It has: none."),
        (["kv-offload-shm"], 3, "the embedded engine has no KV-offload tier"),
        (["kv-offload-shm", "--engine", "vllm", "--model", "m"], 64, "the tier's size is said nowhere"),
        (["kv-offload-shm", "--engine", "vllm", "--model", "m", "--param", "tier_gib=1e6"], 3, "MiB does not fit into"),
        (["kv-offload-shm", "--url", "http://127.0.0.1:1"], 64, "an attached one has started"),
        (["wedge", "--url", "http://127.0.0.1:1"], 64, "an attached one is never ended"),
        (["restart-prefix", "--url", "http://127.0.0.1:1"], 64, "--param restart=false"),
        (["dead-proxy", "--url", "http://127.0.0.1:1"], 64, "does not know its process"),
        (["dead-proxy", "--url", "http://127.0.0.1:1", "--pid", "1"], 64, "--param kill=true if that is meant"),
        (["host-ram", "--url", "http://127.0.0.1:1"], 64, "Add --pid PID"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    argv: list[str], code: int, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke(["run", *argv, "--runs-dir", str(tmp_path / "runs")]) == code
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_the_tier_that_does_not_fit_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    free = 32768 << 20
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free})())
    row = find_reproducer("kv-offload-shm")
    assert row.order is not None
    wanted = Order("vllm", {}, [], "m")
    with pytest.raises(PreflightRefusedError, match=r"a KV-offload tier of 49152 MiB.*which has 32768 MiB free"):
        row.order(row.options({}, {"tier_gib": 48.0}), wanted)
    with pytest.raises(PreflightRefusedError, match="49152 MiB"):
        row.order(row.options({}), Order("vllm", {}, ["--kv-offloading-size=48"], "m"))
    with pytest.raises(UsageError, match="said twice"):
        row.order(row.options({}, {"tier_gib": 1.0}), Order("vllm", {}, ["--kv_offloading_size=48"], "m"))
    fits = row.order(row.options({}, {"tier_gib": 24.0}), wanted)
    assert list(fits.flags) == ["--kv-offloading-size=24", "--kv-offloading-backend=native"]
    forced = row.order(row.options({}, {"tier_gib": 48.0, "force": True}), wanted)
    assert "--kv-offloading-size=48" in forced.flags


@pytest.mark.parametrize("name", ["long-prefill", "mixed-burst", "long-decode", "restart-prefix"])
def test_a_load_that_does_not_fit_the_context_is_refused(name: str) -> None:
    row = find_reproducer(name)
    with pytest.raises(UsageError, match="Use"):
        row.load(row.options({}), Probe("m", context_limit=300))


def test_a_ladder_needs_a_limit() -> None:
    row = find_reproducer("long-prefill")
    with pytest.raises(UsageError, match="Give --context-limit"):
        row.load(row.options({}), Probe("m"))


def test_a_campaign_takes_the_reproducer_s_own_defaults_and_parameters() -> None:
    campaign = merge_campaign(
        Campaign.from_json({"load": {"max_tokens": 99, "parameters": {"prompt_tokens": 500}}}),
        {"reproducer": "mixed-burst", "turns": 4},
        variables=parse_variables(["VLLM_MOE_DMA_STAGING=1,0"]),
    )
    options = campaign.options
    assert (options.conversations, options.max_tokens, options.parameters["prompt_tokens"]) == (16, 99, 500)
    assert campaign.cap == 64
    again = Campaign.from_json(json.loads(json.dumps(campaign.to_json())))
    assert again.options == options
    assert again.to_json() == campaign.to_json()


def test_a_campaign_is_as_long_as_its_load_where_nobody_says_how_long() -> None:
    def merged(**given: object) -> Campaign:
        return merge_campaign(Campaign(), given, variables=parse_variables(["VLLM_MOE_DMA_STAGING=1,0"]))

    assert (merged().cap, merged(turns=7).cap) == (60, 7)
    assert (merged(reproducer="long-prefill").cap, merged(reproducer="mixed-burst").cap) == (8, 64)
    for name, turns in (("wedge", 6), ("restart-prefix", 12)):
        campaign = merged(reproducer=name)
        assert campaign.planned.turns == campaign.cap == turns
        assert campaign.to_json()["turns"] == turns
        assert Campaign.from_json(campaign.to_json()).check().planned == campaign.planned
        with pytest.raises(UsageError, match=f"--turns means nothing to {name}"):
            merged(reproducer=name, turns=turns + 1)
    tokens = merged(reproducer="short-decode", unit="output_tokens")
    assert tokens.cap == 10 * 32


def test_the_bisect_command_takes_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[load.parameters]\nrungs = 5\nfrom_tokens = 300\n")
    words = ["bisect", "VLLM_MOE_DMA_STAGING=1,0", "--repro", "long-prefill", "--dry-run", "--json", "-f", str(file)]
    assert invoke([*words, "--param", "rungs=3"]) == 0
    spec = json.loads(capsys.readouterr().out)["campaign"]
    assert spec["load"]["parameters"] == {"rungs": 3, "from_tokens": 300}
    assert (spec["turns"], spec["load"]["max_tokens"]) == (8, 32)
    assert invoke([*words, "--param", "rung=3"]) == 64
    assert "'rungs' was meant?" in capsys.readouterr().out


def test_a_short_decode_is_the_first_request_of_its_engine() -> None:
    row = find_reproducer("short-decode")
    assert row.order is not None
    assert Order("tiny-moe", {}, []).canary
    assert not row.order(row.options({}), Order("tiny-moe", {}, [])).canary


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"reproducer": "idle"}, "it earns no exposure"),
        ({"reproducer": "kv-offload-shm"}, "answered by the start"),
        ({"reproducer": "long-prefill", "load": {"tools": 3}}, "--tools means nothing to long-prefill"),
        ({"reproducer": "garbage", "load": {"parameters": {"max_perplexty": 3}}}, "'max_perplexity' was meant"),
        ({"reproducer": "garbage", "load": {"parameters": {"max_perplexity": 0}}}, "expected a number from 1 up"),
    ],
)
def test_a_campaign_refuses_what_cannot_be_its_load(given: dict[str, object], expected: str) -> None:
    with pytest.raises(UsageError, match=expected):
        Campaign.from_json({**given, "variables": {"VLLM_MOE_DMA_STAGING": ["1", "0"]}}).check()


def test_what_the_row_is_about_is_a_fault_in_a_bisect() -> None:
    assert Campaign().tolerated == CONTENT
    assert Campaign(reproducer="thinking-budget").tolerated == CONTENT - {"answerless"}
    assert Campaign(reproducer="tool-tags").tolerated == CONTENT - {"tool_malformed"}
    assert Campaign(reproducer="garbage").tolerated == CONTENT - {"degenerate", "answerless"}
    assert Campaign(reproducer="garbage", signature="turn degenerate").tolerated == CONTENT - {"degenerate"}
