"""How long reports take: the page of a run of 10,000 turns with 200 faults beside reading its events alone, and the
index over 1,000 run folders beside reading their results alone.

    python benchmarks/reports.py

Prints seconds and bytes, measured: medians of five rounds.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import orjson

from run_folders import long_run, write_run
from soakrig.record.run_index import INDEX, RunIndex
from soakrig.record.store import MANIFEST, RunReader
from soakrig.reports.run_list import Asked, list_html
from soakrig.reports.run_page import run_html
from soakrig.reports.run_view import read_run

ROUNDS = 5
FOLDERS, CUT = 1_000, 20
"""Run folders of 60 turns in the index, and how many of them were cut off (judged from their events)."""


def timed(*what: Callable[[], object]) -> list[float]:
    """Median seconds of each, done in turn."""
    spent: list[list[float]] = [[] for _ in what]
    for _ in range(ROUNDS):
        for do, seconds in zip(what, spent, strict=True):
            began = time.perf_counter()
            do()
            seconds.append(time.perf_counter() - began)
    return [sorted(seconds)[ROUNDS // 2] for seconds in spent]


def page(base: Path) -> None:
    """The page of a long run."""
    folder = write_run(base / "run", long_run(10_000, faults=200, bad_every=500), turns=10_000)
    size = len(run_html(read_run(folder)).encode())
    read, drawn = timed(lambda: list(RunReader(folder).events()), lambda: run_html(read_run(folder)))
    print(f"10,000 turns, 200 faults: page {drawn:.2f} s, {size:,} bytes")
    print(f"events alone {read:.2f} s; ratio {drawn / read:.1f}")


def index(base: Path) -> None:
    """The index of a runs folder, made anew and brought up to date, and the list's page."""
    first = write_run(base / "r0000", long_run(60, faults=1), turns=60)
    made = orjson.loads((first / MANIFEST).read_bytes())
    for n in range(1, FOLDERS):
        folder = shutil.copytree(first, base / f"r{n:04d}")
        (folder / MANIFEST).write_bytes(orjson.dumps(made | {"run_id": folder.name, "created": 1000.0 + n}))
        if n <= CUT:
            (folder / "result.json").unlink()

    def results() -> None:
        for folder in base.iterdir():
            if folder.is_dir():
                RunReader(folder).stored_result()

    def anew() -> None:
        (base / INDEX).unlink(missing_ok=True)
        again()

    def again() -> None:
        with RunIndex(base, keep=True) as rows:
            rows.refresh()

    def listed() -> None:
        with RunIndex(base, keep=True) as rows:
            rows.refresh()
            list_html(str(base), rows.rows(), Asked())

    bare, whole, fresh, shown = timed(results, anew, again, listed)
    print(f"{FOLDERS:,} folders of 60 turns, {CUT} of them cut off: index anew {whole:.2f} s")
    print(f"manifests and results alone {bare:.2f} s; ratio {whole / bare:.1f}")
    print(f"nothing changed {fresh:.3f} s, with the list's page {shown:.3f} s")


def main() -> None:
    """Both."""
    with tempfile.TemporaryDirectory() as base:
        page(Path(base) / "one")
        index(Path(base) / "many")


if __name__ == "__main__":
    main()
