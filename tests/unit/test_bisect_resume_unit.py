"""The unit that goes on after a reboot.

Its text is read by rules of systemd.syntax(7) written down here, and by systemd itself where that is installed
(``systemd --test`` loads units, prints what it made of them and starts nothing).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import soakrig
from soakrig.bisect import resume_unit as module
from soakrig.bisect.journal_file import JOURNAL
from soakrig.bisect.resume_unit import NO_RESTART, STOP_S, install_unit, resume_unit, unit_name, unit_secrets
from soakrig.engine.keeper import KILL_WAIT, REST_GRACE
from soakrig.engine.launcher import DEFAULT_GRACE
from soakrig.errors import PreflightRefusedError, UsageError

AWKWARD = "my run 50% %h $HOME ${X} \"q\" 'x' back\\slash\\n é;#=*?[a]"
ENVIRONMENT = {
    "PATH": "/usr/bin:/a b/%h", "HOME": "/home/o", "LANG": 'a"b\\c\nsecond $HOME', "CUDA_VISIBLE_DEVICES": "0",
    "HF_TOKEN": 'hf_"s3`c$r\\et', "VLLM_MOE_HOT_SLOTS": "8", "AWS_SECRET_ACCESS_KEY": "s3cret",
}  # fmt: skip
SYSTEMD = next((path for path in ("/lib/systemd/systemd", "/usr/lib/systemd/systemd") if Path(path).exists()), None)


def campaign(parent: Path, name: str = "night-1") -> Path:
    folder = parent / name
    folder.mkdir(parents=True)
    (folder / JOURNAL).touch()
    return folder


def settings(text: str) -> dict[str, list[str]]:
    """``Section.Name`` -> values, as the lines have them."""
    found: dict[str, list[str]] = {}
    section = ""
    for line in text.split("\n"):
        assert not line.endswith("\\"), "that would go on in the next line"
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith(("#", ";")):
            name, equals, value = line.partition("=")
            assert equals
            found.setdefault(f"{section}.{name}", []).append(value)
    return found


def whole(value: str) -> str:
    """A value that takes the rest of the line; a specifier in it would not be what it was."""
    assert value == value.strip()
    assert "%" not in value.replace("%%", "")
    return value.replace("%%", "%")


def words(value: str) -> list[str]:
    """Words in double quotes, unquoted (systemd.syntax(7), "Quoting")."""
    escapes = {"\\": "\\", '"': '"', "n": "\n", "t": "\t"}
    pieces = re.findall(r'"((?:[^"\\]|\\.)*)"(?: |$)', value)
    assert " ".join(f'"{piece}"' for piece in pieces) == value, "nothing stands outside quotes"
    return [whole_word(re.sub(r"\\(.)", lambda hit: escapes[hit[1]], piece)) for piece in pieces]


def whole_word(word: str) -> str:
    assert "%" not in word.replace("%%", "")
    return word.replace("%%", "%")


def environment(unit: dict[str, list[str]]) -> dict[str, str]:
    pairs = [words(value) for value in unit["Service.Environment"]]
    assert all(len(pair) == 1 for pair in pairs)
    return dict(pair[0].split("=", 1) for pair in pairs)


def command(unit: dict[str, list[str]]) -> list[str]:
    (line,) = unit["Service.ExecStart"]
    assert line.startswith(":"), "without the colon systemd puts variables in"
    return words(line[1:])


def test_what_it_runs_and_when(tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    unit = settings(resume_unit(folder, environment=ENVIRONMENT))
    assert command(unit) == [sys.executable, "-P", "-m", "soakrig", "bisect", "resume", str(folder)]
    assert unit["Unit.After"] == ["network.target nvidia-persistenced.service"]
    assert unit["Install.WantedBy"] == ["multi-user.target"]
    assert whole(unit["Service.WorkingDirectory"][0]) == str(folder)
    assert whole(unit["Unit.ConditionPathExists"][0]) == str(folder / JOURNAL)
    assert unit["Service.Type"] == ["exec"]
    assert unit["Service.User"] == [folder.owner()]
    assert words(unit["Unit.RequiresMountsFor"][0]) == [str(folder), str(folder), sys.executable]


def test_what_ends_and_what_is_tried_again(tmp_path: Path) -> None:
    unit = settings(resume_unit(campaign(tmp_path)))
    assert unit["Service.Restart"] == ["on-failure"]
    kept_down = {int(one) for one in unit["Service.RestartPreventExitStatus"][0].split()} | {0}
    assert kept_down == {0, *NO_RESTART} == {0, 1, 2, 64, 130}, "3 (not up yet) and 70 (a bug) get another try"
    assert (unit["Unit.StartLimitIntervalSec"], unit["Unit.StartLimitBurst"]) == (["1h"], ["5"])
    assert unit["Service.KillMode"] == ["mixed"]
    assert unit["Service.OOMPolicy"] == ["continue"]
    assert unit["Service.TimeoutStopSec"] == [str(STOP_S)]
    assert STOP_S >= 2 * (DEFAULT_GRACE + REST_GRACE + KILL_WAIT + 3.0), "twice what the launcher may take"


def test_what_arms_inherit_is_there_and_secrets_are_not(tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    text = resume_unit(folder, environment=ENVIRONMENT)
    unit = settings(text)
    assert environment(unit) == {name: ENVIRONMENT[name] for name in ("CUDA_VISIBLE_DEVICES", "HOME", "LANG", "PATH")}
    assert "hf_" not in text
    assert "s3cret" not in text
    assert unit["Service.EnvironmentFile"] == ["/etc/soakrig/soakrig-bisect-night-1.env"]
    no_secret = {name: value for name, value in ENVIRONMENT.items() if name != "HF_TOKEN"}
    assert "Service.EnvironmentFile" not in settings(resume_unit(folder, environment=no_secret))
    assert unit_secrets(folder, no_secret) == ""


def test_the_secrets_file_gives_the_secret_back(tmp_path: Path) -> None:
    """Its quotes are those of a shell (systemd.exec(5), EnvironmentFile=), so a shell reads it here."""
    file = tmp_path / "secrets"
    file.write_text(unit_secrets(campaign(tmp_path), ENVIRONMENT))
    script = f'. {shlex.quote(str(file))}; printf %s "$HF_TOKEN"'
    done = subprocess.run(["sh", "-c", script], env={"PATH": os.defpath}, capture_output=True, text=True, check=True)
    assert done.stdout == ENVIRONMENT["HF_TOKEN"]
    assert file.read_text().count("=") == 1


def test_the_command_works_with_no_other_environment(tmp_path: Path) -> None:
    unit = settings(resume_unit(campaign(tmp_path)))
    argv = [*command(unit)[:4], "--version"]
    cwd = whole(unit["Service.WorkingDirectory"][0])
    done = subprocess.run(argv, env=environment(unit), cwd=cwd, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"soakrig {soakrig.__version__}"


def test_awkward_paths(tmp_path: Path) -> None:
    folder, python = campaign(tmp_path, AWKWARD), str(tmp_path / "v env%n $x" / "python")
    unit = settings(resume_unit(folder, environment=ENVIRONMENT, directory=tmp_path / AWKWARD, python=python))
    assert command(unit) == [python, "-P", "-m", "soakrig", "bisect", "resume", str(folder)]
    assert whole(unit["Service.WorkingDirectory"][0]) == str(folder)
    assert whole(unit["Unit.ConditionPathExists"][0]) == str(folder / JOURNAL)
    assert words(unit["Unit.RequiresMountsFor"][0]) == [str(folder), str(folder), python]
    assert environment(unit)["LANG"] == ENVIRONMENT["LANG"]


@given(name=st.text(st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="/"), min_size=1, max_size=40))
def test_any_name(name: str) -> None:
    assume(name not in (".", "..") and name == name.rstrip().rstrip("\\"))
    assume(len(name.encode()) <= 50)  # the name of a unit has 255 characters, and most of these take four
    with tempfile.TemporaryDirectory() as parent:
        folder = campaign(Path(parent), name)
        unit = settings(resume_unit(folder, environment={"PATH": name}))
        assert command(unit)[-1] == whole(unit["Service.WorkingDirectory"][0]) == str(folder.resolve())
        assert environment(unit) == {"PATH": name}
        assert re.fullmatch(r"soakrig-bisect-(?:[A-Za-z0-9:_.-]|\\x[0-9a-f]{2})+\.service", unit_name(folder))


def test_names_of_units(tmp_path: Path) -> None:
    assert unit_name(tmp_path / "night-1_a.b:c") == "soakrig-bisect-night-1_a.b:c.service"
    assert unit_name(tmp_path / "a b%é") == "soakrig-bisect-a\\x20b\\x25\\xc3\\xa9.service"
    with pytest.raises(UsageError, match="systemd takes 255"):
        unit_name(tmp_path / ("é" * 40))


def test_a_link_to_the_newest_is_followed(tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    (tmp_path / "latest").symlink_to(folder)
    text = resume_unit(tmp_path / "latest")
    assert "latest" not in text
    assert unit_name(tmp_path / "latest") == unit_name(folder)


@pytest.mark.parametrize("name", ["line\nbreak", "escape\x1b[0m", "ends in a space ", "ends in a backslash\\"])
def test_paths_that_a_unit_cannot_hold(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be written in a systemd unit"):
        resume_unit(campaign(tmp_path, name))


@pytest.mark.parametrize("char", ['"', "'", "\\"])
def test_programs_that_systemd_does_not_start(tmp_path: Path, char: str) -> None:
    with pytest.raises(UsageError, match="cannot be started by systemd"):
        resume_unit(campaign(tmp_path), python=f"/opt/a{char}b/python")


def test_values_that_a_unit_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="LANG has a value with control characters"):
        resume_unit(campaign(tmp_path), environment={"LANG": "a\x1b[31m"})


def test_a_campaign_of_another_user_gets_its_own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setenv("XDG_CACHE_HOME", "/root/.cache")
    folder = campaign(tmp_path)
    assert environment(settings(resume_unit(folder)))["HOME"] == "/root"
    os.chown(folder, 12345, 12345)
    unit = settings(resume_unit(folder))
    assert unit["Service.User"] == ["12345"]
    assert {"HOME", "XDG_CACHE_HOME"} & set(environment(unit)) == set(), "systemd sets that user's"


# What systemd makes of it


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can read: systemd refuses its test mode to root."""
    with tempfile.TemporaryDirectory(prefix="soakrig-unit-") as name:
        Path(name).chmod(0o755)
        yield Path(name).resolve()


def loaded(units: Path, name: str) -> str:
    """What systemd says of the unit after loading it."""
    if SYSTEMD is None:
        pytest.skip("systemd is not installed: the text was checked by the rules above alone")
    wrapper = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"] if os.geteuid() == 0 else []
    env = {"PATH": os.environ["PATH"], "SYSTEMD_UNIT_PATH": f"{units}:", "HOME": "/nonexistent"}
    argv = [*wrapper, SYSTEMD, "--test", "--system", f"--unit={name}"]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        pytest.skip(f"systemd --test does not work here: {(done.stdout + done.stderr)[-200:]}")
    _, found, rest = done.stdout.partition(f"-> Unit {name}:\n")
    assert found, done.stderr
    return rest.split("\n\t-> Unit ")[0].split("\n-> Unit ")[0]


def test_systemd_reads_the_same(open_folder: Path) -> None:
    folder = campaign(open_folder / "campaigns", AWKWARD)
    python = open_folder / "v env%n $HOME" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    text = resume_unit(folder, environment=ENVIRONMENT, python=str(python))
    (open_folder / unit_name(folder)).write_text(text)
    seen = loaded(open_folder, unit_name(folder))
    (line,) = re.findall(r"Command Line: (.*)", seen)
    # It quotes as for a shell.
    shown = subprocess.run(["sh", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == [str(python), "-P", "-m", "soakrig", "bisect", "resume", str(folder)]
    for expected in (
        f"WorkingDirectory: {folder}", f"ConditionPathExists: {folder / JOURNAL}", f"RequiresMountsFor: {python}",
        "Environment: PATH=/usr/bin:/a b/%h", 'Environment: LANG=a"b\\c\nsecond $HOME', "KillMode: mixed",
        "Restart: on-failure", "OOMPolicy: continue", "Type: exec", f"User: {folder.owner()}", "TimeoutStopSec: 2min",
        "Unit Load State: loaded",
    ):  # fmt: skip
        assert f"\t{expected}" in seen, expected
    assert "EnvironmentFile: /etc/soakrig/soakrig-bisect-my_x20run" in seen


def test_systemd_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: the text was checked by the rules above alone")
    folder = campaign(tmp_path, AWKWARD)
    unit = tmp_path / unit_name(folder)
    text = resume_unit(folder, environment=ENVIRONMENT)
    for spoiled, message in ((text, ""), (text.replace("KillMode", "KilMode"), "KilMode")):
        unit.write_text(spoiled)
        argv = ["systemd-analyze", "verify", "--man=no", str(unit)]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert message in done.stderr
        assert bool(done.stderr) == bool(message), done.stderr


def test_systemctl_can_enable_it(tmp_path: Path) -> None:
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed")
    folder, units = campaign(tmp_path, AWKWARD), tmp_path / "root" / "etc" / "systemd" / "system"
    units.mkdir(parents=True)
    (units / unit_name(folder)).write_text(resume_unit(folder))
    argv = ["systemctl", f"--root={tmp_path / 'root'}", "enable", unit_name(folder)]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    assert [path.name for path in (units / "multi-user.target.wants").iterdir()] == [unit_name(folder)]


# Installing it


class Host:
    """A made-up host with a systemctl that writes down its arguments."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.units, self.booted, self.secrets = root / "units", root / "booted", root / "etc" / "soakrig"
        self._calls, bin_ = root / "calls", root / "bin"
        for folder in (self.units, self.booted, bin_):
            folder.mkdir()
        self.systemctl = bin_ / "systemctl"
        self.systemctl.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(self._calls))}\n')
        self.systemctl.chmod(0o755)
        monkeypatch.setenv("PATH", f"{bin_}:{os.environ['PATH']}")
        monkeypatch.setattr(module, "SECRETS", self.secrets)

    def install(self, folder: Path, *, dry_run: bool = False) -> str:
        given = {"environment": ENVIRONMENT, "units": self.units, "booted": self.booted}
        return install_unit(folder, dry_run=dry_run, **given)  # type: ignore[arg-type]

    def calls(self) -> list[str]:
        return self._calls.read_text().splitlines() if self._calls.exists() else []


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    (tmp_path / "host").mkdir()
    return Host(tmp_path / "host", monkeypatch)


def test_install(host: Host, tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    told = host.install(folder)
    unit = host.units / "soakrig-bisect-night-1.service"
    assert unit.read_text() == resume_unit(folder, environment=ENVIRONMENT)
    assert unit.stat().st_mode & 0o777 == 0o644
    assert host.calls() == ["--no-ask-password daemon-reload", f"--no-ask-password enable {unit.name}"]
    secrets = host.secrets / "soakrig-bisect-night-1.env"
    assert secrets.read_text() == unit_secrets(folder, ENVIRONMENT)
    assert secrets.stat().st_mode & 0o777 == 0o600
    assert secrets.parent.stat().st_mode & 0o777 == 0o700
    assert str(unit) in told
    assert str(secrets) in told
    assert "hf_" not in told
    (tmp_path / "latest").symlink_to(folder)
    host.install(tmp_path / "latest")
    assert [path.name for path in host.units.iterdir()] == [unit.name], "it is replaced"


def test_a_dry_run_shows_the_text_and_does_nothing(host: Host, tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    host.booted.rmdir()
    assert host.install(folder, dry_run=True) == resume_unit(folder, environment=ENVIRONMENT)
    assert (list(host.units.iterdir()), host.calls(), host.secrets.exists()) == ([], [], False)


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_folder_without_a_journal(host: Host, tmp_path: Path, dry_run: bool) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "missing"):
        with pytest.raises(UsageError, match=r"holds no campaign: journal\.sqlite is not there"):
            host.install(folder, dry_run=dry_run)
    assert list(host.units.iterdir()) == []


def test_a_machine_without_systemd(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = campaign(tmp_path)
    host.booted.rmdir()
    with pytest.raises(PreflightRefusedError, match="systemd does not run this machine") as error:
        host.install(folder)
    assert f"bisect resume {folder}" in error.value.remedy
    host.booted.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PreflightRefusedError, match="systemctl is not there"):
        host.install(folder)
    assert list(host.units.iterdir()) == []


def test_no_right_to_write(host: Host, tmp_path: Path) -> None:
    host.units.rmdir()
    host.units.touch()  # root may write anywhere, but not into a file
    with pytest.raises(PreflightRefusedError, match=r"cannot write .*: Not a directory") as error:
        host.install(campaign(tmp_path))
    assert "As root: " in error.value.remedy
    assert host.calls() == []


def test_systemctl_that_refuses(host: Host, tmp_path: Path) -> None:
    host.systemctl.write_text("#!/bin/sh\necho 'Failed to enable unit: masked' >&2\nexit 1\n")
    with pytest.raises(PreflightRefusedError, match=r"daemon-reload` failed: Failed to enable unit: masked"):
        host.install(campaign(tmp_path))


def test_a_name_that_another_campaign_has(host: Host, tmp_path: Path) -> None:
    host.install(campaign(tmp_path / "one"))
    before = (host.units / "soakrig-bisect-night-1.service").read_text()
    other = campaign(tmp_path / "two")
    with pytest.raises(UsageError, match="is there already and is not of the campaign in") as error:
        host.install(other)
    assert "Rename" in error.value.remedy
    assert (host.units / "soakrig-bisect-night-1.service").read_text() == before
