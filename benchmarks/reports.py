"""How long reports take: the page of a run of 10,000 turns with 200 faults, beside reading its events alone.

    python benchmarks/reports.py

Prints seconds and bytes, measured, and the ratio to a bare read of the same events (pydantic over every line).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from run_folders import long_run, write_run
from soakrig.record.store import RunReader
from soakrig.reports.run_page import run_html
from soakrig.reports.run_view import read_run

ROUNDS = 5


def main() -> None:
    """Make the run, then time both in turn."""
    with tempfile.TemporaryDirectory() as base:
        folder = write_run(Path(base) / "run", long_run(10_000, faults=200, bad_every=500), turns=10_000)
        reads: list[float] = []
        pages: list[float] = []
        size = 0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            for _event in RunReader(folder).events():
                pass
            reads.append(time.perf_counter() - began)
            began = time.perf_counter()
            size = len(run_html(read_run(folder)).encode())
            pages.append(time.perf_counter() - began)
    read, page = sorted(reads)[ROUNDS // 2], sorted(pages)[ROUNDS // 2]
    print(f"10,000 turns, 200 faults: page {page:.2f} s, {size:,} bytes")
    print(f"events alone {read:.2f} s; ratio {page / read:.1f}")


if __name__ == "__main__":
    main()
