"""A run as JUnit XML, which every CI shows: verdict, gates, faults and kinds of bad turns are test cases.

What could not be seen is an error, never a skip: a skipped case counts as green.
"""

from __future__ import annotations

from xml.etree import ElementTree as Tree

from soakrig.record.outcome import OUTCOMES
from soakrig.record.result import Result
from soakrig.reports.campaign_text import inert

_MOST = 2000


def junit_xml(result: Result, seconds: float) -> bytes:
    """The document. ``seconds``: how long the run took."""
    suites = Tree.Element("testsuites")
    name = f"{'SIMULATED ' if result.simulated else ''}soakrig {result.run_id}"
    suite = Tree.SubElement(suites, "testsuite", {"name": name, "time": f"{seconds:.3f}"})
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}

    def case(title: str, failure: str = "", error: str = "", text: str = "") -> None:
        made = Tree.SubElement(suite, "testcase", {"classname": "soakrig", "name": inert(title, 300)})
        counts["tests"] += 1
        for tag, count, message in (("failure", "failures", failure), ("error", "errors", error)):
            if message:
                told = Tree.SubElement(made, tag, {"message": inert(message, 500)})
                told.text = "\n".join(inert(line, _MOST) for line in text.splitlines())
                counts[count] += 1

    why = "\n".join(result.reasons)
    verdict = {"pass": {}, "fail": {"failure": why or "fail"}, "inconclusive": {"error": why or "inconclusive"}}
    case("verdict", **verdict[result.verdict], text=why)
    for gate in result.gates:
        measured = "not measured" if gate.value is None else f"measured {gate.value:.4g}"
        unknown, broken = gate.held is None, gate.held is False
        case(f"gate {gate.gate}", failure=measured if broken else "", error=measured if unknown else "")
    for number, fault in enumerate(result.faults, 1):
        where = "no turn in flight" if fault.turn is None else f"turn {fault.turn} of conversation {fault.conversation}"
        case(f"fault {number}: {fault.signature}", failure=f"{fault.signature} at {where}", text=fault.raw)
    for outcome in OUTCOMES:
        count = result.outcomes.get(outcome, 0)
        if outcome != "ok" and count:
            text = f"{count} turns were {outcome}"
            case(f"turns {outcome}", **{"error" if outcome == "aborted" else "failure": text})
    for source, state in result.sources.items():
        if state.state != "live" and any(source in text for text in result.unknown):
            case(f"source {source}", error=f"{state.state}: {state.detail}")
    for element in (suites, suite):
        element.attrib |= {name: str(value) for name, value in counts.items()}
    return Tree.tostring(suites, encoding="utf-8", xml_declaration=True)
