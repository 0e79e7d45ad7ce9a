"""`soak repro minimize` and what it leaves, on real engines with a planted fault."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from bisect_engine import Bisect
from e2e.soaking import wait_for
from minimize_world import material
from soakrig.bisect.journal import JOURNAL, Journal
from soakrig.bisect.minimize.hunt import Hunt
from soakrig.bisect.minimize.loop import LOADS, SEARCH
from soakrig.bisect.minimize.material import read_material
from soakrig.bisect.minimize.products import write_products
from soakrig.bisect.minimize.requests import whole_shape
from soakrig.cli.main import invoke
from soakrig.engine.bundled import Order, launch_bundled
from soakrig.record.request_log import StoredRequest, read_requests, write_requests
from soakrig.record.store import RunReader

MODEL = "embedded"
FLAGS = ["--layers=1", "--hidden=64", "--experts=8", "--top-k=2", "--threads=1"]
ARGS = [f"--arg={flag}" for flag in FLAGS]
NOW = json.dumps({"action": "error_frame"})
"""A plant that strikes at the first turn."""


def set_plant(text: str) -> list[str]:
    return ["--set", f"SOAKRIG_PLANT={text}"]


def request(tools: int, turns: int, **fields: Any) -> StoredRequest:
    """The last request of a long conversation."""
    last = material(turns=turns, count=tools, model=MODEL).last
    head = {**orjson.loads(last.head + b"}"), **fields}
    head = {name: value for name, value in head.items() if value is not None}
    return StoredRequest(0, 1, orjson.dumps(head)[:-1], last.messages, last.extra)


def record(folder: Path, *lane: StoredRequest, text: str = NOW) -> Path:
    """The folder of a run of those requests that faulted."""
    folder.mkdir(exist_ok=True)
    (folder / "kernel.log").touch()
    write_requests(folder / "sent", [lane])
    argv = ["run", "replay", "--param", f"path={folder / 'sent'}", "--turns", str(len(lane)), *ARGS, *set_plant(text)]
    kept = ["--kernel-log", str(folder / "kernel.log"), "--runs-dir", str(folder / "runs"), "--json"]
    done = subprocess.run([sys.executable, "-m", "soakrig", *argv, *kept], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    return folder / "runs" / json.loads(done.stdout)["run_id"]


@pytest.fixture(scope="module")
def faulted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that faulted at its second turn, with two tools."""
    lane = [request(2, turns, max_tokens=24) for turns in (1, 2)]
    return record(tmp_path_factory.mktemp("faulted"), *lane, text='{"action": "error_frame", "after": 1}')


class Minimize(Bisect):
    """One `soak repro minimize` process at a time, over the same kind of journal."""

    @property
    def folder(self) -> Path:
        (found,) = (path.parent for path in self.runs.glob(f"*/{SEARCH}/{JOURNAL}"))
        return found

    def begin(self, run: Path, *words: str) -> None:
        self._begin(str(run), "--runs-dir", str(self.runs), *words)

    def go_on(self, *words: str) -> None:
        self._begin(str(self.folder.parent), *words)

    def _begin(self, *words: str) -> None:
        with self.output.open("wb") as out, self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "soakrig", "repro", "minimize", "--json", *words], stdout=out, stderr=errors,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Minimize]:
    with Minimize(tmp_path) as found:
        yield found


def test_the_material_of_a_run(faulted: Path) -> None:
    found = read_material(faulted)
    assert found.signature == "turn error_frame"
    assert [one.body for lane in found.conversations for one in lane] == [one.body for one in read_requests(faulted)]
    shape = whole_shape(found)
    measured = max(event.prompt_tokens or 0 for event in RunReader(faulted).events() if event.kind == "turn")
    assert (shape.requests, shape.tools, shape.max_tokens, shape.stream) == (2, 2, 24, 1)
    assert 1.1 * measured < shape.context < 1.6 * measured, "what the faulting turn had was never told"
    assert not found.estimated


def test_killed_interrupted_and_taken_up_again(faulted: Path, running: Minimize) -> None:
    """No launch twice, none lost, nothing left behind; --json is one object each time."""
    often = json.dumps({"action": "error_frame", "hazard": 0.5})
    running.begin(faulted, *set_plant(often))
    running.wait("a launch that is over", lambda: any(run.state == "settled" for run in running.launches()))
    running.wait("turns of the next", lambda: running.launches()[-1].state == "probing")
    other = [sys.executable, "-m", "soakrig", "repro", "minimize", str(running.folder.parent)]
    beside = subprocess.run(other, capture_output=True, text=True, timeout=60)
    assert (beside.returncode, "by another process" in beside.stderr) == (3, True), beside.stderr
    running.kill()
    first = {run.id: run for run in running.launches() if run.state == "settled"}
    running.go_on()
    running.wait("another launch", lambda: len(running.launches()) > len(first) + 1)
    running.signal(signal.SIGINT)
    done = running.done()
    assert (done.code, done.object["state"]) == (2, "stopped"), done.err
    assert "Ctrl-C" in done.object["why"]
    now = {run.id: run for run in running.launches()}
    assert {number: now[number] for number in first} == first
    assert sum(run.result == "interrupted" for run in now.values()) <= 2
    running.nothing_left()
    running.go_on("--budget", "1s")
    done = running.done()
    assert (done.code, done.object["state"]) == (2, "budget"), done.err
    assert done.object["launches"] == len(now), "the budget was spent before"
    assert done.object["simulated"]
    assert Path(done.object["files"]["script"]).exists(), "what is known so far is of use already"
    result = json.loads((running.folder.parent / "minimized.json").read_text())
    assert result == done.object
    with Journal.read(running.folder) as journal:
        assert [run.id for run in journal.runs()] == list(range(1, len(now) + 1))
        for run in journal.runs():
            assert (running.folder.parent / LOADS / run.arm / "requests").is_dir()


def test_a_full_disk_says_so_and_leaves_nothing(faulted: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"no mounts here: {mounted.stderr.decode()[:80]}")
    try:
        with Minimize(tmp_path, small / "runs") as running:
            running.begin(faulted, *set_plant(NOW))
            done = running.done()
            assert done.code == 2, done.err
            assert "KiB are free" in done.object["error"]
            assert "soak repro minimize" in done.object["remedy"]
            running.nothing_left()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def script(folder: Path, *lanes: list[StoredRequest], turns: int = 6) -> Path:
    hunt = Hunt.from_json({"reproducer": "replay", "signature": "turn error_frame"})
    return Path(write_products(folder, lanes, hunt, turns)["script"])


def run_script(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """With nothing of ours on its path: Python and httpx alone."""
    return subprocess.run([sys.executable, "-I", str(path), *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("action", "stream", "says"),
    [
        ("error_frame", True, "error_frame: "),
        ("error_frame", False, "http_error: status 500"),
        ("exit", True, "error_frame: "),
        ("cut", True, "truncated: "),
        ("empty_200", False, "empty_200: "),
        ("hang", True, "hung: "),
    ],
)
def test_the_script_finds_the_fault(tmp_path: Path, action: str, stream: bool, says: str) -> None:
    fields = {} if stream else {"stream": False, "stream_options": None}
    one = request(2, 2, max_tokens=24, **fields)
    path = script(tmp_path, [one], [one, one])
    order = Order("embedded", {"SOAKRIG_PLANT": json.dumps({"action": action, "after": 2})}, FLAGS)
    with launch_bundled(order, tmp_path) as engine:
        done = run_script(path, engine.base_url, "--stall", "2", "--kernel-log", "/dev/null")
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("FAULT at turn "), done.stdout
    assert says in done.stdout
    assert "looked for: turn error_frame" in done.stdout


def test_the_script_on_a_healthy_engine_and_on_none(tmp_path: Path) -> None:
    path = script(
        tmp_path, [request(2, 2, max_tokens=24), request(2, 1, max_tokens=24, stream=False, stream_options=None)]
    )
    imports = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert imports - set(sys.stdlib_module_names) == {"httpx"}
    with launch_bundled(Order("embedded", {}, FLAGS), tmp_path) as engine:
        log = tmp_path / "kernel.log"
        log.write_text("NVRM: Xid (PCI:0000:01:00): 31, an old one\n")
        done = run_script(path, f"{engine.base_url}/v1", "--kernel-log", str(log))
        assert (done.returncode, done.stdout) == (0, "no fault in 6 turns (looked for: turn error_frame)\n"), (
            done.stderr
        )
        argv = [sys.executable, "-I", str(path), engine.base_url, "--kernel-log", str(log), "--turns", "100000"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as going:
            wait_for("its log to be open", lambda: str(log) in open_files(going.pid))
            with log.open("a") as stream:
                stream.write("NVRM: Xid (PCI:0000:01:00): 31, pid=7, a new one\n")
            out, _ = going.communicate(timeout=60)
        assert (going.returncode, "a new one" in out) == (1, True), out
    for url in (engine.base_url, "nonsense", "http://127.0.0.1:1"):
        done = run_script(path, url)
        assert done.returncode == 2, done.stdout
        assert "nothing to test" in done.stderr
    assert run_script(path, "x", "--turns", "0").returncode == 2


def open_files(pid: int) -> list[str]:
    return [os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir() if path.is_symlink()]


def test_refusals(faulted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    (clean / "manifest.json").write_bytes((faulted / "manifest.json").read_bytes())
    (clean / "events.jsonl").touch()
    attached = tmp_path / "attached"
    attached.mkdir()
    for name in ("events.jsonl", "requests"):
        (attached / name).symlink_to(faulted / name)
    manifest = json.loads((faulted / "manifest.json").read_text())
    (attached / "manifest.json").write_text(json.dumps({**manifest, "launched": None}))
    for argv, code, says in (
        ([str(tmp_path / "no")], 64, "no run folder"),
        ([str(clean)], 64, "has no fault"),
        ([str(attached)], 64, "--engine vllm"),
        ([str(faulted), "--useful", "0"], 64, "--useful 0"),
        ([str(faulted), "--error", "0.9"], 64, "--error 0.9"),
        ([str(faulted), "--budget", "soon"], 64, "soon"),
        ([str(faulted), "--engine", "embeded"], 64, "'embedded' was meant"),
        ([str(faulted), "--set", "VLLM_MOE_DMA_STAGIN=1"], 64, "VLLM_MOE_DMA_STAGING"),
        ([str(faulted), "--kernel-log", str(tmp_path / "none.log")], 3, "none.log"),
    ):
        assert invoke(["repro", "minimize", *argv, "--runs-dir", str(tmp_path / "runs")]) == code, argv
        assert says in " ".join(capsys.readouterr().err.split()), argv
    assert not (tmp_path / "runs").exists(), "what is refused leaves nothing"


def test_replay_refuses_what_it_cannot_send(faulted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        ([], "--param path=FOLDER"),
        (["--param", f"path={tmp_path / 'no'}"], "no such file or folder"),
        (["--param", f"path={faulted}", "--tools", "3"], "--tools means nothing to replay"),
    ):
        assert invoke(["run", "replay", *words]) == 64
        assert says in " ".join(capsys.readouterr().err.split())
    write_requests(tmp_path / "two", [[request(1, 1)], [request(1, 2)]])
    assert invoke(["run", "replay", "--param", f"path={tmp_path / 'two'}"]) == 64
    assert "--conversations 2" in capsys.readouterr().err


@pytest.mark.slow
def test_a_floor_of_8_tools_and_6k_tokens_at_one_in_six_is_found(tmp_path: Path) -> None:
    """The whole way, from a run of one large request to a script that faults."""
    long = request(50, 60, max_tokens=None, stream=False, stream_options=None)
    run = record(tmp_path, long)
    plant = {"action": "error_frame", "hazard": 1 / 6, "min_tools": 8, "after": {"context_tokens": 6000}}
    before = read_material(run)
    assert whole_shape(before).context > 9000
    with Minimize(tmp_path, tmp_path / "found") as running:
        running.begin(run, *set_plant(json.dumps(plant)), "--error", "0.05")
        done = running.done(1200.0)
        result = done.object
        assert (done.code, result["state"]) == (0, "finished"), done.err
        assert 8 <= result["to"]["tools"] <= 10
        assert 6000 <= result["to"]["context"]["value"] <= 7500
        assert result["to"]["context"]["kind"] == "measured"
        assert result["to"]["hazard"]["low"] < 1 / 6 < result["to"]["hazard"]["high"]
        running.nothing_left()
    order = Order("embedded", {"SOAKRIG_PLANT": json.dumps(plant)}, FLAGS)
    with launch_bundled(order, tmp_path) as engine:
        told = run_script(Path(result["files"]["script"]), engine.base_url, "--kernel-log", "/dev/null")
    assert told.returncode == 1, told.stdout + told.stderr
    words = ["bisect", "-f", result["files"]["campaign"], "VLLM_MOE_DMA_STAGING=1,0", "--set", "CPU_OFFLOAD_GB=1"]
    assert invoke([*words, "--dry-run", "--json"]) == 0, "the campaign file lacks its variables only"
