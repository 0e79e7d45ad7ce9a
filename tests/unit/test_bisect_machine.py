"""The machine's state and the cards of a campaign. NVML's child is real; the binding below it is the stub."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import soakrig
from soakrig.bisect.cards import Card, foreign, read_cards, wait_memory_back
from soakrig.bisect.machine import PACKAGE, git_commit, machine_state
from soakrig.clock import FakeClock, RealClock
from soakrig.errors import UsageError, WatcherError

STUB = Path(__file__).parents[1] / "fixtures" / "nvml_stub"
MIB = 1 << 20


class Nvml:
    """The stub's state, and the environment in which a child meets it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "nvml.json"
        self.env = {**os.environ, "PYTHONPATH": str(STUB), "NVML_STUB_STATE": str(self._file)}
        self.set()

    def set(self, **state: object) -> None:
        self._file.write_text(json.dumps(state))

    def cards(self, visible: str | None = None, order: str | None = None, deadline: float = 30.0) -> list[Card] | None:
        return read_cards(visible, RealClock(), order=order, env=self.env, deadline=deadline)


@pytest.fixture
def nvml(tmp_path: Path) -> Nvml:
    return Nvml(tmp_path)


# The machine


def test_the_state_of_this_machine(nvml: Nvml) -> None:
    state = machine_state(FakeClock(1234.5), env=nvml.env)
    assert json.loads(json.dumps(state)) == state, "it goes into the journal as it is"
    assert state["read_at"] == 1234.5
    assert state["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert state["kernel"] == platform.release()
    assert state["soakrig"] == soakrig.__version__
    assert len(state["load"]) == 3
    assert 0 < state["memory_available_mib"] < 1 << 30
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    assert 0 <= uptime - state["uptime_s"] < 60
    assert state["nvidia_driver"] == "580.00.stub"
    assert set(state["cpu"]) == {"governors", "mhz", "mhz_max"}
    assert state["gpus_why"] == ""


def test_a_card_in_full(nvml: Nvml) -> None:
    nvml.set(gpus=2, gpu={"ecc": [7, 2], "reasons": 0x44, "graphics": [[99, 5 * MIB]]})
    gpus = machine_state(RealClock(), env=nvml.env)["gpus"]
    assert [one["index"] for one in gpus] == [0, 1]
    assert gpus[1] == {
        "index": 1, "pci": "0000:c1:00", "uuid": "GPU-stub-1", "name": "Stub GPU", "vbios": "96.00.stub",
        "memory_used_mib": 2048.0, "memory_total_mib": 24576.0, "util_percent": 97, "temperature_c": 61,
        "power_w": 214.5, "power_limit_w": 700.0, "performance_state": 0, "persistence_mode": True,
        "clocks_mhz": {"graphics": 1980, "sm": 1980, "memory": 2619}, "clocks_reasons": 0x44,
        "throttle": ["hardware thermal slowdown"], "pcie_generation": 5, "pcie_width": 16,
        "ecc_corrected": 7, "ecc_uncorrected": 2, "ecc_lifetime_corrected": 12, "ecc_lifetime_uncorrected": 1,
        "remapped_rows": {"correctable": 3, "uncorrectable": 1, "pending": 0, "failed": 0},
        "recovery_action": 0, "compute_pids": [4177],
    }  # fmt: skip


def test_what_a_card_does_not_support_is_left_out(nvml: Nvml) -> None:
    nvml.set(unsupported=["nvmlDeviceGetRemappedRows", "nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetMemoryInfo"])
    (gpu,) = machine_state(RealClock(), env=nvml.env)["gpus"]
    assert not {"remapped_rows", "ecc_corrected", "ecc_lifetime_corrected", "memory_used_mib"} & set(gpu)
    assert gpu["vbios"] == "96.00.stub"


@pytest.mark.parametrize(
    ("stub", "why"),
    [
        ({"init": "NVMLError_DriverNotLoaded"}, "no NVML here: NVMLError_DriverNotLoaded"),
        ({"gpus": 0}, "shows no GPU"),
        ({"hang": "nvmlInit"}, "did not answer (open) within"),
        ({"hang": "nvmlDeviceGetVbiosVersion"}, "did not answer (state) within"),
        ({"crash": "nvmlDeviceGetVbiosVersion"}, "ended by itself (state), exit status 9"),
    ],
)
def test_without_nvml_the_rest_is_there(nvml: Nvml, stub: dict[str, object], why: str) -> None:
    nvml.set(**stub)
    state = machine_state(RealClock(), env=nvml.env, deadline=1.0 if "hang" in stub else 30.0)
    assert state["gpus"] is None
    assert why in state["gpus_why"]
    assert state["boot_id"]


def test_a_lost_card_is_kept_as_such(nvml: Nvml) -> None:
    nvml.set(gpus=2, failed={"1": "NVMLError_GpuIsLost"})
    state = machine_state(RealClock(), env=nvml.env)
    assert "failed" not in state["gpus"][0]
    assert state["gpus"][1]["failed"]["code"] == 15
    assert state["gpus"][1]["uuid"] == "GPU-stub-1"


def test_no_child_is_left(nvml: Nvml) -> None:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children")
    if not children.exists():
        pytest.skip("this kernel does not list children (CONFIG_PROC_CHILDREN)")
    nvml.set(hang="nvmlInit")
    before = children.read_text()
    machine_state(RealClock(), env=nvml.env, deadline=0.3)
    assert children.read_text() == before


# The commit


@pytest.fixture
def checkout(tmp_path: Path) -> Callable[..., str]:
    """git in a checkout of its own."""
    if shutil.which("git") is None:
        pytest.skip("git is not installed")

    def git(*words: str) -> str:
        argv = ["git", "-c", "user.name=n", "-c", "user.email=e@example.com", "-C", str(tmp_path), *words]
        return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "a.py").write_text("one")
    (tmp_path / "other.txt").write_text("one")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    return git


def test_the_commit_and_whether_it_was_changed(checkout: Callable[..., str], tmp_path: Path) -> None:
    package, commit = tmp_path / "pkg", checkout("rev-parse", "HEAD")
    assert git_commit(package) == commit
    (tmp_path / "other.txt").write_text("two")
    assert git_commit(package) == commit, "what is not below the package does not run"
    (package / "a.py").write_text("two")
    assert git_commit(package) == f"{commit}-dirty"
    checkout("commit", "-q", "-a", "-m", "second")
    (package / "new.py").write_text("a module that nobody has committed")
    assert git_commit(package) == f"{checkout('rev-parse', 'HEAD')}-dirty"


def test_a_checkout_that_only_holds_the_installed_package(checkout: Callable[..., str], tmp_path: Path) -> None:
    installed = tmp_path / ".venv" / "site-packages" / "pkg"
    installed.mkdir(parents=True)
    (installed / "a.py").write_text("one")
    assert git_commit(installed) is None, "that commit is of another project"


def test_a_hook_of_another_repository_does_not_mislead(
    checkout: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = checkout("rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    assert git_commit(tmp_path / "pkg") == commit


def test_no_checkout_no_commit_no_git(
    checkout: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    bare = tmp_path_factory.mktemp("bare")
    assert git_commit(bare) is None
    assert git_commit(tmp_path / "missing") is None
    monkeypatch.setenv("PATH", str(bare))
    assert git_commit(tmp_path / "pkg") is None


def test_the_tool_knows_where_it_runs_from() -> None:
    assert (PACKAGE / "bisect" / "machine.py").is_file()


# The cards


def test_all_cards(nvml: Nvml) -> None:
    nvml.set(gpus=2, gpu={"graphics": [[99, 5 * MIB]]})
    assert nvml.cards() == [Card("GPU-stub-0", 0, 2048.0, (4177,)), Card("GPU-stub-1", 1, 2048.0, (4177,))]


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("1", [1]),
        ("2,0", [2, 0]),
        (" 0 , 1 ", [0, 1]),
        ("GPU-stub-2", [2]),
        ("gpu-STUB-1,0", [1, 0]),
        ("0,-1,1", [0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
    ],
)
def test_the_cards_that_an_engine_sees(nvml: Nvml, visible: str, indices: list[int]) -> None:
    nvml.set(gpus=3)
    cards = nvml.cards(visible)
    assert cards is not None
    assert [card.index for card in cards] == indices


@pytest.mark.parametrize(
    ("visible", "what"),
    [("7", "none of the cards"), ("GPU-other", "none of the cards"), ("GPU-stub", "several of the cards"),
     ("MIG-stub-0", "none of the cards")],
)  # fmt: skip
def test_a_card_that_is_not_here_is_refused(nvml: Nvml, visible: str, what: str) -> None:
    nvml.set(gpus=2)
    with pytest.raises(UsageError, match=f"{visible}, which is {what}"):
        nvml.cards(visible)


def test_numbers_say_nothing_where_cards_differ(nvml: Nvml) -> None:
    nvml.set(gpus=2, gpu={"names": ["Slow", "Fast"]})
    with pytest.raises(UsageError, match=r"cards here differ \(Fast, Slow\)") as error:
        nvml.cards("0")
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in error.value.remedy
    for visible, order in (("0", "PCI_BUS_ID"), ("GPU-stub-0", None)):
        cards = nvml.cards(visible, order)
        assert cards is not None
        assert [card.uuid for card in cards] == ["GPU-stub-0"]


def test_no_nvml_is_no_card_list(nvml: Nvml) -> None:
    nvml.set(init="NVMLError_LibraryNotFound")
    assert nvml.cards("0") is None
    assert nvml.cards("") == [], "no card is asked for, so none is missing"


def test_nvml_that_hangs_and_a_card_that_is_lost_are_no_answer(nvml: Nvml) -> None:
    nvml.set(hang="nvmlDeviceGetMemoryInfo")
    with pytest.raises(WatcherError, match="did not answer"):
        nvml.cards(deadline=0.5)
    nvml.set(gpus=2, failed={"1": "NVMLError_GpuIsLost"})
    with pytest.raises(WatcherError, match="GPU 1 at 0000:c1:00: NVMLError_GpuIsLost"):
        nvml.cards()
    cards = nvml.cards("0")
    assert cards is not None, "the campaign does not use the lost one"
    assert cards[0].index == 0


def test_what_a_card_does_not_tell_is_unknown(nvml: Nvml) -> None:
    nvml.set(unsupported=["nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"])
    assert nvml.cards() == [Card("GPU-stub-0", 0, None, None)]


def test_foreign_processes() -> None:
    me, init = os.getpid(), 1
    cards = [Card("GPU-a", 0, 10.0, (me,)), Card("GPU-b", 1, 10.0, (me, init))]
    assert foreign(cards, lambda pid: pid in (me, init)) == ""
    init_name = Path("/proc/1/stat").read_text().split("(", 1)[1].rsplit(")", 1)[0]
    assert foreign(cards, lambda pid: pid == me) == f"a process that is not ours: pid 1 ({init_name}) on GPU 1 (GPU-b)"
    both = foreign(cards, lambda pid: pid == init)
    assert both.startswith("processes that are not ours: pid ")
    assert both.count(f"pid {me} (") == 2
    assert "not visible here" in foreign([Card("GPU-a", 0, None, (1 << 30,))], lambda _: False)
    assert foreign([Card("GPU-a", 0, None, None)], lambda _: False) == ""
    assert foreign(None, lambda _: False) == ""


class Readings:
    """``read`` that goes through ``steps``, the last one for ever, and counts."""

    def __init__(self, *steps: list[Card] | WatcherError | None) -> None:
        self._steps, self.asked = steps, 0

    def __call__(self) -> list[Card] | None:
        step = self._steps[min(self.asked, len(self._steps) - 1)]
        self.asked += 1
        if isinstance(step, WatcherError):
            raise step
        return step


def holding(mib: float | None, pids: tuple[int, ...] | None = ()) -> list[Card]:
    return [Card("GPU-a", 0, mib, pids)]


def waited(before: list[Card] | None, read: Readings, clock: FakeClock, deadline: float = 30.0) -> str:
    return wait_memory_back(before, read, clock, threading.Event(), deadline)


def test_memory_that_comes_back() -> None:
    clock, read = FakeClock(), Readings(holding(9000.0), WatcherError("NVML hangs"), holding(365.0), holding(364.0))
    begun = clock.monotonic()
    assert waited(holding(300.0), read, clock) == ""
    assert (read.asked, clock.monotonic() - begun) == (4, 3.0), "64 MiB more than before is back, 65 is not"


def test_memory_that_does_not() -> None:
    clock = FakeClock()
    begun = clock.monotonic()
    why = waited(holding(300.0), Readings(holding(9000.0, (1 << 30,))), clock, deadline=10.5)
    assert why.startswith("after 10.5 s GPU 0 (GPU-a) has 9000 MiB in use, at most 364 were expected, held by pid ")
    assert clock.monotonic() - begun == 10.5
    assert "by no process shown" in waited(holding(300.0), Readings(holding(9000.0)), clock, deadline=1.0)


def test_the_wait_ends_when_the_campaign_is_stopped() -> None:
    stop, clock = threading.Event(), FakeClock()
    stop.set()
    why = wait_memory_back(holding(300.0), Readings(holding(9000.0)), clock, stop, 30.0)
    assert why.startswith("stopped while GPU 0")


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (WatcherError("NVML hangs"), "NVML hangs"),
        (None, "NVML is no longer there"),
        ([], "no longer shown by NVML"),
        (holding(None), "no longer tells"),
    ],
)
def test_what_cannot_be_seen_is_not_back(now: list[Card] | WatcherError | None, why: str) -> None:
    assert why in waited(holding(300.0), Readings(now), FakeClock(), deadline=2.0)


@pytest.mark.parametrize("before", [None, [], holding(None)])
def test_nothing_to_wait_for(before: list[Card] | None) -> None:
    clock = FakeClock()
    begun = clock.monotonic()
    assert waited(before, Readings(holding(9000.0)), clock) == ""
    assert clock.monotonic() == begun


def test_memory_comes_back_as_nvml_has_it(nvml: Nvml) -> None:
    nvml.set(gpu={"used": 300 * MIB, "processes": []})
    before = nvml.cards()
    nvml.set(gpu={"used": 2000 * MIB})
    steps = iter([{"used": 2000 * MIB}, {"used": 340 * MIB, "processes": []}])

    def read() -> list[Card] | None:
        nvml.set(gpu=next(steps))
        return nvml.cards()

    assert wait_memory_back(before, read, FakeClock(), threading.Event(), 30.0) == ""
    assert list(steps) == [], "it looked again after the first look"
