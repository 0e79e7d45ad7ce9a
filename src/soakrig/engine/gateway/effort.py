"""Effort: model aliases that stand for template settings, and words that a template does not know.

A template that knows only some words takes any other for its own default, which may be the longest thinking there is;
so a client's word can be mapped, and what the engine was asked for is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from soakrig.engine.gateway.body import Json, inner
from soakrig.engine.gateway.policies import Preset

KWARGS, EFFORT = "chat_template_kwargs", "reasoning_effort"
WORDS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
"""Efforts that vLLM 0.32 takes; another word is counted as "other"."""


def fill_preset(fields: Json, preset: Preset, path: str) -> bool:
    """Fill a request's gaps with what an alias stands for. What the request says itself stays: an effort that it gives
    in either place keeps the alias's out of both. Returns whether anything was filled."""
    if path == "/v1/completions":
        return False  # there is no template
    if path == "/v1/responses":
        return _fill_responses(fields, preset)
    sent = inner(fields, KWARGS)
    stated = EFFORT in sent or fields.get(EFFORT) is not None
    gaps = {
        name: value
        for name, value in preset.chat_template_kwargs.items()
        if name not in sent and not (name == EFFORT and stated)
    }
    if gaps:
        fields[KWARGS] = {**gaps, **sent}
    fills_effort = preset.reasoning_effort is not None and not stated and path != "/tokenize"
    if fills_effort:
        fields[EFFORT] = preset.reasoning_effort
    return bool(gaps) or fills_effort


def map_words(fields: Json, words: Mapping[str, str]) -> bool:
    """Replace a client's word for its effort where ``words`` has another for it; whether one was replaced."""
    changed = False
    for table in (fields, inner(fields, KWARGS), inner(fields, "reasoning")):
        name = "effort" if table is fields.get("reasoning") else EFFORT
        word = table.get(name)
        if isinstance(word, str) and words.get(word, word) != word:
            table[name] = words[word]
            changed = True
    return changed


def asked_effort(fields: Json) -> str:
    """The effort that an engine was asked for, as the template sees it: a word, ``-`` for none, ``other``."""
    word = inner(fields, KWARGS).get(EFFORT) or fields.get(EFFORT) or inner(fields, "reasoning").get("effort")
    if word is None:
        return "-"
    return word if isinstance(word, str) and word in WORDS else "other"


def _fill_responses(fields: Json, preset: Preset) -> bool:
    """The Responses API has one place for the effort, and no template settings."""
    effort = preset.reasoning_effort or preset.chat_template_kwargs.get(EFFORT)
    sent = inner(fields, "reasoning")
    if effort is None or sent.get("effort") is not None:
        return False
    fields["reasoning"] = {**sent, "effort": effort}
    return True
