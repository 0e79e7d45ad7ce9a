"""A systemd unit that goes on with a campaign after a reboot.

Formats: systemd.syntax(7), systemd.unit(5), systemd.service(5), systemd.exec(5); all that is used here is in version
245 (2020) and later.
"""

from __future__ import annotations

import os
import pwd
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from soakrig.bisect.arms import BASE
from soakrig.bisect.journal_file import JOURNAL
from soakrig.errors import PreflightRefusedError, UsageError
from soakrig.record.redaction import is_secret

UNITS = Path("/etc/systemd/system")
SECRETS = Path("/etc/soakrig")
"""Holds the secrets of units, for root alone: not the campaign's folder, which is meant to be passed on."""
BOOTED = Path("/run/systemd/system")
"""There where systemd runs this machine: sd_booted(3)."""

STOP_S = 120
"""For the engine's teardown: some 25 s by the launcher at its default grace, and the record has to be closed."""
NO_RESTART = (1, 2, 64, 130)
"""Exit statuses of a campaign that has nothing to gain from another try: it ended (0, 1, 2), the call is wrong (64), or
somebody interrupted it (130). Refused (3) is tried again, as a driver may not be up yet; so is a bug (70) or a kill."""
_NAME_MAX = 255
_SYSTEMCTL_S = 60.0
_OWN = frozenset({"HOME", "USER", "LOGNAME", "XDG_CACHE_HOME"})
"""Of BASE, what belongs to a user; systemd sets the first three for the user of the unit."""


def unit_name(folder: Path) -> str:
    """``soakrig-bisect-NAME.service`` of a campaign's folder; characters that a unit's name may not have are written
    as in systemd-escape(1). Raises ``UsageError`` where that gets too long."""
    name = folder.resolve().name.encode("utf-8", "surrogateescape")
    plain = "".join(chr(byte) if re.match(rb"[A-Za-z0-9:_.-]", bytes([byte])) else f"\\x{byte:02x}" for byte in name)
    unit = f"soakrig-bisect-{plain}.service"
    if len(unit) > _NAME_MAX:
        raise UsageError(
            f"the unit of {folder} would have a name of {len(unit)} characters, systemd takes {_NAME_MAX}",
            remedy="Rename the folder.",
        )
    return unit


def resume_unit(
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    python: str = sys.executable,
) -> str:
    """The text of the unit. It has no secrets: those are in the file that it names, see ``unit_secrets``.

    ``environment``: that the campaign was started with, None for this process's; what arms inherit of it is passed on
    (``arms.BASE``). ``directory``: to run in, where relative paths of the campaign mean what they meant at its start;
    None for the folder itself. ``python``: the interpreter that has soakrig, not resolved, as a virtual environment is
    found by it. The unit runs as the owner of ``folder``, with the limits that this process has.

    Type=exec: nothing waits for the campaign to be ready, so it has nothing to notify; and unlike Type=simple a start
    fails where the interpreter is gone. Raises ``UsageError`` for a folder without a journal, and for paths that a unit
    cannot hold.
    """
    folder, directory = folder.resolve(), (directory or folder).resolve()
    python = os.path.abspath(python)  # noqa: PTH100  (not resolved, see above)
    for path in (folder, directory, Path(python)):
        _check_path(path)
    if re.search(r"""["'\\]""", python):  # string_is_safe() in systemd's sources
        raise UsageError(
            f"{python} cannot be started by systemd: a program's path without quotes and backslashes was expected",
            remedy="Move the environment.",
        )
    if not (folder / JOURNAL).is_file():
        raise UsageError(f"{folder} holds no campaign: {JOURNAL} is not there", remedy="Give the folder of a campaign.")
    uid = folder.stat().st_uid
    public, secret = _environment(environment, uid)
    argv = [python, "-P", "-m", "soakrig", "bisect", "resume", str(folder)]
    lines = [
        _first_line(folder),
        "# Written by `soak bisect install-resume`. To be rid of it: systemctl disable and remove this file.",
        "[Unit]",
        f"Description=soakrig: go on with the bisect in {_specifiers(str(folder))}",
        "After=network.target nvidia-persistenced.service",
        f"RequiresMountsFor={_quoted(str(folder))} {_quoted(str(directory))} {_quoted(python)}",
        "# A folder that was removed is nothing to go on with, and no failure.",
        f"ConditionPathExists={_specifiers(str(folder / JOURNAL))}",
        "StartLimitIntervalSec=1h",
        "StartLimitBurst=5",
        "",
        "[Service]",
        "Type=exec",
        f"User={_user(uid)}",
        f"WorkingDirectory={_specifiers(str(directory))}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in public.items()),
        *([f"EnvironmentFile={_specifiers(str(secrets_path(folder)))}"] if secret else []),
        "# The colon: a $ in a path is no variable.",
        f"ExecStart=:{' '.join(_quoted(word) for word in argv)}",
        "# A campaign that has ended says so with its exit status and stays ended; a crash is tried again, within the",
        "# limit above.",
        "Restart=on-failure",
        "RestartSec=30",
        f"RestartPreventExitStatus={' '.join(map(str, NO_RESTART))}",
        "# The tool ends its engine in order; an engine that gets a signal of its own would pass for one that died.",
        "KillMode=mixed",
        f"TimeoutStopSec={STOP_S}",
        "# An engine that the kernel kills for its memory is a finding, not the end of the campaign.",
        "OOMPolicy=continue",
        "TasksMax=infinity",
        *(f"{name}={_limit(kind)}" for name, kind in _LIMITS.items()),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


_LIMITS = {"LimitMEMLOCK": resource.RLIMIT_MEMLOCK, "LimitNOFILE": resource.RLIMIT_NOFILE}
"""Those that change what an engine can do (pinned memory, connections): after a reboot as before it."""


def secrets_path(folder: Path) -> Path:
    """The file with the secrets of the unit of ``folder``."""
    # Wildcards are allowed in EnvironmentFile=, and a unit's name has none; its backslashes would be escapes there.
    return SECRETS / (unit_name(folder).removesuffix(".service").replace("\\x", "_x") + ".env")


def unit_secrets(folder: Path, environment: Mapping[str, str] | None = None) -> str:
    """The text of the unit's EnvironmentFile (systemd.exec(5)): what arms inherit and is a secret by its name (a token
    for the model hub). "" where there is none."""
    secret = _environment(environment, folder.stat().st_uid)[1]
    # In double quotes a backslash keeps these four from meaning anything.
    escaped = {name: re.sub(r'(["\\`$])', r"\\\1", value) for name, value in secret.items()}
    return "".join(f'{name}="{value}"\n' for name, value in escaped.items())


def install_unit(
    folder: Path,
    *,
    dry_run: bool,
    environment: Mapping[str, str] | None = None,
    directory: Path | None = None,
    units: Path = UNITS,
    booted: Path = BOOTED,
) -> str:
    """Install and enable the unit; the text for the caller to print: what was done, or with ``dry_run`` the unit alone.

    Nothing is started: the unit takes effect at the next boot. Installing again replaces the unit.

    Raises ``UsageError`` where ``folder`` holds no journal or the unit's name is taken by another campaign, and
    ``PreflightRefusedError`` where systemd does not run this machine, may not be changed, or refuses.
    """
    folder = folder.resolve()
    text, name = resume_unit(folder, environment=environment, directory=directory), unit_name(folder)
    if dry_run:
        return text
    own = f"{sys.executable} -m soakrig bisect install-resume {folder}"
    if not booted.is_dir() or shutil.which("systemctl") is None:
        raise PreflightRefusedError(
            f"systemd does not run this machine: {booted} or systemctl is not there (a container?)",
            remedy=f"Have your own supervisor run at boot: {sys.executable} -m soakrig bisect resume {folder}",
        )
    path, secrets = units / name, unit_secrets(folder, environment)
    try:
        _refuse_other(path, folder)
        if secrets:
            secrets_path(folder).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(secrets_path(folder), secrets, 0o600)
        _write(path, text, 0o644)
    except OSError as error:
        raise PreflightRefusedError(
            f"cannot write {error.filename or path}: {error.strerror or error}",
            remedy=f"As root: {own}\n  or take the text from --dry-run, put it there, `systemctl enable {name}`.",
        ) from error
    _systemctl("daemon-reload")
    _systemctl("enable", name)
    kept = f"; secrets are in {secrets_path(folder)}, for root alone" if secrets else ""
    return f"{path} is enabled: after a reboot the campaign goes on by itself{kept}\n"


def _refuse_other(path: Path, folder: Path) -> None:
    """Campaigns in two places may have folders of one name."""
    if path.exists() and path.read_text("utf-8", "replace").split("\n", 1)[0] != _first_line(folder):
        raise UsageError(
            f"{path} is there already and is not of the campaign in {folder}",
            remedy="Rename the folder, or remove that unit if its campaign is over.",
        )


def _write(path: Path, text: str, mode: int) -> None:
    """Put a whole file in place, never readable by more than ``mode`` says."""
    new = path.with_name(f".{path.name}.new")
    with suppress(FileNotFoundError):
        new.unlink()
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), mode)  # whatever the umask says
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _systemctl(*words: str) -> None:
    argv = ["systemctl", "--no-ask-password", *words]
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_SYSTEMCTL_S, check=False)
        why = done.stderr.decode("utf-8", "replace").strip() if done.returncode else ""
        failed = done.returncode != 0
    except (OSError, subprocess.TimeoutExpired) as error:
        why, failed = str(error), True
    if failed:
        raise PreflightRefusedError(
            f"`{' '.join(argv)}` failed: {why or 'it gave no reason'}",
            remedy="The unit is written. Mend what systemctl complains of and run that command, or remove the unit.",
        )


def _environment(environment: Mapping[str, str] | None, uid: int) -> tuple[dict[str, str], dict[str, str]]:
    """What is passed on: what may be read by everybody, and what is a secret by its name."""
    given = os.environ if environment is None else environment
    # Installed by root for another user (sudo), this process's HOME is not the campaign's.
    drop = _OWN if environment is None and uid != os.getuid() else frozenset[str]()
    base = {name: value for name, value in sorted(given.items()) if BASE.match(name) and name not in drop}
    for name, value in base.items():
        if re.search(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]", value):
            raise UsageError(
                f"{name} has a value with control characters or not in UTF-8, which a systemd unit cannot hold",
                remedy=f"Set {name} to something else, or unset it.",
            )
    public = {name: value for name, value in base.items() if not is_secret(name)}
    return public, {name: value for name, value in base.items() if is_secret(name)}


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _limit(kind: int) -> str:
    soft, hard = ("infinity" if one == resource.RLIM_INFINITY else str(one) for one in resource.getrlimit(kind))
    return f"{soft}:{hard}"


def _check_path(path: Path) -> None:
    text = str(path)
    # WorkingDirectory= and ConditionPathExists= know no quotes: a line's end cannot be written there at all.
    odd = re.search(r"[\x00-\x1f\x7f\ud800-\udfff]", text) or text != text.rstrip().rstrip("\\")
    if odd or not path.is_absolute():
        raise UsageError(
            f"{text!r} cannot be written in a systemd unit: an absolute path in UTF-8 without control characters, and "
            "without a space or backslash at its end, was expected",
            remedy="Move it.",
        )


def _first_line(folder: Path) -> str:
    return f"# Campaign: {folder}"


def _specifiers(text: str) -> str:
    """For settings that take the rest of the line as it is, but for specifiers."""
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    """One word in double quotes, for settings that split at spaces."""
    for plain, written in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\t", "\\t"), ("%", "%%")):
        text = text.replace(plain, written)
    return f'"{text}"'
