"""The files of a bundle, redacted and checked."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from functools import cache
from importlib import resources

import orjson

from soakrig.errors import PreflightRefusedError
from soakrig.record.campaign import CampaignResult
from soakrig.record.leaks import Leak, LeakCheck
from soakrig.record.private_things import Known
from soakrig.record.quotes import Quotes
from soakrig.record.redactor import Redactor
from soakrig.reports.bundle.issue import Told, issue_text, redactions_text
from soakrig.reports.bundle.redacted_run import Cleaner, redacted_run
from soakrig.reports.bundle.reproducer import PAYLOAD, SCRIPT, Payload, kernel_log_alone, script
from soakrig.reports.bundle.texts import RunTexts, prompt_texts, run_texts, settings_of
from soakrig.reports.run_page import run_html
from soakrig.reports.run_view import RunView

ISSUE, REDACTIONS, PAGE = "issue.md", "redactions.md", "report.html"
MOST_TOLD = 12
"""Leaks that a refusal names."""
CONTENT = ("tool_malformed", "degenerate", "answerless", "malformed")
"""Outcomes whose reasons quote an answer."""
_PAYLOAD_MARK = b'{"note":"SIMULATED: a planted fault took part in the run that these requests are of"}\n'
_VOCABULARY = ("campaign.py", "events.py", "manifest.py", "outcome.py", "result.py", "signal.py")
_MORE_WORDS = (
    "localhost root user users admin nobody none null true false assistant function system developer xid nvrm pci"
)


@cache
def our_words() -> frozenset[str]:
    """Words of the tool's own records and pages: a host called ``engine`` is not replaced in each of them."""
    texts = [
        _MORE_WORDS,
        *(resources.files("soakrig.record").joinpath(name).read_text("utf-8") for name in _VOCABULARY),
    ]
    folder = resources.files("soakrig.reports").joinpath("templates")
    texts += [one.read_text("utf-8") for one in folder.iterdir() if one.is_file()]
    texts.append(resources.files("soakrig.reports.bundle").joinpath("standalone.py").read_text("utf-8"))
    return frozenset(word.lower() for text in texts for word in re.findall(r"[^\W\d_]+", text))


class Bundle:
    """Makes the files of one run's bundle. First ``cleaner`` has to know everything: it does once this is made.

    ``known``: values that must not be told whatever they look like.
    """

    def __init__(self, view: RunView, known: Iterable[Known], told: Told, *, keep_text: bool = False) -> None:
        self.view, self.told, self.keep_text = view, told, keep_text
        self.known = list(known)
        self.texts = run_texts(view)
        redactor = Redactor(self.known, our_words())
        quotes = None if keep_text else _quotes(self.texts)
        for data in (self.texts.manifest, self.texts.events, self.texts.result):
            redactor.learn_data(data)
        for text in (self.texts.kernel, self.texts.engine):
            redactor.learn(text)
        if told.campaign is not None:
            redactor.learn_data(told.campaign.to_json())
        for text in prompt_texts(view.folder):
            redactor.learn(text)
            if quotes is not None:
                quotes.feed(text)
        self.cleaner = Cleaner(redactor, quotes)

    def files(self, payload: Payload | None) -> dict[str, bytes]:
        """The files by name. ``payload`` has to be redacted already (``clean_payload``).

        Raises ``PreflightRefusedError`` where a secret survives in one of them.
        """
        run = redacted_run(self.view, self.texts, self.cleaner)
        redactor = self.cleaner.redactor
        campaign = self.told.campaign
        if campaign is not None:
            campaign = CampaignResult.from_json(self.cleaner.data(campaign.to_json()))
        signature = self.cleaner.text(self.told.signature)
        told = Told(signature, self.told.meanings, self.told.interval, campaign)
        simulated = self.view.simulated or (campaign is not None and campaign.simulated)
        page = run_html(run.view)
        files = dict(run.files)
        files |= {
            PAGE: page.encode(),
            "settings.json": orjson.dumps(
                settings_of(run.view.manifest) | {"simulated": simulated},
                option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE,
            ),
            "kernel.log": _log(run.kernel, "kernel log", simulated=simulated),
            "engine.log": _log(run.engine, "engine's log", simulated=simulated),
            ISSUE: issue_text(run.view, payload, told, keep_text=self.keep_text).encode(),
        }
        if payload is not None:
            alone = kernel_log_alone(self.view)
            files |= {
                SCRIPT: script(signature, simulated=simulated, needs_kernel_log=alone),
                PAYLOAD: (_PAYLOAD_MARK if simulated else b"") + payload.data,
            }
        names = sorted([*files, REDACTIONS])
        files[REDACTIONS] = redactions_text(self.cleaner, payload, simulated=simulated, names=names).encode()
        known = [one for one in self.known if (one.kind, one.value.lower()) not in redactor.ambiguous]
        check(files, LeakCheck(known, redactor.literals(), _page_digests()))
        return files


def check(files: dict[str, bytes], leaks: LeakCheck) -> None:
    """Raise ``PreflightRefusedError`` where something survives; it names places and kinds, never values."""
    found: list[Leak] = [leak for name, data in sorted(files.items()) for leak in leaks.file(name, data)]
    if not found:
        return
    places = "; ".join(f"{one.file} line {one.line}: {one.what}" for one in found[:MOST_TOLD])
    more = f"; and {len(found) - MOST_TOLD} more" if len(found) > MOST_TOLD else ""
    raise PreflightRefusedError(
        f"no bundle was written: after redaction {len(found)} places still tell something: {places}{more}",
        remedy="Take the value out of the run's folder (or, for a variable of this shell, unset it) and try again; "
        "please report the form that was not caught.",
    )


def _quotes(texts: RunTexts) -> Quotes:
    """Where prompts may be quoted: logs, and what events say."""
    documents = [texts.kernel, texts.engine]
    stack: list[object] = [texts.events, texts.result]
    while stack:
        one = stack.pop()
        if isinstance(one, str):
            documents.append(one)
        elif isinstance(one, dict):
            stack += one.values()
        elif isinstance(one, list):
            stack += one
    quotes = Quotes(dict.fromkeys(documents))
    for event in texts.events:
        if event.get("outcome") in CONTENT:
            quotes.answer(str(event.get("why", "")))
    return quotes


def _log(text: str, what: str, *, simulated: bool) -> bytes:
    mark = "SIMULATED: a planted fault took part in this run\n" if simulated else ""
    return f"{mark}[excerpts of the {what}, redacted{'' if text else ': the run has none'}]\n{text}\n".encode()


def _page_digests() -> list[str]:
    """Digests in a page's policy, which look random."""
    data = resources.files("soakrig.reports").joinpath("templates", "run.js").read_bytes()
    return [base64.b64encode(hashlib.sha256(data).digest()).decode()]
