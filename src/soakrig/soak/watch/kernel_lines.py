"""Kernel-log lines other than an Xid that a soak has to know about, and the one door to all of them.

``classify`` turns a record into signals. A line that no rule knows is no signal; a driver line ("NVRM: ") that no rule
knows is one of severity info. Texts are those of the drivers and of Linux: open-gpu-kernel-modules (osapi.c, osinit.c,
kernel_gsp.c, common_nvswitch.h), mm/oom_kill.c, kernel/hung_task.c, kernel/watchdog.c, drivers/pci/pcie/aer.c,
arch/x86/mm/fault.c, lib/ratelimit.c, amdgpu, nouveau.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from soakrig.record.signal import Severity, Signal
from soakrig.soak.watch.kernel_record import KernelRecord
from soakrig.soak.watch.xid import find_bus_id, parse_xid, plain_words

INTERESTING = (
    "Xid", "NVRM", "nvidia", "nouveau", "amdgpu", "GPU reset", "ring ", "segfault", "traps:", "ut of memory", "oom",
    "OOM", "blocked", "ockup", "LOCKUP", "BUG", "Oops", "panic", "WARNING", "AER", "PCIe", "pcieport", "suppressed",
    "dropped", "Missed", "task:", " ffff", "protection fault", "Internal error", "Unable to", "Killed",
    "terminated abn", "memory pressure", "fallen off", "wedged", "information: process",
)  # fmt: skip
"""A text that holds none of these is no signal; most kernel chatter ends here."""

_QUOTED = re.compile(r"NVRM:? ?Xid|SXid \(PCI|Xid \((?:PCI|[0-9a-f]{4}:)")


@dataclass(frozen=True, slots=True)
class Rule:
    """A line's pattern, and the kind and severity it stands for; named groups become fields of the signal."""

    kind: str
    severity: Severity
    pattern: re.Pattern[str]
    signature: str = ""
    finish: Callable[[Signal, re.Match[str]], None] | None = None


_INTEGERS = frozenset({"pid", "tid", "owner_tid", "secs", "cpu", "n", "missed", "every", "vmid", "signal", "sxid",
                       "switch", "link"})  # fmt: skip


def _sxid(signal: Signal, match: re.Match[str]) -> None:
    """Severity 0 is non-fatal and 1 fatal (common_nvswitch.h); data lines follow the line that says which."""
    text = match["text"]
    word = re.match(r"(Non-fatal|Fatal), ", text)
    number = re.match(r"Severity ([0-9]+) ", text)
    if word:
        signal.detail["severity"] = word[1]
        signal.severity = "fault" if word[1] == "Fatal" else "warning"
    elif number:
        signal.severity = "warning" if number[1] == "0" else "fault"
    elif text.startswith("Data {"):
        signal.severity = "warning"
    if link := re.search(r"\bLink ([0-9]+)", text):
        signal.detail["link"] = int(link[1])
    signal.signature = f"SXid {signal.detail['sxid']} {plain_words(text)}".strip()


def _oom(signal: Signal, match: re.Match[str]) -> None:
    signal.detail["memcg"] = "Memory cgroup" in match[0]


def _probe(signal: Signal, match: re.Match[str]) -> None:
    signal.detail["sig"] = "bus_lost"


def _aer(signal: Signal, match: re.Match[str]) -> None:
    severity = match["severity"]
    signal.severity = "warning" if severity.startswith("Correct") else "fault"
    signal.signature = f"PCIe error {severity}"


def _nouveau(signal: Signal, match: re.Match[str]) -> None:
    signal.signature = f"nouveau {plain_words(match['text'])}"


_BDF = r"(?P<bdf>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f])"
_AER_SEVERITY = r"(?P<severity>Correct(?:ed|able)|Uncorrect(?:ed|able)(?: \((?:Non-)?Fatal\))?)"


def _rule(
    kind: str,
    severity: Severity,
    pattern: str,
    signature: str = "",
    finish: Callable[[Signal, re.Match[str]], None] | None = None,
) -> Rule:
    return Rule(kind, severity, re.compile(pattern), signature, finish)


_NVRM: tuple[Rule, ...] = (
    _rule("gpu_ident", "info", r"NVRM: GPU at PCI:\S+: (?P<uuid>GPU-[0-9a-f-]+)"),
    _rule("gpu_serial", "info", r"NVRM: (?:GPU \S+: GPU serial number is|GPU Board Serial Number:)"),
    _rule("bus_lost", "fault", r"NVRM: GPU \S+: GPU has fallen off the bus", "GPU has fallen off the bus"),
    _rule("probe_fail", "fault", r"NVRM: The NVIDIA GPU [^\0]*fallen off the bus", "GPU dead at probe", _probe),
    _rule("probe_fail", "fault", r"NVRM: fallen off the bus and is not responding", "GPU dead at probe", _probe),
    _rule("gsp_ratelimit", "fault", r"NVRM: Rate limiting GSP RPC error prints .*?(?:1 of every (?P<every>\d+)|$)",
          "GSP RPC errors rate-limited"),
)  # fmt: skip
_SIGNS: tuple[tuple[str, Severity, str, str], ...] = (
    ("gsp_heartbeat", "fault", "GSP heartbeat timed out", r"heartbeat timed out|_kgspIsHeartbeatTimedOut"),
    ("gsp_crashcat", "fault", "GSP crash report", r"GSP-CrashCat Report"),
    ("gsp_timeout_banner", "fault", "GSP timeout", r"\*\*\* ?GSP Timeout ?\*\*|\* GSP Timeout \*"),
    ("pmu_halted", "fault", "PMU has halted", r"PMU has halted|EventPmuHalted"),
    ("gpu_is_lost", "fault", "GPU is lost", r"NV_ERR_GPU_IS_LOST|GPU is lost|[rR]pc.*\b0x0000000f\b"),
    ("rm_init_adapter_failed", "fault", "RmInitAdapter failed", r"(?i)rm_?init_?adapter failed"),
    ("cannot_attach", "fault", "cannot attach GPU", r"Cannot attach gpu"),
    ("probably_locked", "fault", "RC watchdog: GPU is probably locked", r"GPU is probably locked"),
    ("rpc_failed", "fault", "GSP RPC failed", r"rpcRecvPoll timedout|_issueRpcAndWait: .*(?:fail|timed ?out)"),
    ("nv_err_no_memory", "warning", "driver out of memory", r"NV_ERR_NO_MEMORY"),
    ("crash_dump", "warning", "GPU crash dump created", r"GPU crash dump has been created"),
)
_NVRM_SIGNS: tuple[tuple[str, Severity, str, re.Pattern[str]], ...] = tuple(
    (sign, severity, words, re.compile(pattern)) for sign, severity, words, pattern in _SIGNS
)

_OTHERS: tuple[Rule, ...] = (
    _rule("sxid", "fault", r"nvidia-nvswitch(?P<switch>\d+): SXid \(PCI:[^)]*\): (?P<sxid>\d{1,9})(?:,\s*|$)"
          r"(?P<text>.*)", finish=_sxid),
    _rule("uvm_fatal", "fault", r"nvidia-uvm: .*global fatal error", "UVM global fatal error"),
    _rule("oom_kill", "fault", r"(?:(?:Out of memory|Memory cgroup out of memory)[^:]*: )?Killed process (?P<pid>\d+)"
          r"(?:,? UID \d+,?)? \((?P<comm>.*?)\)(?:,? |$)(?=total-vm|UID|vm|$)", "OOM kill", _oom),
    _rule("oom_chosen", "info", r"(?:Out of memory|Memory cgroup out of memory)[^:]*: Kill process (?P<pid>\d+)"
          r" \((?P<comm>.*?)\) score"),
    _rule("oom_reaped", "info", r"oom_reaper: reaped process (?P<pid>\d+) \((?P<comm>.*)\),"),
    _rule("oom_ctx", "info", r"oom-kill:constraint=(?P<constraint>\w+).*,task=(?P<comm>.*),pid=(?P<pid>\d+)"),
    _rule("oom_invoked", "info", r"(?P<comm>.{1,15}) invoked oom-killer:"),
    _rule("hung_task", "fault", r"INFO: task (?P<comm>.*):(?P<tid>\d+) blocked(?: in I/O wait)? for more than"
          r" (?P<secs>\d+) seconds", "hung task"),
    _rule("hung_task_owner", "info", r"INFO: task (?P<comm>.*?):(?P<tid>\d+) (?:<\w+> |is )?(?:<\w+> )?blocked on an? "
          r".*owned by task (?P<owner>.*):(?P<owner_tid>\d+)"),
    _rule("task_dump", "info", r"task:(?P<comm>.*?)\s+state:(?P<state>\w)\s.*?\bpid:\s*(?P<tid>\d+)"),
    _rule("task_dump", "info", r"(?P<comm>\S.{0,14}?)\s+(?P<state>[DRSTZ])\s+(?:[0-9a-f]{16}\s+)?\d+\s+(?P<tid>\d+)"
          r"\s+\d+\s+0x[0-9a-f]{8}"),
    _rule("soft_lockup", "fault", r"watchdog: BUG: soft lockup - CPU#(?P<cpu>\d+) stuck for (?P<secs>\d+)s! "
          r"\[(?P<comm>.*):(?P<tid>\d+)\]", "soft lockup"),
    _rule("hard_lockup", "fault", r"(?:NMI )?[Ww]atchdog: (?:BUG: )?.*[Hh]ard LOCKUP", "hard lockup"),
    _rule("segfault", "warning", r"(?P<comm>.{1,15}?)\[(?P<pid>\d+)\]: segfault at .*?(?: in (?P<lib>[^\[]+)\[|$)",
          "segfault"),
    _rule("trap", "warning", r"traps: (?P<comm>.{1,15}?)\[(?P<pid>\d+)\] (?P<trap>.*?) ip:.*?"
          r"(?: in (?P<lib>[^\[]+)\[|$)", "trap"),
    _rule("oops", "fault", r"BUG: |kernel BUG at |Oops: |Oops \[|general protection fault[,:]"
          r"|Internal error: |Unable to handle kernel", "kernel oops"),
    _rule("panic", "fault", r"Kernel panic - not syncing", "kernel panic"),
    _rule("kernel_warning", "warning", r"WARNING: (?:CPU: \d+ )?.* at .*?(?:\[(?P<module>\w+)\]|$)", "kernel warning"),
    _rule("suppressed", "warning", r"\S+: (?P<n>\d+) callbacks suppressed"),
    _rule("suppressed", "warning", r"Future hung task reports are suppressed"),
    _rule("gap", "warning", r"\*\* (?P<missed>\d+) printk messages dropped \*\*"),
    _rule("gap", "warning", r"Missed (?P<missed>\d+) kernel messages"),
    _rule("aer", "warning", rf"\S+ \S+: AER: (?:Multiple )?{_AER_SEVERITY} error (?:message )?received"
          rf"(?::| from) {_BDF}", finish=_aer),
    _rule("aer_detail", "warning", rf"\S+ {_BDF}: (?:AER: )?PCIe Bus Error: severity={_AER_SEVERITY}, "
          r"type=(?P<layer>[^,]+)", finish=_aer),
    _rule("aer_norecover", "fault", rf"\S+ {_BDF}: (?:AER: )?(?:can't recover|device recovery failed)",
          "PCIe error not recovered"),
    _rule("aer_status", "info", rf"\S+ {_BDF}: +device \[[0-9a-f:]+\] error status/mask=(?P<status>[0-9a-f]+)"),
    _rule("aer_bit", "info", rf"pcieport {_BDF}: +\[ ?\d+\] \S"),
    _rule("amdgpu_ring_timeout", "fault", r".*\bring (?P<ring>\S+) timeout, (?:signaled|but soft)",
          "amdgpu ring timeout"),
    _rule("amdgpu_page_fault", "fault", rf"amdgpu {_BDF}: amdgpu: \[(?P<hub>\w+)\] (?:no-retry |retry )?page fault "
          r"\(.*?vmid:(?P<vmid>\d+)", "amdgpu page fault"),
    _rule("amdgpu_process", "info", r".*\bProcess (?:information: process )?(?P<comm>.{0,15}?) ?"
          r"pid (?P<pid>\d+) thread"),
    _rule("amdgpu_process", "info", r"amdgpu .*\bin process (?P<comm>.{0,15}?) ?pid (?P<pid>\d+) thread"),
    _rule("amdgpu_fault_addr", "info", rf"amdgpu {_BDF}: amdgpu: +in page starting at address (?P<addr>0x[0-9a-f]+)"),
    _rule("amdgpu_reset", "warning", r".*\bGPU reset ?(?P<phase>begin)!", "amdgpu reset"),
    _rule("amdgpu_reset", "warning", r".*(?:GPU reset\(\d+\) |Ring \S+ reset )(?P<phase>succeeded|failed)",
          "amdgpu reset"),
    _rule("amdgpu_reset", "warning", r".*\bdevice (?P<phase>wedged)", "amdgpu reset"),
    _rule("nouveau", "fault", rf"nouveau {_BDF}: (?P<text>.*(?:ERROR|[Ee]rror|[Ff]ault|[Tt]imeout|[Ff]ailed|TRAP).*)",
          finish=_nouveau),
    _rule("stack_frame", "info", r" *(?:RIP: [0-9a-f]{4}:)?(?:\? )?(?P<symbol>[\w.]+)\+0x[0-9a-f]+/0x[0-9a-f]+ "
          r"\[(?P<module>nvidia\w*|amdgpu|nouveau)\]"),
)  # fmt: skip

_PROGRAMS: tuple[tuple[str, Rule], ...] = (
    ("systemd", _rule("systemd_oom", "warning", r"(?P<unit>\S+): A process of this unit has been killed by the OOM")),
    ("systemd-coredump", _rule("coredump", "warning", r"Process (?P<pid>\d+) \((?P<comm>.*?)\) of user \d+ .*?"
                               r"signal (?P<signal>\d+)", "core dump")),
)  # fmt: skip
_APP_OOM = re.compile(r"\(raylet\).*killed due to memory pressure \(OOM\)")


def classify(record: KernelRecord) -> list[Signal]:
    """The signals of a record, none for most; never raises. Time and source state are for the caller to add.

    A record that the kernel is known to have written (facility 0) is searched line by line, any other only at its
    start, so that nothing can be smuggled in behind a line break.
    """
    text = record.text
    for word in INTERESTING:
        if word in text:
            break
    else:
        return []
    signals = [s for s in (_classify_text(text, record),) if s is not None]
    if record.facility == 0 and "\n" in text and (not signals or signals[0].kind != "probe_fail"):
        signals += [s for line in text.split("\n")[1:] if (s := _classify_text(line, record)) is not None]
    for signal in signals:
        signal.raw = record.raw
        signal.injected = record.facility not in (None, 0)
        for key, value in (("seq", record.seq), ("boot_id", record.boot_id), ("level", record.level)):
            if value is not None:
                signal.detail[key] = value
    return signals


def _classify_text(text: str, record: KernelRecord) -> Signal | None:
    if record.identifier not in (None, "kernel"):
        return _program_line(text, str(record.identifier))
    if record.indented:
        return _continuation(text.strip())
    if text.startswith("NVRM: "):
        return parse_xid(text) or _nvrm_line(text)
    if signal := _first_match(text, _OTHERS):
        return signal
    if text.startswith("Xid (PCI:"):
        return Signal("not_kernel_form", "kernel_log", "warning", text, signature="Xid in a form of no driver")
    if _QUOTED.search(text):
        return Signal("quoted", "kernel_log", "info", text)
    return Signal("app_oom", "kernel_log", "warning", text) if _APP_OOM.search(text) else None


def _program_line(text: str, identifier: str) -> Signal | None:
    """A line that a program logged under its own name: at most a quotation, or its word on a dead process."""
    signal = None
    for program, rule in _PROGRAMS:
        if program == identifier and (signal := _first_match(text, (rule,))) is not None:
            break
    if signal is None and _QUOTED.search(text):
        signal = Signal("quoted", "kernel_log", "info", text)
    if signal is not None:
        signal.detail["identifier"] = identifier
    return signal


def _continuation(text: str) -> Signal | None:
    """An indented text line: a later line of one print, or somebody's quotation."""
    for rules in (_NVRM[4:5], [r for r in _OTHERS if r.kind == "stack_frame"]):
        if signal := _first_match(text, rules):
            return signal
    if _QUOTED.search(text):
        return Signal("quoted", "kernel_log", "info", text)
    return Signal("continuation", "kernel_log", "info", text) if text.startswith("NVRM: ") else None


def _nvrm_line(text: str) -> Signal:
    if signal := _first_match(text, _NVRM):
        return signal
    bus = find_bus_id(text)
    signal = Signal("nvrm_other", "kernel_log", "info", text, pci=bus[0] if bus else None)
    for sign, severity, signature, pattern in _NVRM_SIGNS:
        if pattern.search(text):
            signal.severity, signal.signature = severity, signature
            signal.detail["sig"] = sign
            break
    return signal


def _first_match(text: str, rules: tuple[Rule, ...] | list[Rule]) -> Signal | None:
    for rule in rules:
        match = rule.pattern.match(text)
        if match is not None:
            return _signal(rule, match, text)
    return None


def _signal(rule: Rule, match: re.Match[str], text: str) -> Signal:
    signal = Signal(rule.kind, "kernel_log", rule.severity, text, signature=rule.signature or None)
    for key, value in match.groupdict().items():
        if value is None or key == "text":
            continue
        item: str | int = int(value[:18]) if key in _INTEGERS else value.strip()
        match key:
            case "pid" | "tid":
                signal.pid = int(item)
                signal.detail[key] = item
            case "comm":
                signal.process = str(item) or None
            case "addr":
                signal.address = str(item)
            case _:
                signal.detail[key] = item
    if bus := find_bus_id(str(signal.detail.get("bdf", "")) or text):
        signal.pci = bus[0]
        if bus[1] is not None:
            signal.detail.setdefault("bdf", f"{bus[0]}.{bus[1]}")
    if signal.kind in ("oom_kill", "segfault", "hung_task", "trap", "soft_lockup") and signal.process:
        signal.signature = f"{signal.signature} {signal.process}"
    if rule.finish is not None:
        rule.finish(signal, match)
    return signal
