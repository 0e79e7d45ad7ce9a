"""The last look: it finds what is left in any reading, and says where without saying what."""

from __future__ import annotations

import base64
from urllib.parse import quote

import pytest

from seeded_secrets import SECRETS
from soakrig.record.leaks import LeakCheck, known_values
from soakrig.record.private_things import Known
from soakrig.record.quotes import Quotes

SECRET = "quiet river 42"


def b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "text",
    [
        f"a {SECRET} b",
        f"a {SECRET.upper()} b",
        f"a {quote(SECRET)} b",
        f"a {quote(quote(SECRET))} b",
        "a " + "".join(f"\\u{ord(one):04x}" for one in SECRET),
        "a quiet&#32;river&#32;42",
        f"a {b64(SECRET)} b",
        f"a {b64('x' + SECRET)} b",
        f"a {b64(b64('user ' + SECRET))} b",
        f"a {SECRET.encode().hex()} b",
        f"a {quote(b64('== ' + SECRET))} b",
        "quiet river\\\n 42".replace("\\\n ", " \\\n"),
    ],
)
def test_a_known_value_is_found_in_every_reading(text: str) -> None:
    check = LeakCheck([Known("secret", SECRET, "the value of X_KEY")], [])
    found = check.file("issue.md", f"one\n{text}\n".encode())
    assert found
    assert any("X_KEY" in one.what for one in found)
    assert not any(SECRET in one.what for one in found)


@pytest.mark.parametrize("what", [*[*SECRETS][:11], "mail", "home", "home on a Mac", "IPv4", "GPU UUID", "random"])
def test_forms_are_found_without_being_known(what: str) -> None:
    assert LeakCheck([], []).file("x", f"seen {SECRETS[what]} here".encode())


def test_in_a_file_name_too() -> None:
    assert LeakCheck([Known("user", "kim", "this user's name")], []).file("kim.log", b"")


def test_placeholders_public_hosts_and_loopback_are_no_leaks() -> None:
    text = b"host-1 http://127.0.0.1:8000 https://github.com/vllm-project/vllm api_key=secret-1 path-1/engine.py"
    assert LeakCheck([], [("user", "kim"), ("path", "/data")]).file("x", text + b" kimono /metrics/data") == []


def test_binary_is_read_too() -> None:
    assert LeakCheck([], []).file("x", b"\x00\xff" + SECRETS["GitHub"].encode() + b"\xfe")


def test_values_of_the_shell_by_their_names() -> None:
    found = known_values({"MY_TOKEN": "abcdefgh", "MAX_TOKENS": "abcdefgh", "A_KEY": "true", "B_KEY": "123456"},
                         {"args": ["--api-key=zzzzzzzz", "--x=1"], "set": {"PASSWORD": "yyyyyyyy"}})  # fmt: skip
    assert {one.value for one in found if one.kind == "secret"} == {"abcdefgh", "zzzzzzzz", "yyyyyyyy"}


def test_quotations_are_hidden_by_five_words_and_whole_short_ones() -> None:
    log = "INFO he said: the quick brown fox jumps over it; and: blue whale song!"
    quotes = Quotes([log])
    quotes.feed("Once the quick brown fox jumps over every fence")
    quotes.feed("blue whale song")
    assert quotes.hide(log) == "INFO he said: [prompt, 6 words] it; and: [prompt, 3 words]!"
    other = "INFO the quick brown bear"
    assert quotes.hide(other) == other


@pytest.mark.parametrize(
    ("log", "hidden"),
    [
        ("Received request c-1: prompt: 'it\\'s me', params: P(n=1)", "prompt: [prompt text], params"),
        ('body {"content": "a \\"b\\" c", "n": 1}', '"content": [prompt text], "n": 1'),
        ("prompt_token_ids: [1, 22, 333], lora", "prompt_token_ids: [prompt token ids], lora"),
    ],
)
def test_request_logs_are_hidden_whatever_they_say(log: str, hidden: str) -> None:
    assert hidden in Quotes([log]).hide(log)
