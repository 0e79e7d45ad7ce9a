"""journalctl: the kernel log as systemd-journald kept it (systemd: journald-kmsg.c, systemd.journal-fields).

``journalctl -k`` filters on _TRANSPORT=kernel, which hides journald's own notice of lost kernel messages (it comes with
_TRANSPORT=driver). A second child follows those.
"""

from __future__ import annotations

from soakrig.errors import WatcherError
from soakrig.soak.watch.followed_command import FollowedCommand, run_once
from soakrig.soak.watch.kernel_reader import BATCH, Batch
from soakrig.soak.watch.kernel_record import KernelRecord, parse_journal

REMEDY = "The user must be root or in group adm or systemd-journal, and systemd-journald must keep a journal here."
_COMMON = ("-o", "json", "--all", "--no-pager", "-q")


class JournalReader:
    """Follows the kernel's records of this boot; ``command`` is a parameter so that a test can put another there."""

    name = "journal"
    proves_origin = True
    live_times = False

    def __init__(self, command: str = "journalctl") -> None:
        self.command = command
        self.lost = 0
        self.doubt = ""
        self.waiting = ""
        self._kernel: FollowedCommand | None = None
        self._notices: FollowedCommand | None = None
        self._once = False

    def open(self, *, once: bool = False) -> None:
        status, said, errors = run_once([self.command, "-k", "-n", "1", *_COMMON])
        if status != 0 or not any(parse_journal(line) for line in said.splitlines()):
            why = errors or f"status {status}, and no kernel record in the answer"
            raise WatcherError(f"{self.command} -k: {why}", remedy=REMEDY)
        self._once = once
        where = () if once else ("-f", "-n", "0")
        self._kernel = FollowedCommand([self.command, "-k", *where, *_COMMON])
        self._notices = FollowedCommand([self.command, "-b", *where, *_COMMON, "_TRANSPORT=driver"])

    def read(self) -> Batch:
        if self._kernel is None:
            raise WatcherError(f"{self.command} is not open", remedy="call open() first")
        ended = self._kernel.ended()
        lines, at_end = self._kernel.lines(BATCH)
        records = _records(lines)
        records += self._read_notices()
        if ended is None:
            return Batch(records, at_end=at_end and not self._once)
        if self._once and self._kernel.status == 0:
            return Batch(records, at_end=at_end and not lines)
        if records:
            return Batch(records, at_end=False)
        raise WatcherError(ended, remedy=REMEDY)

    def close(self) -> None:
        for child in (self._kernel, self._notices):
            if child is not None:
                child.close()
        self._kernel = self._notices = None

    def _read_notices(self) -> list[KernelRecord]:
        if self._notices is None:
            return []
        ended = self._notices.ended()
        lines, _ = self._notices.lines(BATCH)
        found = [r for r in _records(lines) if "kernel messages" in r.text and r.text.startswith("Missed ")]
        for record in found:
            record.identifier = "kernel"  # journald's word about the kernel log
            number = record.text.split(" ", 2)[1]
            self.lost += int(number) if number.isdigit() else 1
        if ended is not None and not (self._once and self._notices.status == 0):
            self.doubt = f"lost records cannot be seen: {ended}"
            self._notices.close()
            self._notices = None
        return found


def _records(lines: list[bytes]) -> list[KernelRecord]:
    return [r for line in lines if (r := parse_journal(line.decode("utf-8", "replace"))) is not None]
