"""Lines of the kernel log: our own fixtures, and the shared corpus where it is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from soakrig.record.incident import group_incidents
from soakrig.record.signal import Signal
from soakrig.soak.watch.kernel_lines import classify
from soakrig.soak.watch.kernel_record import parse_record

ROOT = Path(__file__).parents[2]
LINES = [json.loads(line) for line in (ROOT / "tests/fixtures/kernel/lines.jsonl").read_text().splitlines()]
CORPUS = ROOT.parent / "shared" / "corpus" / "kernel_log.jsonl"

FIELDS = (
    "xid",
    "pci",
    "pid",
    "process",
    "engine",
    "client",
    "fault_type",
    "access",
    "address",
    "severity",
    "signature",
)


@pytest.mark.parametrize("case", LINES, ids=lambda c: f"{c['kind']}-{c['line'][:40]}")
def test_line_is_read_as_expected(case: dict[str, Any]) -> None:
    signals = classify(parse_record(case["line"]))
    if case["kind"] == "none":
        assert signals == []
        return
    signal = signals[0]
    assert signal.kind == case["kind"]
    assert {key: getattr(signal, key) for key in FIELDS if key in case} == {k: case[k] for k in FIELDS if k in case}
    if "injected" in case:
        assert signal.injected is case["injected"]
    want = case.get("detail", {})
    assert {key: signal.detail.get(key) for key in want} == want
    assert signal.raw == case["line"].rstrip("\n")
    assert [s.kind for s in signals[1:]] == ([case["then"]] if "then" in case else [])


# -- the shared corpus ------------------------------------------------------------------------------------------------

NAMES = {"name": "process", "comm": "process", "addr": "address", "tid": "pid"}
DETAILS = {"ch": "channel", "addr_int": "address_value", "pri": "level"}
KNOWN_WRONG = {("x088", 1, "owner_tid")}
"""The line names task 40377 as the owner, the expectation says 74558."""


def corpus() -> list[dict[str, Any]]:
    return [json.loads(line) for line in CORPUS.read_text().splitlines()] if CORPUS.exists() else []


needs_corpus = pytest.mark.skipif(not CORPUS.exists(), reason=f"the shared corpus is not at {CORPUS}")


def corpus_signals(excerpt: dict[str, Any]) -> list[list[Signal]]:
    """Signals by line; a line without a time of its own takes the time of the one above."""
    found: list[list[Signal]] = []
    mono = 0.0
    for number, line in enumerate(excerpt["lines"]):
        record = parse_record(line)
        if record.kernel_us is not None:
            mono = record.kernel_us / 1e6
        elif record.wall is not None:
            mono = record.wall
        found.append(classify(record))
        for signal in found[-1]:
            signal.mono = mono
            signal.detail["line"] = number
    return found


@needs_corpus
@pytest.mark.parametrize("excerpt", corpus(), ids=lambda e: e["id"])
def test_corpus_line_is_read_as_expected(excerpt: dict[str, Any]) -> None:
    wrong: list[str] = []
    for number, (signals, expected) in enumerate(zip(corpus_signals(excerpt), excerpt["expects"], strict=True)):
        want = dict(expected)
        kind = want.pop("kind")
        if kind == "none":
            assert signals == []
            continue
        signal = signals[0]
        if kind == "injected":
            assert (signal.kind, signal.injected, signal.xid) == ("xid", True, want["lenient_xid"])
            continue
        assert signal.kind == kind, f"line {number}"
        for key, value in want.items():
            if (
                key in ("flag", "ts_us", "fac", "lenient_xid", "lenient_pci")
                or (excerpt["id"], number, key) in KNOWN_WRONG
            ):
                continue
            name = "nvlink_severity" if (key, kind) == ("severity", "xid") else DETAILS.get(key, key)
            got = getattr(signal, NAMES.get(key, key)) if NAMES.get(key, key) in FIELDS[:9] else signal.detail.get(name)
            if key == "pci" and value:
                value = re.sub(r"\.[0-9a-f]$", "", value)  # ours is without the function
            if (key == "comm" and value == "") or (key == "sig" and value == "none"):
                value = None
            if got != value:
                wrong.append(f"line {number} {key}: got {got!r}, expected {value!r}")
    assert wrong == []


@needs_corpus
@pytest.mark.parametrize("excerpt", [e for e in corpus() if "incident" in e], ids=lambda e: e["id"])
def test_corpus_incident_is_grouped_as_judged(excerpt: dict[str, Any]) -> None:
    incidents = group_incidents(s for signals in corpus_signals(excerpt) for s in signals)
    judged = excerpt["incident"]
    assert len(incidents) == 1
    (incident,) = incidents
    assert incident.headline.detail["line"] == judged["headline"]
    assert [s.detail["line"] for s in incident.precursors] == judged.get("precursor", [])
    assert [s.detail["line"] for s in incident.aftermath] == judged.get("aftermath", [])
    assert incident.recovery == judged.get("recovery", incident.recovery)


# -- any text ---------------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        *("NVRM: Xid (PCI:0000:01:00): 31, ", "NVRM: ", "Xid (", "pid=", "name=", "faulted @ ", "Fault is of type "),
        *("kernel: ", "4,1,2,-;", "12,1,2,-;", "<4>", "[1.000001] ", "\\x0a", "\n", "Mar  1 00:00:00 h ", "> "),
        *("{", '{"MESSAGE":', "}", "²", "٣", "2026-01-01T00:00:00Z ", "\x1b[0m", "nvidia-nvswitch1: SXid (PCI:", "oom"),
        "154, GPU recovery action changed",
    ]
)
ANY_TEXT = st.one_of(st.text(), st.lists(st.one_of(PIECES, st.text(max_size=8))).map("".join))
DRIVER_LINE = re.compile(r"NVRM: Xid \([^()]*\): [0-9]+(?=[\s,]|$)")


@given(ANY_TEXT)
@example("NVRM: Xid (PCI:0000:01:00): " + "9" * 5000)
@example("9" * 5000 + ",1,1,-;NVRM: Xid (PCI:0000:01:00): 31, ")
@example('{"MESSAGE":[1,2,999,"x"],"SYSLOG_FACILITY":"x","PRIORITY":{}}')
def test_no_text_raises_and_an_xid_needs_the_drivers_beginning(text: str) -> None:
    record = parse_record(text)
    for signal in classify(record):
        if signal.xid is not None:
            assert any(DRIVER_LINE.match(line) for line in record.text.split("\n"))


@given(st.text(min_size=1).filter(lambda t: not t.startswith("NVRM: ")))
def test_text_before_the_drivers_word_makes_it_a_quotation(text: str) -> None:
    record = parse_record(
        "6,1,1,-;" + text.replace("\n", " ").replace("\r", " ") + "NVRM: Xid (PCI:0000:01:00): 79, gone"
    )
    assert all(s.xid is None for s in classify(record))
