"""The reports of the made-up campaigns as ``tests/golden/campaign`` holds them. ``python tests/campaign_golden.py``
writes them anew; read the difference before you keep it."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from campaign_results import not_in_list, running, single
from soakrig.record.campaign import CampaignResult
from soakrig.reports.campaign_page import campaign_markdown
from soakrig.reports.campaign_terminal import print_campaign
from soakrig.reports.terminal import WIDTH

GOLDEN = Path(__file__).parent / "golden" / "campaign"


def terminal(result: CampaignResult, encoding: str = "utf-8", **console: bool) -> str:
    """The terminal report in ``encoding``, strictly: what it cannot hold is an error."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    print_campaign(Console(file=stream, width=WIDTH, highlight=False, **console), result)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


def renderings() -> dict[str, str]:
    """File name -> text, without the blanks that end a line on a terminal."""
    found: dict[str, str] = {}
    for make in (single, not_in_list, running):
        for encoding in ("utf-8", "ascii"):
            lines = terminal(make(), encoding).splitlines()
            found[f"{make.__name__}.{encoding}.txt"] = "\n".join(line.rstrip() for line in lines) + "\n"
        found[f"{make.__name__}.md"] = campaign_markdown(make())
    return found


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for name, text in renderings().items():
        (GOLDEN / name).write_text(text, "utf-8")
