from __future__ import annotations

import pytest

from soakrig.record.redaction import HIDDEN, is_secret, redact_flags, redact_settings


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY", "api-key", "DB_PASSWORD", "MY_SECRET", "--hf-token"])
def test_secrets(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_MOE_HOT_SLOTS",
        "--max-num-batched-tokens",
        "MAX_TOKENS",
        "--num-speculative-tokens",
        "--tokenizer",
        "--kv-tokens",
    ],
)
def test_numbers_of_tokens_are_no_secrets(name: str) -> None:
    assert not is_secret(name)


def test_values_are_hidden_and_names_stay() -> None:
    assert redact_settings({"HF_TOKEN": "hf_x", "A": "1"}) == {"HF_TOKEN": HIDDEN, "A": "1"}
    flags = ["--api-key=abc", "--hf-token", "hf_x", "--port=1", "--max-tokens", "5"]
    assert redact_flags(flags) == [f"--api-key={HIDDEN}", "--hf-token", HIDDEN, "--port=1", "--max-tokens", "5"]
