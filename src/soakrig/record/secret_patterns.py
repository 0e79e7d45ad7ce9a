"""What a secret looks like: keys and tokens by their issuers' forms, by the name before them, and by looking random.

The forms are those that the issuers document. A library for this was tried (detect-secrets 1.5.0 and its fork): it
knows neither Hugging Face's, Anthropic's, Google's nor today's OpenAI's and GitHub's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from soakrig.record.redaction import HIDDEN, is_secret


class Found(NamedTuple):
    """A secret in a text, from ``start`` to ``end``; ``what``: its form, in words for people."""

    start: int
    end: int
    what: str


FORMS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (what, re.compile(pattern, re.DOTALL))
    for what, pattern in (
        ("a private key", r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"),
        ("a JSON web token", r"\beyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)*"),
        ("an AWS key", r"(?<![A-Za-z0-9])(?:AKIA|ASIA|ABIA|ACCA|AGPA|AIDA|AROA|ANPA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
        ("a GitHub token", r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{20,})"),
        ("a GitLab token", r"\bgl(?:pat|dt|rt|ptt|cbt|soat|ft|imt|agent)-[\w-]{16,}"),
        ("a Hugging Face token", r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}"),
        ("an API key (sk-)", r"(?<![A-Za-z0-9])(?:sk|rk|pk|ak)[-_](?:[a-z0-9]+[-_]){0,3}[\w-]{16,}"),
        ("a Google key", r"\bAIza[\w-]{30,}|\bya29\.[\w-]{16,}|\bGOCSPX-[\w-]{16,}"),
        ("a Slack token", r"\bxox[a-z](?:\.xox[a-z])?-[\w-]{8,}|\bxapp-[\w-]{16,}"),
        ("a Slack webhook", r"hooks\.slack\.com/(?:services|workflows|triggers)/[\w/+-]{16,}"),
        ("a PyPI token", r"\bpypi-[\w-]{16,}"),
        ("an npm token", r"\bnpm_[A-Za-z0-9]{16,}"),
        ("an NVIDIA key", r"\bnvapi-[\w-]{16,}"),
        ("an API key", r"\b(?:gsk|xai|r8|fw|tvly|tgp_v\d|pplx|csk|dop_v1|shpat|lin_api|ntn|dapi|SG)[_.-][\w.-]{20,}"),
        ("a Telegram token", r"\b\d{8,10}:AA[\w-]{30,}"),
        ("an Azure key", r"AccountKey=[A-Za-z0-9+/=]{40,}|SharedAccessKey=[A-Za-z0-9+/=]{30,}"),
        ("a signature of an address", r"(?:[?&](?:sig|X-Amz-Signature|X-Amz-Credential|token|key)=)[\w%/+.=-]{8,}"),
    )
)
"""What it is, and its form. The whole match is the secret."""

HEADER = re.compile(
    r"(?P<before>\b(?:Bearer|Basic)[\s:]+[\"']?|(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:token|digest|apikey)\s+)"
    r"(?P<value>[A-Za-z0-9._~+/=-]{6,})",
    re.IGNORECASE,
)
"""A credential behind its scheme, as in a header of HTTP."""
LOGIN = re.compile(r"(?<![a-z0-9+.-])(?P<before>[a-z][a-z0-9+.-]*://)(?P<value>[^\s/@\"'<>]+)(?=@)", re.IGNORECASE)
"""``user:password`` of a URL."""

_NAME = (
    r"(?=[\w.-]{0,60}?(?:key|token|secret|passw|pwd|passphrase|credential|cookie|bearer|auth))[\w.-]{1,100}"
    r"(?![\w.-])"
)
"""A name that may be a secret's; whether it is, ``hides`` says. It has an end, so that no text takes for ever."""
NAMED = re.compile(
    rf"(?P<name>(?<![\w.-]){_NAME})"
    r"(?P<between>\\?[\"']?\s*(?:=>|[:=]|\sis\s|\swas\s)\s*[\[(]?\\?[\"']?)"
    r"(?P<value>[^\s\"',;&)\]}<>\\]+)",
    re.IGNORECASE,
)
"""``NAME=value``, ``"name": "value"``, ``name is value``."""
FLAG = re.compile(rf"(?P<name>--{_NAME})(?P<between>[\s=]+[\"']?)(?P<value>[^\s\"',;<>]+)", re.IGNORECASE)
"""``--name value``."""

_NOTHING = frozenset(
    {"none", "null", "nil", "true", "false", "unset", "missing", "required", "empty", "auto", "default", "str", "int",
     "bool", "string", "optional", "not", "a", "an", "the", "bearer", "basic", "invalid", "no", "yes", "in", "of",
     "eos", "bos", "pad", "unk", "os.environ.get", HIDDEN.lower(), HIDDEN.strip("[]").lower()}
)  # fmt: skip
"""What stands behind such names and says nothing."""
_STRONG = re.compile(r"pass(?:word|wd|phrase)|pwd|secret|credential|api.?key|auth", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?[\d_,]*\.?\d+(?:[eE][-+]?\d+)?[a-z%]{0,3}")

_LONG = re.compile(r"[A-Za-z0-9_+/=-]{16,}")
_PART = re.compile(r"[A-Za-z0-9]+")
_CHANGE = re.compile(r"(?<=[A-Za-z])(?=[0-9])|(?<=[0-9])(?=[A-Za-z])|(?<=[a-z])(?=[A-Z])")
_COMMON_PAIRS = (
    "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le ve co me de hi ri ro ic "
    "ne ea ra ce li ch ll be ma si om ur ca el ta la ns di fo ho pe ec pr no ct us ac ot il tr ly nc et ut ss so rs un "
    "lo ge ie ee wi em ad ol rt po na ul ni ts mo pa im mi sh ir su id os am fi ci pl tu ld mp ab op ke oo ag ap gr od "
    "bo sp do uc mm"
)
_PAIRS = frozenset(_COMMON_PAIRS.split())
"""Pairs of letters that words are full of (some 70 %; of drawn letters, 18 %)."""
_MANGLED = re.compile(r"_Z(?:[NKLSTVZ]|St)*\d+[a-z]")
"""A mangled C++ name (Itanium ABI), which a stack trace is full of."""
HEX_LEAST, RANDOM_LEAST = 24, 16


def hides(name: str, value: str) -> bool:
    """Whether ``value`` behind ``name`` is a secret: the name says so, and the value is one (a count is none)."""
    if re.search(r"(?:error|exception|warning)$", name, re.IGNORECASE):
        return False
    if len(value) < 3 or value.lower().strip("[]<>\"'") in _NOTHING or not is_secret(_spaced(name)):
        return False
    return bool(_STRONG.search(name)) or not _NUMBER.fullmatch(value)


def looks_random(token: str) -> bool:
    """Whether a run of letters, digits and ``_+/=-`` looks drawn rather than written.

    Words, versions, identifiers and mangled names do not; hex digits do from ``HEX_LEAST`` on. An estimate of ours: of
    its parts between separators, those count that change between letters, digits and cases as drawn ones do.
    """
    if _MANGLED.match(token):
        return False
    return sum(len(part) for part in _PART.findall(token) if _drawn(part.removeprefix("0x"))) >= RANDOM_LEAST


def _drawn(part: str) -> bool:
    digits = sum(one.isdigit() for one in part)
    if digits == len(part) or len(part) < 6 or len(set(part)) < min(8, len(part) / 3):
        return False
    if re.fullmatch(r"[0-9a-f]{8,}|[0-9A-F]{8,}", part):
        return digits > 0 and len(part) >= HEX_LEAST
    pairs = [one.lower() for run in re.findall(r"[A-Za-z]{2,}", part) for one in map("".join, pairwise(run))]
    natural = sum(one in _PAIRS for one in pairs) / max(1, len(pairs))
    changes = len(_CHANGE.findall(part))
    if part in (part.lower(), part.upper()):
        return len(part) >= 14 and digits >= 2 and changes >= len(part) / 8 and natural < 0.4
    return changes >= len(part) / 6 and natural < 0.4


def forms(text: str) -> Iterator[Found]:
    """Secrets of a known issuer's form, and random-looking runs."""
    for what, pattern in FORMS:
        for match in pattern.finditer(text):
            yield Found(match.start(), match.end(), what)
    for match in _LONG.finditer(text):
        if looks_random(match[0]):
            yield Found(match.start(), match.end(), "a random-looking string")


def _spaced(name: str) -> str:
    """``apiKey`` in the words that ``is_secret`` reads."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.replace("pwd", "password").replace("PWD", "PASSWORD"))
