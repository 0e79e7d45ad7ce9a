"""What vLLM's log says of flags and variables; lines in the shape of vLLM 0.32's."""

from __future__ import annotations

from pathlib import Path

import pytest

from soakrig.bisect.engine_words import flags_in_log, read_log, unknown_variable

LOG = (
    "(APIServer pid=7) INFO 11-29 10:00:00 [api_utils.py:286] non-default args: {'port': 8000, 'max_num_seqs': 4, "
    "'enforce_eager': True, 'enable_chunked_prefill': False, 'gpu_memory_utilization': 0.9, 'kv_cache_dtype': 'fp8'}\n"
    "(APIServer pid=7) WARNING 11-29 10:00:00 [envs.py:12] Unknown vLLM environment variable detected: VLLM_MADE_UP\n"
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("--max-num-seqs", "4"),
        ("--max_num_seqs", "4"),
        ("--enforce-eager", ""),
        ("--no-enable-chunked-prefill", ""),
        ("--gpu-memory-utilization", "0.90"),
        ("--kv-cache-dtype", "FP8"),
    ],
)
def test_a_flag_that_the_log_shows_is_proved(name: str, value: str) -> None:
    assert flags_in_log(LOG, {name: value}) == ({name}, "")


@pytest.mark.parametrize(
    ("name", "value"), [("--max-num-seqs", "8"), ("--no-enforce-eager", ""), ("--kv-cache-dtype", "auto")]
)
def test_a_flag_that_the_log_shows_otherwise_is_contradicted(name: str, value: str) -> None:
    shown, failure = flags_in_log(LOG, {name: value})
    assert shown == set()
    assert name in failure


@pytest.mark.parametrize("values", [{"--seed": "1"}, {"--max-num-seqs": None}, {"OMP_NUM_THREADS": "4"}])
def test_nothing_is_known_of_a_default_a_flag_not_given_and_a_variable(values: dict[str, str | None]) -> None:
    assert flags_in_log(LOG, values) == (set(), "")


@pytest.mark.parametrize("text", ["", "non-default args: {'a': object()}\n", "non-default args: {'max_num_seqs': 4\n"])
def test_a_log_that_does_not_say_it_proves_nothing(text: str) -> None:
    assert flags_in_log(text, {"--max-num-seqs": "4"}) == (set(), "")


def test_an_unknown_variable_is_told_only_where_it_is_asked_for(tmp_path: Path) -> None:
    assert unknown_variable(LOG, ["VLLM_MADE_UP"]) == "VLLM_MADE_UP"
    assert unknown_variable(LOG, ["VLLM_OTHER"]) == ""
    assert read_log(None) == read_log(tmp_path / "none.log") == ""
    (tmp_path / "engine.log").write_text(LOG)
    assert read_log(tmp_path / "engine.log") == LOG
