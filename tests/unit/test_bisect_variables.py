"""Variables as an operator writes them: what is read, what is refused and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from soakrig.bisect.variables import (
    Variable,
    check_settings,
    check_variables,
    flag_key,
    known_settings,
    parse_variable,
    parse_variables,
    split_values,
    write_value,
)
from soakrig.errors import UsageError

TEXT = st.text(st.characters(blacklist_categories=("C", "Zl", "Zp")) | st.sampled_from(',\\"'), max_size=6).filter(
    str.isprintable
)
VALUE = st.none() | TEXT


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,0", ("1", "0")),
        ("1,", ("1", None)),
        (",1,2", (None, "1", "2")),
        ('"",', ("", None)),
        (r"a\,b,c", ("a,b", "c")),
        (r"c:\\,d", ("c:\\", "d")),
        (r"\"\",x", ('""', "x")),
        ('{"a":1\\,"b":2},', ('{"a":1,"b":2}', None)),
        ("a=b,c", ("a=b", "c")),
        (" 1,1", (" 1", "1")),
    ],
)
def test_values(text: str, values: tuple[str | None, ...]) -> None:
    assert split_values(text) == values


@given(st.lists(VALUE, min_size=2, max_size=5, unique=True))
def test_what_is_written_is_read_back(values: list[str | None]) -> None:
    for name in ("NAME", "--flag-name"):
        variable = Variable(name, tuple(values))
        assert parse_variable(variable.written()) == variable
    assert len({write_value(value) for value in values}) == len(values)


@given(st.text(max_size=12))
def test_any_word_is_read_or_refused(text: str) -> None:
    try:
        variable = parse_variable(f"A={text}")
    except UsageError:
        return
    assert parse_variable(variable.written()) == variable


def test_a_flag_and_a_variable_know_what_they_are() -> None:
    flag, variable = parse_variables(["--arg:--max-num-seqs=8,1,4", "VLLM_MOE_HOT_SLOTS=,8"])
    assert (flag.name, flag.is_flag, flag.control, flag.others, flag.off) == (
        "--max-num-seqs",
        True,
        "8",
        ("1", "4"),
        "1",
    )
    assert (variable.is_flag, variable.control, variable.off) == (False, None, "8")
    assert {flag_key(text) for text in ("--no-enable_x=1", "--enable-x", "--enable-x=2")} == {"--enable-x"}


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["A"], "there is no '='"),
        (["A=1"], "has 1 value, the control's and at least one other"),
        (["A=1,1"], "has the value 1 twice"),
        (["A=,"], r"has the value \(not set\) twice"),
        (["1A=1,2"], "'1A' is no name of an environment variable"),
        (["=1,2"], "'' is no name"),
        (["A B=1,2"], "'A B' is no name"),
        (["--flag=1,2"], "--arg:--flag=1,2"),
        (["--arg:flag=1,2"], "--arg:--flag=1,2"),
        (["--arg:--=1,2"], "no launch flag"),
        (["A=1,\\n"], "backslash before 'n'"),
        (["A=1,2\\"], "backslash before ''"),
        (["A=1,2\n"], "printable text was expected"),
        (["A=1,\x00"], "printable text was expected"),
        (["A=1,\udcff"], "printable text was expected"),
        (["A=1,2", "A=1,3"], "A is named twice"),
        (["--arg:--enable-x=,1", '--arg:--no-enable_x=,""'], "--enable-x and --no-enable_x set the same thing"),
        (["SOAKRIG_LAUNCH=1,2"], "set by this tool"),
    ],
)
def test_refused_with_what_was_read_and_expected(words: list[str], match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        parse_variables(words)
    assert caught.value.remedy


@pytest.mark.parametrize("engine", ["embedded", "vllm", "tiny-moe"])
@pytest.mark.parametrize(
    ("word", "match"),
    [
        ("VLLM_MOE_DMA_STAGGING=1,0", "VLLM_MOE_DMA_STAGING was probably meant"),
        ("MOE_DMA_STAGING=1,0", "VLLM_MOE_DMA_STAGING was probably meant"),
        ("vllm_moe_dma_staging=1,0", "VLLM_MOE_DMA_STAGING was probably meant"),
        ("CPU_OFLOAD_GB=1,0", "CPU_OFFLOAD_GB was probably meant"),
        ("VLLM_MOE_DMA_STAGING=1,2", "0 or 1 was expected"),
        ("VLLM_MOE_DMA_STAGING=1,", "1 and unset are both 1 to the"),
        ("CPU_OFFLOAD_GB=2,2.0", "2 and 2.0 are both 2.0"),
        ("VLLM_MOE_HOT_SLOTS=8,/no/such/map", "no/such/map"),
    ],
)
def test_what_could_not_take_effect_is_refused(engine: str, word: str, match: str) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        check_variables(engine, [parse_variable(word)])
    assert engine in caught.value.message


def test_what_may_matter_below_the_engine_is_let_through() -> None:
    words = ["OMP_NUM_THREADS=1,2", "CUDA_LAUNCH_BLOCKING=,1", "VLLM_MOE_DMA_STAGING=1,0", "--arg:--threads=1,2"]
    for engine in ("embedded", "vllm"):
        check_variables(engine, parse_variables(words))
    assert "VLLM_MOE_PREFILL_SPLIT" in known_settings("tiny-moe")
    assert "VLLM_MOE_PREFILL_SPLIT" not in known_settings("embedded")
    assert known_settings("another") == {}


def test_settings_are_refused_by_the_engine_that_would_get_them(tmp_path: Path) -> None:
    check_settings("embedded", {"VLLM_MOE_DMA_STAGING": "0"}, ["--threads=1"])
    check_settings("vllm", {"VLLM_MOE_DMA_STAGING": "0"}, ["--whatever"])
    with pytest.raises(UsageError, match="--threads was probably meant"):
        check_settings("embedded", {}, ["--thread=1"])
    with pytest.raises(UsageError, match="does not go with CPU_OFFLOAD_GB"):
        check_settings("vllm", {"VLLM_MOE_HOT_SLOTS": "4", "CPU_OFFLOAD_GB": "0"}, [])
    with pytest.raises(UsageError, match="VLLM_MOE_PREFILL_SPLIT is not obeyed here"):
        check_settings("embedded", {"VLLM_MOE_PREFILL_SPLIT": "rows"}, [])
    with pytest.raises(UsageError, match="VLLM_MOE_DMA_STAGING was probably meant"):
        check_settings("vllm", {"VLM_MOE_DMA_STAGING": "0"}, [])
