"""The NVML watcher with its real child process; only the binding of the C library is a stub (fixtures/nvml_stub)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pynvml
import pytest

from soakrig.clock import RealClock
from soakrig.errors import WatcherError
from soakrig.record.signal import Signal, SourceState
from soakrig.soak.watch import proc
from soakrig.soak.watch.nvml import RECOVERY_ACTIONS, THROTTLES, NvmlWatcher, phantom_vram
from soakrig.soak.watch.nvml_child import short_pci

STUB = Path(__file__).parents[1] / "fixtures" / "nvml_stub"
XID, DOUBLE_BIT, UNAVAILABLE = 0x8, 0x2, 0x4000
GIB = 1 << 30


class Bench:
    """A watcher over the stub, and the stub's state."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "nvml.json"
        self.set()
        self.watcher = self.make()

    def make(self, **options: object) -> NvmlWatcher:
        env = {**os.environ, "PYTHONPATH": str(STUB), "NVML_STUB_STATE": str(self.file)}
        options = {"env": env, "interval": 5.0, "deadline": 10.0, **options}
        self.watcher = NvmlWatcher(RealClock(), **options)  # type: ignore[arg-type]
        return self.watcher

    def set(self, **state: object) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(state))
        new.rename(self.file)

    def signals(self, **state: object) -> list[Signal]:
        """Signals of one poll in this state."""
        self.set(**state)
        return list(self.watcher.poll().signals)

    def until(self, kind: str, seconds: float = 10.0) -> tuple[Signal, SourceState | None]:
        """Poll until a signal of ``kind``, and the state that came with it."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            seen = self.watcher.poll()
            for one in seen.signals:
                if one.kind == kind:
                    return one, seen.state
        raise AssertionError(f"no {kind} within {seconds} s")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    one = Bench(tmp_path)
    yield one
    one.watcher.close()


def test_figures(bench: Bench) -> None:
    state = bench.watcher.open()
    assert (state.state, state.detail) == ("live", "driver 580.00.stub: Stub GPU at 0000:c0:00")
    seen = bench.watcher.poll()
    assert seen.signals == []
    assert seen.sample == {
        "vram_used_mib": 2048.0, "vram_total_mib": 24576.0, "gpu_util_percent": 97.0, "temperature_c": 61.0,
        "power_w": 214.5, "clocks_reasons": 4.0, "ecc_corrected": 0.0, "ecc_uncorrected": 0.0,
    }  # fmt: skip
    seen = bench.watcher.poll()
    assert seen.sample is not None
    assert seen.sample["vram_phantom_mib"] == 0.0, "the driver's own share at the start is no phantom"


def test_several_gpus(bench: Bench) -> None:
    bench.set(gpus=2)
    bench.watcher.open()
    sample = bench.watcher.poll().sample
    assert sample is not None
    assert (sample["vram_used_mib"], sample["gpu1.vram_used_mib"], sample["temperature_c"]) == (4096.0, 2048.0, 61.0)


def test_an_xid_event(bench: Bench) -> None:
    bench.set(gpus=2)
    bench.watcher.open()
    (found,) = bench.signals(gpus=2, events=[[1, XID, 31]])
    assert (found.kind, found.source, found.severity, found.xid, found.pci) == (
        "xid",
        "nvml",
        "fault",
        31,
        "0000:c1:00",
    )
    assert (found.pid, found.process) == (None, None)
    assert found.error_s == bench.watcher.interval
    assert abs(found.mono - time.monotonic()) < 5.0
    assert bench.signals(gpus=2, events=[[1, XID, 31]]) == [], "an event comes once"


def test_an_xid_whose_number_nvml_does_not_know(bench: Bench) -> None:
    bench.watcher.open()
    (found,) = bench.signals(events=[[0, XID, 999]])
    assert (found.kind, found.xid, found.severity) == ("xid", None, "fault")
    assert "does not know" in found.raw


def test_an_informational_xid_is_no_fault_and_an_unknown_number_is_one(bench: Bench) -> None:
    bench.watcher.open()
    first, second = bench.signals(events=[[0, XID, 63], [0, XID, 9876]])
    assert first.severity != "fault"
    assert second.severity == "fault"


def test_other_events_keep_their_name(bench: Bench) -> None:
    bench.watcher.open()
    found = bench.signals(events=[[0, DOUBLE_BIT, 0], [0, UNAVAILABLE, 0]])
    assert [(one.kind, one.severity) for one in found] == [("ecc_double_bit", "fault"), ("gpu_unavailable", "fault")]


def test_no_xid_events_is_said(bench: Bench) -> None:
    bench.set(gpu={"supported": 0x2})
    state = bench.watcher.open()
    assert state.state == "partial"
    assert "no Xid events" in state.detail


@pytest.mark.parametrize(
    ("error", "kind"), [("NVMLError_GpuIsLost", "gpu_lost"), ("NVMLError_ResetRequired", "reset_required")]
)
def test_a_lost_gpu(bench: Bench, error: str, kind: str) -> None:
    bench.watcher.open()
    bench.watcher.poll()
    (found,) = bench.signals(failed={"0": error})
    assert (found.kind, found.severity, found.pci) == (kind, "fault", "0000:c0:00")
    assert bench.signals(failed={"0": error}) == []


def test_what_a_gpu_does_not_support_is_left_out(bench: Bench) -> None:
    bench.set(unsupported=["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetFieldValues", "nvmlDeviceGetPowerUsage"])
    bench.watcher.open()
    seen = bench.watcher.poll()
    assert seen.signals == []
    assert seen.sample is not None
    assert "ecc_corrected" not in seen.sample
    assert "power_w" not in seen.sample
    assert seen.sample["temperature_c"] == 61.0


def test_errors_that_grow(bench: Bench) -> None:
    bench.set(gpu={"ecc": [7, 0]})
    bench.watcher.open()
    assert bench.watcher.poll().signals == [], "what was there before is not this run's"
    found = bench.signals(gpu={"ecc": [8, 1]})
    assert {(one.kind, one.severity) for one in found} == {("ecc_corrected", "warning"), ("ecc_uncorrected", "fault")}


def test_the_recovery_action(bench: Bench) -> None:
    bench.watcher.open()
    bench.watcher.poll()
    (found,) = bench.signals(gpu={"recovery": 2})
    assert (found.kind, found.severity, found.detail["name"]) == ("recovery_action", "fault", "node reboot")
    assert bench.signals(gpu={"recovery": 2}) == []


def test_a_recovery_action_older_than_the_run_is_a_warning(bench: Bench) -> None:
    bench.set(gpu={"recovery": 1})
    bench.watcher.open()
    (found,) = bench.watcher.poll().signals
    assert (found.kind, found.severity) == ("recovery_action", "warning")


def test_throttling_is_told_once_an_episode(bench: Bench) -> None:
    bench.watcher.open()
    assert [one.detail["reason"] for one in bench.signals(gpu={"reasons": 0x44})] == ["hardware thermal slowdown"]
    assert bench.signals(gpu={"reasons": 0x40}) == []
    assert bench.signals(gpu={"reasons": 0x0}) == []
    assert [one.kind for one in bench.signals(gpu={"reasons": 0x40})] == ["throttle"]


def test_tables_are_those_of_the_binding() -> None:
    named = {getattr(pynvml, name): name for name in dir(pynvml) if name.startswith("NVML_GPU_RECOVERY_ACTION_")}
    assert set(RECOVERY_ACTIONS) == set(named) - {0}
    assert set(THROTTLES) == {
        pynvml.nvmlClocksEventReasonHwSlowdown, pynvml.nvmlClocksEventReasonSwThermalSlowdown,
        pynvml.nvmlClocksEventReasonHwThermalSlowdown, pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
    }  # fmt: skip
    assert pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION == 230


def test_the_stub_has_only_names_of_the_binding() -> None:
    """A stub with names of its own would hide a call that the real binding refuses."""
    code = "import sys; sys.path.insert(0, sys.argv[1]); import pynvml; print(*dir(pynvml))"
    out = subprocess.run(
        [sys.executable, "-c", code, str(STUB)], capture_output=True, text=True, check=True, timeout=30
    )
    names = [name for name in out.stdout.split() if "vml" in name.lower()]
    assert len(names) > 25
    assert [name for name in names if not hasattr(pynvml, name)] == []


@pytest.mark.parametrize(
    ("used", "held", "baseline", "phantom"),
    [
        (24000.0, 500.0, 300.0, 23200.0),
        (800.0, 500.0, 300.0, 0.0),
        (700.0, 500.0, 300.0, 0.0),
        (800.0, None, 0.0, None),
    ],
)
def test_phantom_vram(used: float, held: float | None, baseline: float, phantom: float | None) -> None:
    assert phantom_vram(used, held, baseline) == phantom


def test_vram_held_by_nobody(bench: Bench) -> None:
    bench.watcher.open()
    bench.watcher.poll()
    orphaned = {"used": 20 * GIB, "processes": []}
    found = [one for _ in range(6) for one in bench.signals(gpu=orphaned)]
    (one,) = found
    assert (one.kind, one.severity) == ("phantom_vram", "warning")
    assert one.detail["mib"] == 20 * 1024 - 300
    hidden = {"used": 20 * GIB, "processes": [[4177, None]]}
    seen_before = bench.signals(gpu=hidden)
    assert seen_before == [], "where a share is unknown nothing is said"


def test_a_hang_is_a_finding_and_the_next_child_goes_on(bench: Bench) -> None:
    watcher = bench.make(interval=0.05, deadline=0.3, max_restarts=1)
    watcher.open()
    first = watcher._session
    assert first is not None
    bench.set(hang="nvmlDeviceGetTemperature")
    before = time.monotonic()
    found, state = bench.until("nvml_hung")
    assert 0.3 <= time.monotonic() - before < 3.0
    assert (found.severity, found.detail["op"], found.detail["killed"]) == ("warning", "poll", True)
    assert 0.3 <= found.detail["seconds"] < 3.0
    assert state is not None
    assert (state.state, state.lost) == ("partial", 1)
    assert not proc.is_alive(first.pid, None)[0]
    bench.set()
    deadline = time.monotonic() + 10
    while (seen := watcher.poll()).sample is None and time.monotonic() < deadline:
        continue
    assert seen.sample is not None


def test_a_poll_never_waits_longer_than_its_interval(bench: Bench) -> None:
    watcher = bench.make(interval=0.1, deadline=60.0)
    watcher.open()
    bench.set(hang="nvmlDeviceGetTemperature")
    before = time.monotonic()
    for _ in range(3):
        assert watcher.poll().signals == []
    assert 0.3 <= time.monotonic() - before < 2.0
    watcher.close()
    assert time.monotonic() - before < 4.0


def test_a_child_that_hangs_again_and_again_is_left_alone(bench: Bench) -> None:
    watcher = bench.make(interval=0.02, deadline=0.15, max_restarts=2)
    watcher.open()
    bench.set(hang="nvmlDeviceGetMemoryInfo")
    for _ in range(3):
        _, state = bench.until("nvml_hung")
    assert state is not None
    assert "not asked again" in state.detail
    assert watcher._session is None
    assert watcher.poll() == watcher.poll()
    assert watcher._session is None


def test_a_hang_while_opening(bench: Bench) -> None:
    bench.set(hang="nvmlInit")
    watcher = bench.make(interval=0.05, open_deadline=0.3, max_restarts=0)
    state = watcher.open()
    assert (state.state, state.lost) == ("partial", 1)
    assert [one.kind for one in watcher.poll().signals] == ["nvml_hung"]


def test_a_child_that_dies(bench: Bench) -> None:
    watcher = bench.make(interval=0.5, max_restarts=1)
    watcher.open()
    bench.set(crash="nvmlDeviceGetMemoryInfo")
    found, _ = bench.until("nvml_died")
    assert (found.severity, found.detail["exit_status"]) == ("warning", 9)


@pytest.mark.parametrize("error", ["NVMLError_LibraryNotFound", "NVMLError_DriverNotLoaded"])
def test_no_nvml_is_a_plain_note(bench: Bench, error: str) -> None:
    bench.set(init=error)
    with pytest.raises(WatcherError, match=f"no NVML here: {error}"):
        bench.watcher.open()
    assert bench.watcher._session is None


def test_no_gpu_is_a_plain_note(bench: Bench) -> None:
    bench.set(gpus=0)
    with pytest.raises(WatcherError, match="shows no GPU"):
        bench.watcher.open()


def test_the_real_binding_on_this_machine() -> None:
    """Without a stub: either there is NVML and figures come, or the note says what is missing."""
    watcher = NvmlWatcher(RealClock(), interval=10.0)
    try:
        state = watcher.open()
    except WatcherError as error:
        assert str(error).startswith("no NVML here: ")  # noqa: PT017  (both ways are right, each is checked)
        return
    assert state.state in ("live", "partial")
    assert watcher.poll().sample
    watcher.close()


def test_a_hanging_child_does_not_outlive_a_killed_tool(bench: Bench) -> None:
    bench.set(hang="nvmlInit")
    code = (
        "import sys, time\nfrom soakrig.clock import RealClock\nfrom soakrig.soak.watch.nvml import NvmlWatcher\n"
        "watcher = NvmlWatcher(RealClock()); print(watcher._start().pid, flush=True); time.sleep(600)"
    )
    env = {**os.environ, "PYTHONPATH": str(STUB), "NVML_STUB_STATE": str(bench.file)}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as tool:
        assert tool.stdout is not None
        pid = int(tool.stdout.readline())
        started = proc.create_time(pid)
        hung = bench.file.with_name(bench.file.name + ".hung")
        deadline = time.monotonic() + 10
        while not hung.exists() and time.monotonic() < deadline:
            continue
        assert proc.is_alive(pid, started)[0]
        tool.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    while proc.is_alive(pid, started)[0] and time.monotonic() < deadline:
        continue
    assert not proc.is_alive(pid, started)[0]


@pytest.mark.parametrize(
    ("text", "short"), [("00000000:C1:00.0", "0000:c1:00"), ("0001:01:00.0", "0001:01:00"), (None, None)]
)
def test_pci_addresses_look_as_in_the_kernel_log(text: str | None, short: str | None) -> None:
    assert short_pci(text) == short
