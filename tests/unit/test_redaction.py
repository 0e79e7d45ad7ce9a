from __future__ import annotations

import pytest

from soakrig.record.redaction import HIDDEN, is_secret, redact_flags, redact_settings


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "VLLM_API_KEY",
        "api-key",
        "DB_PASSWORD",
        "MY_SECRET",
        "--hf-token",
        "ADMIN_TOKEN",
        "GITHUB_PERSONAL_ACCESS_TOKEN",
        "MINIO_TOKEN",
        "API_TOKENS",
        "MY_PASSPHRASE",
        "AUTHORIZATION",
        "APIKEY",
    ],
)
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


@pytest.mark.parametrize("name", ["db_password", "PASSWD", "AWS_CREDENTIALS", "SESSION_COOKIE", "--bearer", "Hf_Token"])
def test_secrets_in_any_case_and_of_every_kind(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", ["HF_TOKEN_MAX_TOKENS", "TOKENIZER_API_KEY", "MAX_TOKENS_SECRET"])
def test_a_harmless_part_of_a_name_does_not_excuse_the_rest(name: str) -> None:
    assert is_secret(name)


def test_only_the_value_of_a_secret_flag_is_hidden() -> None:
    assert redact_flags(["--api-key", "--port", "1"]) == ["--api-key", "--port", "1"], "a flag is no value"
    assert redact_flags(["--api-key", "abc", "def"]) == ["--api-key", HIDDEN, "def"]
    assert redact_flags(["--api-key=abc", "def"]) == [f"--api-key={HIDDEN}", "def"]
    plain = ["--model", "my-token-model", "--served-model-name", "key", "m"]
    assert redact_flags(plain) == plain, "a value is no name"
    assert redact_flags(["--api-key=a=b"]) == [f"--api-key={HIDDEN}"]
    assert redact_flags(["--hf-token="]) == [f"--hf-token={HIDDEN}"]
    assert redact_flags([]) == []


def test_what_is_redacted_is_a_copy() -> None:
    settings, flags = {"HF_TOKEN": "hf_x"}, ["--api-key", "abc"]
    redact_settings(settings)
    redact_flags(flags)
    assert (settings, flags) == ({"HF_TOKEN": "hf_x"}, ["--api-key", "abc"])
