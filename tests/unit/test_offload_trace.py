"""Routing traces as files: round trip, what a killed engine leaves, and what is refused with what was read."""

from __future__ import annotations

import errno
import struct
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from soakrig.engine.offload import trace as trace_module
from soakrig.engine.offload.plan import LayerShape, ModelShape, OffloadPlan
from soakrig.engine.offload.settings import OffloadSettings
from soakrig.engine.offload.trace import ALIGN, MAGIC, TraceHeader, TraceWriter, read_trace
from soakrig.errors import UsageError

Step = tuple[NDArray[np.uint8], NDArray[np.int16]]
HEADER = TraceHeader("m", 8, (3, 5), 2)
ROW = 2 * (2 + 2 * 2)


def plan_of(layers: tuple[int, ...] = (3, 5)) -> OffloadPlan:
    model = ModelShape("m", tuple(LayerShape(layer, 8, 64) for layer in layers), top_k=2)
    return OffloadPlan.build(OffloadSettings.from_environment({"VLLM_MOE_HOT_SLOTS": "arena:3"}), model)


def step(rows: int, seed: int = 0, mark: int = 0) -> Step:
    ids = np.random.default_rng(seed).integers(-2, 8, size=(rows, 2, 2)).astype(np.int16)
    return np.full(rows, mark, dtype=np.uint8), ids


def written(path: Path, steps: list[Step], header: TraceHeader = HEADER) -> str:
    with closing(TraceWriter(str(path), header)) as writer:
        for marks, ids in steps:
            writer.append(marks, ids)
    return str(path)


def same(read: list[Step], expected: list[Step]) -> bool:
    return len(read) == len(expected) and all(
        np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(read, expected, strict=True)
    )


@given(st.data())
def test_steps_come_back_as_they_were_appended(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    experts = data.draw(st.sampled_from([1, 8, 32767]))
    layers = tuple(data.draw(st.lists(st.integers(0, 99), min_size=1, max_size=3, unique=True)))
    top_k = data.draw(st.integers(1, min(experts, 3)))
    steps: list[Step] = []
    for rows in data.draw(st.lists(st.integers(1, 4), max_size=4)):
        one_id = st.integers(-2, experts - 1)
        size = rows * len(layers) * top_k
        ids = data.draw(st.lists(one_id, min_size=size, max_size=size))
        marks = data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows))
        shaped = np.array(ids, dtype=np.int16).reshape(rows, len(layers), top_k)
        steps.append((np.array(marks, dtype=np.uint8), shaped))
    header = TraceHeader(data.draw(st.text(st.characters(exclude_categories=["Cs"]))), experts, layers, top_k)
    path = written(tmp_path_factory.getbasetemp() / "one.trace", steps, header)
    trace = read_trace(path)
    assert (trace.header, trace.torn_bytes) == (header, 0)
    assert same(list(trace.steps()), steps)
    assert trace.ids.dtype == np.int16
    assert trace.marks.dtype == np.uint8


def test_the_file_is_laid_out_as_the_format_says(tmp_path: Path) -> None:
    ids = np.array([[[0, 7], [-1, -2]], [[1, 2], [3, 4]]], dtype=np.int16)
    path = written(tmp_path / "t", [(np.array([1, 2], dtype=np.uint8), ids)], replace(HEADER, plan=plan_of()))
    data = Path(path).read_bytes()
    assert data[:8] == b"SRTRACE1"
    (length,) = struct.unpack("<I", data[8:12])
    assert (12 + length) % 64 == 0
    raw = orjson.loads(data[12 : 12 + length])
    assert raw["schema"] == "soakrig.trace/1"
    assert list(raw) == ["schema", "model", "experts", "layers", "top_k", "staging_rows", "plan"]
    assert (raw["layers"], raw["top_k"], raw["experts"], raw["staging_rows"]) == ([3, 5], 2, 8, 64)
    assert raw["plan"] == plan_of().to_json()
    assert struct.unpack("<12h", data[12 + length :]) == (1, 1, 0, 7, -1, -2, 2, 0, 1, 2, 3, 4)


def test_a_header_is_made_of_a_plan_and_gives_it_back(tmp_path: Path) -> None:
    header = TraceHeader.of(plan_of())
    assert header == replace(HEADER, plan=plan_of())
    assert read_trace(written(tmp_path / "t", [step(3)], header)).header == header


def test_other_whole_number_types_are_taken_and_nothing_wraps(tmp_path: Path) -> None:
    marks, ids = step(3)
    path = written(tmp_path / "t", [(marks, ids.astype(np.int64))])
    assert same(list(read_trace(path).steps()), [(marks, ids)])
    with pytest.raises(ValueError, match="ids 65536 to 65536"):
        written(tmp_path / "t", [(marks[:1], np.full((1, 2, 2), 65536, dtype=np.int64))])


def test_a_step_without_rows_leaves_nothing(tmp_path: Path) -> None:
    empty = (np.empty(0, dtype=np.uint8), np.empty((0, 2, 2), dtype=np.int16))
    assert same(list(read_trace(written(tmp_path / "t", [empty, step(1), empty])).steps()), [step(1)])
    trace = read_trace(written(tmp_path / "t", []))
    assert (list(trace.steps()), trace.ids.shape, trace.torn_bytes) == ([], (0, 2, 2), 0)


@pytest.mark.parametrize(
    ("marks", "ids", "named"),
    [
        (np.zeros(2, dtype=np.uint8), np.zeros((3, 2, 2), dtype=np.int16), r"\(2, 2, 2\) were expected"),
        (np.zeros(2, dtype=np.uint8), np.zeros((2, 2, 3), dtype=np.int16), r"\(2, 2, 2\) were expected"),
        (np.full(1, 3, dtype=np.uint8), np.zeros((1, 2, 2), dtype=np.int16), "marks 3 to 3; 0 to 2"),
        (np.zeros(1, dtype=np.uint8), np.full((1, 2, 2), 8, dtype=np.int16), "ids 8 to 8; -2 to 7"),
        (np.zeros(1, dtype=np.uint8), np.full((1, 2, 2), -3, dtype=np.int16), "ids -3 to -3; -2 to 7"),
    ],
)
def test_the_writer_takes_no_step_that_the_reader_would_refuse(
    tmp_path: Path, marks: NDArray[Any], ids: NDArray[Any], named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        written(tmp_path / "t", [(marks, ids)])


@pytest.mark.parametrize("torn", [1, ROW - 1])
def test_a_torn_last_row_is_left_out_and_told(tmp_path: Path, torn: int) -> None:
    path = Path(written(tmp_path / "t", [step(2, 1), step(1, 2)]))
    path.write_bytes(path.read_bytes()[: torn - ROW])
    trace = read_trace(str(path))
    assert trace.torn_bytes == torn
    assert same(list(trace.steps()), [step(2, 1)])


KILLED = """
import os, signal, sys
import numpy as np
from soakrig.engine.offload.trace import TraceHeader, TraceWriter

writer = TraceWriter(sys.argv[1], TraceHeader("m", 8, (3, 5), 2))
for one in range(100_000):
    writer.append(np.zeros(3, dtype=np.uint8), np.full((3, 2, 2), one % 8, dtype=np.int16))
    if one == 9:
        writer.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_engine_wrote_ends_in_a_whole_step(tmp_path: Path) -> None:
    path = tmp_path / "t"
    done = subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False)
    assert done.returncode == -9
    trace = read_trace(str(path))
    assert trace.torn_bytes == 0
    steps = list(trace.steps())
    # Three buffers of 1 MiB; what waited for the fourth is gone.
    assert 3 * trace_module.BUFFER_BYTES <= len(trace.marks) * ROW < 100_000 * 3 * ROW
    assert all(len(marks) == 3 and (ids == at % 8).all() for at, (marks, ids) in enumerate(steps))


def test_a_full_disk_ends_the_trace_and_leaves_no_gap_in_it(tmp_path: Path) -> None:
    path = tmp_path / "t"
    # A real limit in a child: the file may grow to 4 KiB, and the write that passes it is cut short.
    code = f"""
import resource, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_offload_trace import HEADER, TraceWriter, step
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
writer = TraceWriter(sys.argv[1], HEADER)
writer.append(*step(5, 7))
writer.flush()
writer.append(*step(2000, 8))
try:
    writer.flush()
except OSError as error:
    print(error.errno)
writer.append(*step(2, 9))
writer.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) == errno.EFBIG
    assert same(list(read_trace(str(path)).steps()), [step(5, 7)]), "steps behind a gap read as a whole trace"


def test_closing_writes_what_waits_and_twice_is_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(str(tmp_path / "t"), HEADER)
    writer.append(*step(2))
    assert same(list(read_trace(str(tmp_path / "t")).steps()), [])
    writer.flush()
    assert same(list(read_trace(str(tmp_path / "t")).steps()), [step(2)])
    writer.append(*step(1))
    writer.close()
    writer.close()
    assert same(list(read_trace(str(tmp_path / "t")).steps()), [step(2), step(1)])


@pytest.mark.parametrize(
    ("row", "column", "value", "named"),
    [
        (2, 0, 3, "row 2: mark 3; 0 to 2 was expected"),
        (1, 1, 2, "row 1: first 2; 0 to 1 was expected"),
        (0, 1, 0, "row 0 begins no step: first is 0"),
        (3, 3, 8, "row 3, layer 3: id 8; -2 to 7 was expected"),
        (3, 5, -3, "row 3, layer 5: id -3; -2 to 7 was expected"),
    ],
)
def test_values_that_no_engine_wrote_are_refused_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int, column: int, value: int, named: str
) -> None:
    path = Path(written(tmp_path / "t", [step(2), step(2)]))
    data = bytearray(path.read_bytes())
    struct.pack_into("<h", data, len(data) - (4 - row) * ROW + 2 * column, value)
    path.write_bytes(data)
    for piece in (trace_module.CHECK_BYTES, 1):
        monkeypatch.setattr(trace_module, "CHECK_BYTES", piece)
        with pytest.raises(UsageError, match=f"t: {named}"):
            read_trace(str(path))


def packed(raw: Any) -> bytes:
    text = raw if isinstance(raw, bytes) else orjson.dumps(raw)
    text += b" " * (-(12 + len(text)) % ALIGN)
    return MAGIC + struct.pack("<I", len(text)) + text


RAW: dict[str, Any] = {
    "schema": "soakrig.trace/1",
    "model": "m",
    "experts": 8,
    "layers": [3, 5],
    "top_k": 2,
    "staging_rows": 64,
    "plan": None,
}


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "is no trace: it begins with b''"),
        (b"SRTRACE1", "is no trace"),
        (b"SRTRACE2" + packed(RAW)[8:], "begins with b'SRTRACE2', expected b'SRTRACE1'"),
        (MAGIC + struct.pack("<I", 2**32 - 1), "claims 4294967295 bytes, .* byte 4294967307 of 12"),
        (packed(RAW)[:-1], "claims .* within the file was expected"),
        (MAGIC + struct.pack("<I", 10) + packed(RAW)[12:], "byte 22 of .* multiple of 64"),
        (packed(b"{"), "header is none of a trace"),
        (packed(b"\xff"), "header is none of a trace"),
        (packed([]), "header is none of a trace"),
        (packed({**RAW, "schema": "soakrig.trace/9"}), "schema: .*soakrig.trace/9"),
        (packed({**RAW, "more": 1}), "more: .*not permitted"),
        (packed({k: v for k, v in RAW.items() if k != "experts"}), "experts: Field required"),
        (packed({**RAW, "experts": "8"}), "experts: .*'8'"),
        (packed({**RAW, "experts": 32768}), "experts: .*32767.*'32768'"),
        (packed({**RAW, "experts": 1}), "top_k is 2, of 1 experts"),
        (packed({**RAW, "layers": []}), "layers"),
        (packed({**RAW, "layers": [3, 3]}), r"named twice: \[3, 3\]"),
        (packed({**RAW, "layers": [3, -5]}), "layers.1: .*'-5'"),
        (packed({**RAW, "top_k": 0}), "top_k"),
        (packed({**RAW, "plan": {"arena": 0}}), "the plan in its header: this is no offload plan"),
        (packed({**RAW, "plan": plan_of((3, 6)).to_json()}), "the plan in it of another model"),
    ],
)
def test_a_header_that_is_none_is_refused_with_what_was_read(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=named) as caught:
        read_trace(str(path))
    assert "VLLM_MOE_ROUTING_TRACE" in caught.value.remedy
    path.write_bytes(packed(RAW))
    assert read_trace(str(path)).header == HEADER


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="gone cannot be read: No such file"):
        read_trace(str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_trace(str(tmp_path))


@pytest.mark.parametrize("change", [{"experts": 32768}, {"layers": ()}, {"top_k": 9}])
def test_a_model_that_no_trace_can_hold_is_refused_at_start(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="no trace can be written of m: "):
        TraceWriter(str(tmp_path / "t"), replace(HEADER, **change))
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("module", ["settings", "plan", "slot_map", "profile", "trace", "counters"])
def test_the_server_process_may_import_it_without_torch(module: str) -> None:
    code = f"import sys, soakrig.engine.offload.{module}; sys.exit('torch' in sys.modules or 'numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
