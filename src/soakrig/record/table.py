"""Turns of a run as a table, for analysis: one row a turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from soakrig.record.events import Event, TurnDone
from soakrig.record.latency import decode_rate

if TYPE_CHECKING:
    import pandas as pd


def turns_table(events: Iterable[Event]) -> pd.DataFrame:
    """One row for each finished turn, in the order of their end: the fields of ``TurnDone`` (seconds, tokens) and
    ``decode_tokens_per_s``. ``mono`` counts from the run's first event."""
    import pandas as pd  # half a second to import, and only this needs it

    start: float | None = None
    rows: list[dict[str, object]] = []
    for event in events:
        start = event.mono if start is None else start
        if isinstance(event, TurnDone):
            row = asdict(event)
            del row["kind"]
            row["accepted"] = " ".join(event.accepted)
            row["mono"] = event.mono - start
            row["decode_tokens_per_s"] = decode_rate(event)
            rows.append(row)
    return pd.DataFrame(rows)
