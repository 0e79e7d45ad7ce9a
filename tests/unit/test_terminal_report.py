"""The terminal report: everything a verdict rests on, in its order, in plain ASCII where it has to be."""

from __future__ import annotations

import io
import os
from pathlib import Path

from rich.console import Console

from builders import T0, alive, dead, done, ended, judged, kernel_live, sent, turns, xid
from soakrig.record.events import Note, SampleTaken
from soakrig.reports.live import LiveView, turn_line
from soakrig.reports.series import ASCII_BLOCKS, BLOCKS, MOST_POINTS, Series, Track, sparkline
from soakrig.reports.terminal import TRACKS, LastingConsole, print_report, timeline
from soakrig.soak.watch.metrics import FAMILIES


def text_of(*events: object, folder: Path | None = None, encoding: str = "utf-8", **fields: object) -> str:
    series = Series()
    for event in events:
        series.feed(event)
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict")
    console = Console(file=stream, width=100, highlight=False)
    print_report(console, judged(*events, **fields).result(), series, folder)
    stream.flush()
    return stream.buffer.getvalue().decode(encoding)


FAULTY = [
    kernel_live(),
    *turns(1, 32),
    SampleTaken(T0, T0, "process", {"rss_mib": 812.0}),
    SampleTaken(T0 + 1, T0 + 1, "process", {"rss_mib": 1640.0}),
    sent(33, T0 + 60),
    xid(31, T0 + 60.5, signature="Xid 31 FAULT_PDE VIRT_WRITE GRAPHICS GPC0"),
    done(33, T0 + 61, "truncated", prompt_tokens=13041, context_tokens=13041),
    dead(T0 + 62, 33),
    ended(T0 + 63, "engine_dead"),
]


def test_a_fault_is_told_with_turn_context_and_load() -> None:
    text = text_of(*FAULTY, turns=60, folder=Path("runs/x"))
    assert "FAIL" in text
    assert "Xid 31 FAULT_PDE VIRT_WRITE GRAPHICS GPC0" in text
    assert "turn 33 of conversation 0" in text
    assert "32.5 s under load" in text
    assert "named in the line: pid 77, python3" in text
    assert "caused by" not in text
    assert "." * 32 + "T" in text
    assert "32 of 60 turns" in text or "33 of 60 turns" in text
    assert "runs/x" in text


def test_the_parts_stand_in_their_order() -> None:
    text = text_of(*FAULTY, gates=["ttft_p99 < 20s"])
    heads = ["FAIL", "\ngates", "\nfaults", "\nturns", "\nexposure", "latency: first token", "latency: decode"]
    places = [text.index(head) for head in [*heads, "over the run", "what was watched"]]
    assert places == sorted(places)


def test_a_pass_prints_its_bound_and_what_it_does_not_mean() -> None:
    text = text_of(kernel_live(), *turns(1, 60), alive(), ended(), turns=60)
    assert "PASS" in text
    assert "4.87 %" in text
    assert "do not show that there is" in " ".join(text.split())


def test_an_ascii_terminal_gets_ascii() -> None:
    text = text_of(*FAULTY, encoding="ascii")
    assert "FAIL" in text
    assert any(block in text for block in ASCII_BLOCKS[-3:])


def test_faults_stand_on_a_timeline() -> None:
    text = text_of(*FAULTY, turns=60)
    (by_turn,) = [line for line in text.splitlines() if line.startswith("  by turn")]
    assert by_turn.index("X") == by_turn.index("|") + 60, "the last turn of 33"
    assert by_turn.endswith("33 turns")
    assert timeline([0.0, 30.0, 59.9], 60.0) == "X" + "-" * 29 + "X" + "-" * 28 + "X"
    assert timeline([61.0], 60.0).endswith("X")


def test_simulated_is_shouted() -> None:
    assert "SIMULATED" in text_of(*FAULTY, simulated=True)
    assert "SIMULATED" not in text_of(*FAULTY)


def test_a_track_keeps_its_peak_and_its_size() -> None:
    track = Track()
    for n in range(100_000):
        track.add(1.0 if n != 77_777 else 9.0)
    assert len(track.all()) <= MOST_POINTS + 1
    assert max(track.all()) == 9.0


def test_series_of_a_long_run_stay_small() -> None:
    series = Series()
    for n in range(20_000):
        series.feed(done(n, T0 + n))
    assert len(series.marks) <= 2 * 4096
    assert series.marks_dropped + len(series.marks) == 20_000


def test_sparklines() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == BLOCKS[0] * 2
    assert sparkline([0.0, 7.0]) == BLOCKS[0] + BLOCKS[-1]
    assert len(sparkline([float(n) for n in range(1000)], width=40)) == 40
    assert sparkline([*[0.0] * 999, 5.0], width=40)[-1] == BLOCKS[-1], "a peak never vanishes"
    assert sparkline([0.0, 7.0], ascii_only=True).isascii()


def test_the_live_view_writes_plain_lines_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    view = LiveView(Console(file=stream, width=100, highlight=False))
    judge = judged()
    with view:
        for event in [*FAULTY, Note(T0, T0, "a remark")]:
            judge.feed(event)
            view(event, judge)
    text = stream.getvalue()
    assert "c0 t33  truncated  ctx 13041" in text
    assert "fault: Xid 31" in text
    assert "engine dead: gone" in text
    assert "a remark" in text
    assert "ended: engine_dead" in text
    assert "\x1b" not in text


def test_the_live_panel_shows_progress_and_the_last_signal() -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, highlight=False)
    view = LiveView(console)
    judge = judged(turns=60)
    for event in FAULTY:
        judge.feed(event)
        view(event, judge) if view._live else view.series.feed(event)
        view.judge, view.last_turn = judge, event if event.kind == "turn" else view.last_turn
    view.last_signal = "fault: Xid 31"
    console.print(view._panel())
    text = stream.getvalue()
    assert "33 of 60 turns" in text
    assert "context 13,041" in text
    assert "Xid 31" in text


def test_a_turn_line_says_why_it_is_not_ok() -> None:
    assert turn_line(done(3, T0, "hung")).endswith("made hung")
    assert "tok/s" in turn_line(done(3, T0))


def test_every_track_is_a_figure_that_a_watcher_samples() -> None:
    page = (Path(__file__).parent.parent.parent / "docs" / "watchers.md").read_text()
    for name, *_ in TRACKS:
        source, figure = name.split(".")
        if source == "metrics":
            assert figure in FAMILIES
        elif source != "turn":
            assert f"`{figure}`" in page, name


def test_a_reader_that_goes_away_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = io.TextIOWrapper(io.FileIO(writer, "w"), write_through=True)
    console = LastingConsole(file=stream, width=100)
    console.print("into a broken pipe")
    assert console.quiet
    console.print("and nobody minds")
    stream.close()
