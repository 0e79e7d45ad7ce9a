"""Xid lines of the NVIDIA driver: from the message to a signal with a canonical signature.

The driver has one printer, ``krcReportXid_IMPL`` (open-gpu-kernel-modules, src/nvidia/src/kernel/gpu/rc/kernel_rc.c):

    NVRM: Xid (PCI:dddd:bb:dd[ GPU-I:nn[ GPU-CI:nn]]): N, [pid=P, name=COMM, ]text

The text may be empty or cut, older drivers leave "PCI:", pid or name out, and newer ones leave both out when unknown.
pid and name may be the observer's: they are what the line names, not the cause.
"""

from __future__ import annotations

import re
from typing import Any

from soakrig.record.signal import Signal
from soakrig.soak.watch.xid_catalogue import severity_of

_LINE = re.compile(r"NVRM: Xid \(([^()\n]*)\): ([0-9]{1,9})(?:(?=[\s,])|$)")
_BUS = re.compile(
    r"(?<![0-9A-Fa-f])(?<![0-9A-Fa-f]:)([0-9A-Fa-f]{4,8}):([0-9A-Fa-f]{2}):([0-9A-Fa-f]{2})(?:\.([0-9A-Fa-f]))?(?![0-9A-Fa-f])"
)
_GPU_INSTANCE, _COMPUTE_INSTANCE = re.compile(r"GPU-I:([0-9]+)"), re.compile(r"GPU-CI:([0-9]+)")
_PID = re.compile(r"pid=(?:'?(?P<pid>[0-9]{1,10})'?|'?<unknown>'?)(?=,|\s|$)(?:,\s*)?")
_UNKNOWN_NAME = re.compile(r"name='?<unknown>'?(?:,\s*|$)")
_QUOTED_NAME = re.compile(r"name='([^']{1,15})'(?:,\s*|$)")
_CUT_LINE = re.compile(r"NVRM: Xid(?: \([^()\n]*)?(?:\):? ?)?$")
COMM_MAX = 15

_FOLLOWER = re.compile(
    r"(?:Ch |channel |Channel ID |Graphics |MMU Fault|Class Error|NVLink|GPU |GSP|Timeout |Contained|Uncontained|Row "
    r"|Dynamic Page|An? |errorString|SEC_FAULT|Error status|ENGINE |PBDMA|physAddr|[A-Z_]{3,} +(?:Non)?[Ff]atal"
    r"|(?:0x)?[0-9a-f]{4,8}(?: |$)|$)"
)

_CHANNEL = re.compile(r"(?:Ch|channel|Channel ID) (?:0x)?([0-9a-fA-F]{2,8})\b")
_INTR = re.compile(r", intr ([0-9a-fA-F]{8})\b")
_ENGINE = re.compile(r"MMU Fault: ENGINE (\S+) ")
_GPC = re.compile(r"\b(GPC[0-9]+) ")
_CLIENT = re.compile(r"(\S+) faulted @")
_ADDRESS = re.compile(r"faulted @ (0x([0-9a-fA-F]{1,8})_([0-9a-fA-F]{8})|0x[0-9a-fA-F]+)(?=[.\s])")
_ADDRESS_AT_END = re.compile(r"faulted @ (0x([0-9a-fA-F]{1,8})_([0-9a-fA-F]{8}))$")
_KIND_OF_FAULT = re.compile(r"Fault is of type (\S+)(?: (\S+))?")
_FAULT_WORDS = (
    "PDE PDE_SIZE PTE VA_LIMIT_VIOLATION UNBOUND_INST_BLOCK PRIV_VIOLATION RO_VIOLATION WO_VIOLATION "
    "PITCH_MASK_VIOLATION WORK_CREATION UNSUPPORTED_APERTURE COMPRESSION_FAILURE UNSUPPORTED_KIND REGION_VIOLATION "
    "POISONED ATOMIC_VIOLATION"
)
"""Words of dev_fault.h (gh100), printed after ``FAULT_``."""
_FAULT_TYPES = tuple(f"FAULT_{word}" for word in _FAULT_WORDS.split())
_ACCESS_TYPES = tuple(
    f"ACCESS_TYPE_{where}{what}"
    for where in ("", "VIRT_", "PHYS_")
    for what in ("READ", "WRITE", "PREFETCH", "ATOMIC", "ATOMIC_STRONG", "ATOMIC_WEAK")
)

_SM = re.compile(r"Graphics (SM \w+ Exception) on \(GPC (\d+), TPC (\d+), SM (\d+)\)(?:: (.*))?")
_RECOVERY = re.compile(
    r"GPU recovery action changed from (0x[0-9a-fA-F]+) \(([^()]*)\) to (0x[0-9a-fA-F]+) \(([^()]*)(?:\)|$)"
)
_RPC = re.compile(r"Expected function (\d+) \((\w+)\)")
_RPC_WAIT = re.compile(r"Timeout after (\d+)s")
_NVLINK5 = re.compile(r"(\w+)\s+(Fatal|Nonfatal)\s+XC\d+\s+i\d+\s+Link\s+(-?\d+)")
_LINK = re.compile(r"\blink (\d+)", re.IGNORECASE)
_CONTAINED = re.compile(r"(Contained|Uncontained): ([^(.]*)")
_RESET = re.compile(r"RST: (Yes|No), D-RST: (Yes|No)")
_PREVIOUS = re.compile(r" caused by previous Xid (\d+)$")
_ERROR_STRING = re.compile(r"errorString ([^,]+)")
_GSP = re.compile(r"GSP (task|kernel) (exception|panic): ([^@(]*)")
_PARTITION = re.compile(r"partition (\d+)")

_NUMBERS = re.compile(
    r"0x[0-9a-fA-F_]+|\b(?=[0-9a-fA-F]*[0-9])[0-9a-fA-F]{2,}\b|\b[0-9a-fA-F]{8}\b|\([^()]*\)|[#<>='\"]|\b[0-9]+\b"
)


def find_bus_id(text: str) -> tuple[str, str | None] | None:
    """PCI address in ``text`` as ("dddd:bb:dd" in lower case, function or None); the domain may be longer."""
    match = _BUS.search(text)
    if match is None:
        return None
    domain = match[1].lower().lstrip("0").rjust(4, "0")
    return f"{domain}:{match[2].lower()}:{match[3].lower()}", match[4]


def parse_xid(text: str) -> Signal | None:
    """The signal of a message that begins as the driver's Xid line, else None; never raises.

    A line that is cut before its number is kind ``truncated`` with no number. ``raw`` is the message; times and origin
    are for the caller to fill in.
    """
    if not text.startswith("NVRM: Xid"):
        return None
    line = text.split("\n", 1)[0]
    match = _LINE.match(line)
    bus = None if match is None else find_bus_id(match[1])
    if match is None or (bus is None and not match[1].startswith("PCI:")):
        return _malformed(line)
    number = int(match[2])
    detail: dict[str, Any] = {}
    if bus is None:
        detail["bus_as_read"] = match[1]
    for key, pattern in (("gi", _GPU_INSTANCE), ("ci", _COMPUTE_INSTANCE)):
        if m := pattern.search(match[1]):
            detail[key] = int(m[1])
    rest = line[match.end() :].removeprefix(",").strip()
    pid, name, message = _named(rest, detail)
    signal = Signal(
        kind="xid",
        source="kernel_log",
        severity=severity_of(number),
        raw=line,
        xid=number,
        pci=bus[0] if bus else None,
        pid=pid,
        process=name,
        detail=detail,
    )
    if m := _CHANNEL.match(message):
        detail["channel"] = m[1].lower()
        if m := _INTR.search(message):
            detail["intr"] = m[1].lower()
    if m := _PREVIOUS.search(message):
        detail["previous_xid"] = int(m[1])
    if "faulted @" in message or "MMU Fault: ENGINE" in message:
        _mmu_fault(message, signal)
    if number == 154:
        _recovery(message, signal)
    signal.signature = _signature(number, message, signal)
    if message:
        detail["message"] = message
    return signal


def _malformed(line: str) -> Signal:
    if _CUT_LINE.match(line):
        return Signal("truncated", "kernel_log", "fault", line, signature="Xid, number cut off", pci=_bus_of(line))
    return Signal("not_kernel_form", "kernel_log", "warning", line, signature="Xid in a form of no driver")


def _bus_of(line: str) -> str | None:
    bus = find_bus_id(line)
    return bus[0] if bus else None


def _named(rest: str, detail: dict[str, Any]) -> tuple[int | None, str | None, str]:
    """Split "pid=…, name=…, text" into pid, name and text; what is unknown or not there is None."""
    match = _PID.match(rest)
    if match is None:
        return None, None, rest
    pid = int(match["pid"]) if match["pid"] else None
    if pid is None:
        detail["unknown"] = True
    rest = rest[match.end() :]
    if not rest.startswith("name="):
        return pid, None, rest
    if m := _UNKNOWN_NAME.match(rest):
        return pid, None, rest[m.end() :]
    if m := _QUOTED_NAME.match(rest):
        return pid, m[1], rest[m.end() :]
    return pid, *_split_name(rest.removeprefix("name="))


def _split_name(rest: str) -> tuple[str | None, str]:
    """A task's name is up to 15 bytes of any text, ", " included: its end is told by what can follow it."""
    ends = [m.start() for m in re.finditer(",(?: |$)", rest)]
    within = [end for end in ends if end <= COMM_MAX]
    for end in within:
        if _FOLLOWER.match(rest[end + 1 :].lstrip()):
            return rest[:end], rest[end + 1 :].lstrip()
    if within or ends:
        end = (within or ends)[0]
        return rest[:end], rest[end + 1 :].lstrip()
    return rest[:COMM_MAX] or None, ""


def _mmu_fault(message: str, signal: Signal) -> None:
    """Engine, client, address, type and access; a word that the end of the line may have cut is left out."""
    if m := _ENGINE.search(message):
        signal.engine = m[1]
    if m := _GPC.search(message):
        signal.detail["gpc"] = int(m[1][3:])
    if m := _CLIENT.search(message):
        signal.client = None if m[1].endswith(":") else m[1]
    if m := _ADDRESS.search(message) or _ADDRESS_AT_END.search(message):
        signal.address = m[1].lower()
        value = (int(m[2], 16) << 32 | int(m[3], 16)) if m[2] else int(m[1], 16)
        signal.detail["address_value"] = value
    if m := _KIND_OF_FAULT.search(message):
        at_end = m.end() == len(message)
        signal.fault_type = _whole(m[1], _FAULT_TYPES, at_end and not m[2], signal)
        signal.access = _whole(m[2], _ACCESS_TYPES, at_end, signal) if m[2] else None


def _whole(word: str, known: tuple[str, ...], at_end: bool, signal: Signal) -> str | None:
    """``word``, unless it ends the line as the mere beginning of a known word; new words of new drivers are kept."""
    if at_end and word not in known and any(name.startswith(word) for name in known):
        signal.detail["cut"] = True
        return None
    return word


def _recovery(message: str, signal: Signal) -> None:
    """Xid 154 is the driver's own verdict; back to None is good news, a verdict that was cut off is not."""
    if m := _RECOVERY.search(message):
        signal.detail["recovery_from"] = m[2]
        signal.detail["recovery_code"] = int(m[3], 16)
        signal.detail["recovery_to"] = m[4]
        signal.severity = "info" if int(m[3], 16) == 0 else "fault"


def _signature(number: int, message: str, signal: Signal) -> str:
    """Name for comparing faults: number, kind and place of the fault; no address, pid, channel or count."""
    detail = signal.detail
    words: list[str]
    if signal.fault_type or signal.engine:
        gpc, client = detail.get("gpc"), signal.client
        access = (signal.access or "").removeprefix("ACCESS_TYPE_")
        place = f"GPC{gpc}" if gpc is not None else re.sub(r"_[0-9]+$", "", client or "")
        words = [signal.fault_type or "", access, signal.engine or "", place]
    elif m := _SM.match(message):
        detail["gpc"], detail["tpc"], detail["sm"] = int(m[2]), int(m[3]), int(m[4])
        words = [m[1], *([m[5].strip()] if m[5] else [])]
    elif message.startswith("Graphics Exception: "):
        words = ["Graphics Exception", message[20:].split(" ", 1)[0].rstrip(",:")]
    elif "recovery_to" in detail:
        words = ["recovery action", detail["recovery_to"]]
    elif m := _RPC.search(message):
        detail["rpc_fn"] = int(m[1])
        if w := _RPC_WAIT.search(message):
            detail["rpc_wait_s"] = int(w[1])
        words = ["GSP RPC timeout", m[2]]
    elif m := _NVLINK5.match(message):
        detail["unit"], detail["nvlink_severity"], detail["link"] = m[1], m[2], int(m[3])
        words = [m[1], m[2]]
    elif m := _CONTAINED.match(message):
        if r := _RESET.search(message):
            detail["reset"], detail["drain_reset"] = r[1] == "Yes", r[2] == "Yes"
        words = [m[1], m[2].strip()]
    elif m := _GSP.match(message):
        words = ["GSP", m[1], m[2], m[3].strip()]
    elif m := _ERROR_STRING.search(message):
        words = [m[1].strip()]
    else:
        if m := _LINK.search(message):
            detail["link"] = int(m[1])
        if m := _PARTITION.search(message):
            detail["partition"] = int(m[1])
        words = [plain_words(message)]
    if "previous_xid" in detail:
        words = [f"after Xid {detail['previous_xid']}"]
    return " ".join(["Xid", str(number), *(w for w in words if w)])


def plain_words(text: str, limit: int = 8) -> str:
    """``text`` without numbers, hex words and what stands in parentheses, cut after ``limit`` words."""
    text = re.sub(r"^(?:Ch|channel|Channel ID)\s+(?:0x)?[0-9a-fA-F]+", "", text)
    words = re.sub(r"\s+", " ", _NUMBERS.sub(" ", text)).replace(" ,", ",").split(" ")
    kept = [w for w in words if any(c.isalpha() for c in w)][:limit]
    return " ".join(kept).strip(" ,.:;")
