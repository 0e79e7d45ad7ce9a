"""Context: no more than was validated, no more than the checkpoint allows, and a KV cache that holds it."""

from __future__ import annotations

from soakrig.engine.checkpoint import own_words
from soakrig.engine.launch_values import flag_value
from soakrig.engine.planning.fit import kv_cache, longest_context
from soakrig.engine.preflight.finding import Finding, ok, refused, unknown
from soakrig.engine.preflight.machine import Machine
from soakrig.engine.registry_entry import KV_CAP, Entry
from soakrig.errors import SoakrigError

EMBEDDED_KV = "--kv-tokens"


def check_context(entry: Entry, machine: Machine) -> Finding:
    """The context against the one that was validated and against the checkpoint's own limit, to the token."""
    name, asked, valid = "context", entry.context, entry.validated_context
    try:
        limit = own_words(entry, machine.home).config.max_positions
    except SoakrigError:
        limit = None  # told by the check of the checkpoint
    if limit is not None and asked > limit:
        return refused(
            name,
            f"{asked:,} tokens asked, the checkpoint allows {limit:,}",
            f"Set context to {limit} at most.",
            needs=asked,
            has=limit,
            unit="tokens",
        )
    if valid is None:
        return unknown(
            name,
            f"{asked:,} tokens asked, and no context was validated for this model",
            "Serve it, read a prompt of that length, and set validated_context.",
        )
    text = f"{asked:,} tokens asked, {valid:,} validated"
    if asked > valid:
        remedy = f"Set context to {valid} at most, or validate more: a prompt of that length has to be read once."
        return refused(name, text, remedy, needs=asked, has=valid, unit="tokens")
    if entry.longest_prefill is not None and entry.longest_prefill < asked:
        share = 100 * entry.longest_prefill / asked
        text += f"; the longest prompt really read is {entry.longest_prefill:,} ({share:.0f}%)"
    return ok(name, text, needs=asked, has=valid, unit="tokens")


def check_kv_cap(entry: Entry, machine: Machine) -> Finding:
    """The KV cache against the context: one full conversation has to fit."""
    name = "kv-cap"
    if entry.backend == "embedded":
        return _embedded_kv(name, entry)
    given = flag_value(entry.flags, KV_CAP)
    per_token = entry.kv_bytes_per_token
    if per_token is None:
        if given is None:
            return ok(name, "no cap: vLLM sizes the cache from the memory that is left, and refuses a context above it")
        return unknown(name, f"{KV_CAP}={given}, and the registry has no kv_bytes_per_token to judge it by")
    need = int(kv_cache(entry.context, per_token).value)
    arithmetic = f"{entry.context:,} tokens x {per_token:,} bytes = {need:,} bytes"
    if given is None:
        return ok(name, f"{arithmetic}, which is the cap", needs=need, has=need, unit="bytes")
    if not given.isdecimal():
        return unknown(name, f"{KV_CAP}={given} is no number of bytes")
    text = f"{arithmetic} needed, {int(given):,} bytes is the cap"
    if int(given) < need:
        most = longest_context(int(given), per_token)
        remedy = f"Leave {KV_CAP} out (the cap then follows the context), or set context to {most} at most."
        return refused(name, text, remedy, needs=need, has=int(given), unit="bytes")
    return ok(name, text, needs=need, has=int(given), unit="bytes")


def _embedded_kv(name: str, entry: Entry) -> Finding:
    from soakrig.engine.embedded.config import EngineConfig

    text = flag_value(entry.flags, EMBEDDED_KV)
    if text is not None and not text.isdecimal():
        return unknown(name, f"{EMBEDDED_KV}={text} is no number of tokens")
    budget = EngineConfig().kv_tokens if text is None else int(text)
    said = f"{entry.context:,} tokens of context, {budget:,} of KV cache"
    if budget < entry.context:
        remedy = f"Raise {EMBEDDED_KV}, or set context to {budget} at most."
        return refused(name, said, remedy, needs=entry.context, has=budget, unit="tokens")
    return ok(name, said, needs=entry.context, has=budget, unit="tokens")
