"""Lines that engines die with, and how they are told from text that is merely quoted.

Engines may print request bodies, and the bodies of a coding agent are full of other programs' errors. So a line of the
table counts only where a logger or the runtime would put it: at the start of the message, once the known prefixes
(process, level, time, file) are taken off. Messages of level INFO and DEBUG, where bodies are logged, never count. A
bare exception line counts only after a traceback. What an engine prints raw, line by line, cannot be told from its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from soakrig.record.signal import Severity

_EXC = r"(?:[\w.]*(?:Error|Exception): )"
_CUDA = rf"{_EXC}?(?:CUDA(?: driver| runtime)? error|Triton Error \[CUDA\])"
_SHELL = r"(?:\S+: line \d+:\s+\d+ )"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that tells of death or trouble. ``pattern`` matches at the start of the message; ``where`` says who
    prints it."""

    name: str
    pattern: re.Pattern[str]
    severity: Severity
    where: str


def _line(name: str, severity: Severity, where: str, *patterns: str) -> Line:
    return Line(name, re.compile("|".join(patterns)), severity, where)


LINES: tuple[Line, ...] = (
    _line("engine_dead", "fault", "vLLM, API server", r"(?:[\w.]+\.)?EngineDeadError\b"),
    _line(
        "engine_core_fatal", "fault", "vLLM, engine core",
        r"(?:CPU )?EngineCore encountered (?:a fatal error|an issue)",
        r"(?:CPU )?EngineCore failed to start",
        rf"{_EXC}?Engine core initialization failed",
        rf"{_EXC}?Executor failed\.",
    ),
    _line(
        "engine_process_died", "fault", "vLLM, API server and executor",
        r"(?:Engine core proc|Worker proc) \S+ died unexpectedly",
        r"EngineCore\S* died unexpectedly",
        r"\[shutdown\] MPClient: engine core exited unexpectedly",
        rf"{_EXC}?Engine core process \S+ died unexpectedly",
        rf"{_EXC}?Process \S+ \(PID: \d+\) died with exit code",
        r"RayWorkerProc rank=\S+ died unexpectedly",
    ),
    _line("api_servers", "fault", "vLLM with several API servers", r"Exception occurred while running API servers"),
    _line(
        "worker_exception", "fault", "vLLM worker; SGLang scheduler",
        r"WorkerProc hit an exception",
        r"(?:Ray)?WorkerProc failed",
        r"(?:Scheduler|DataParallelController) hit an exception",
    ),
    _line("output_handler", "fault", "vLLM, API server", r"AsyncLLM output_handler failed"),
    _line("rpc_timeout", "fault", "vLLM: a worker hangs", rf"{_EXC}?RPC call to \w+ timed out"),
    _line("child_failed", "fault", "SGLang, main process", r"Received sigquit from a child process"),
    _line(
        "uncaught", "fault", "Python multiprocessing: an uncaught exception ended that process",
        r"Process (?:EngineCore|VllmWorker|Worker|Scheduler|sglang)\S*:$",
    ),
    _line(
        "illegal_access", "fault", "CUDA, by way of torch, Triton or llama.cpp",
        rf"{_CUDA}.*illegal (?:memory access|instruction|address)",
        rf"{_EXC}?CUDA_ERROR_ILLEGAL",
    ),
    _line(
        "cuda_oom", "fault", "torch, llama.cpp",
        r"(?:[\w.]+\.)?OutOfMemoryError\b",
        r"CUDA out of memory",
        rf"{_CUDA}: out of memory",
        r"ggml_\w+: .*cudaMalloc failed: out of memory",
    ),
    _line(
        "cuda_error", "fault", "torch, Triton, llama.cpp",
        _CUDA,
        rf"{_EXC}?CUDA_ERROR_[A-Z]",
        r"cudaError[A-Z]",
        r"\S*ggml-cuda\S*:\d+: CUDA error",
    ),
    _line("device_assert", "fault", "a CUDA kernel's assert", r"\S+\.cuh?:\d+: .*thread: \[\d+,\d+,\d+\] Assertion"),
    _line(
        "host_oom", "fault", "Python, torch: host memory",
        r"MemoryError\b",
        rf"{_EXC}?\[enforce fail at alloc_cpu",
        rf"{_EXC}?std::bad_alloc",
        rf"{_EXC}(?:\[Errno 12\] )?Cannot allocate memory",
    ),
    _line(
        "nccl_abort", "fault", "torch ProcessGroupNCCL, vLLM, SGLang",
        r"Watchdog caught collective operation timeout",
        r"Some NCCL operations have failed or timed out",
        rf"{_EXC}?NCCL error",
    ),
    _line(
        "segfault", "fault", "C library, shell, torch",
        rf"{_SHELL}?Segmentation fault",
        r"!+ Segfault encountered",
    ),
    _line("fatal_python", "fault", "CPython faulthandler", r"Fatal Python error: "),
    _line(
        "aborted", "fault", "C++ runtime, C library, llama.cpp",
        r"terminate called (?:after|without)",
        rf"{_SHELL}?Aborted(?: \(core dumped\))?$",
        r"(?:\S+:\d+: )?GGML_ASSERT\(",
        r"double free or corruption",
        r"(?:free|malloc)\(\): ",
        r"corrupted (?:size|double)",
    ),
    _line(
        "killed", "fault", "shell, systemd",
        r"Killed$",
        rf"{_SHELL}Killed\b",
        r"A process of this unit has been killed by the OOM",
    ),
    _line("shm_blocked", "warning", "vLLM: a worker hangs", r"No available shared memory broadcast block found"),
    _line("nccl_warning", "warning", "NCCL", r"[\w.-]+:\d+:\d+ \[\d+\] .*NCCL WARN"),
    _line("stream_failed", "warning", "vLLM, API server", r"Error in [\w ]*stream generator"),
    _line(
        "asgi_exception", "warning", "uvicorn, asyncio",
        r"Exception in ASGI application",
        r"Task exception was never retrieved",
    ),
    _line("traceback", "warning", "Python", r"Traceback \(most recent call last\):"),
)  # fmt: skip
"""Searched in this order: the first that matches names the line."""

_LEVEL = r"(?P<level>TRACE|DEBUG|INFO|WARN|WARNING|ERROR|CRITICAL|FATAL)"
_STAMP = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\((?P<process>[A-Za-z]\w*) pid=(?P<pid>\d+)(?:, ip=[\d.]+)?\) ?",  # vLLM, Ray
        rf"{_LEVEL} \d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \[[\w./-]+:\d+\] ?",  # vLLM
        rf"{_LEVEL} {_STAMP} \[?[\w./-]+:\d+\] ?",  # vLLM forks
        rf"\[{_STAMP}(?: [A-Z]+\d+)*\] ?",  # SGLang
        rf"(?:[\w.]+ - )?{_LEVEL} - ",  # Python's logging
        rf"{_LEVEL}:[\w.]+:",  # Python's basicConfig
        rf"{_LEVEL}:?\s+",  # uvicorn
        r"\[rank\d+\]:? ?",  # torch
        r"\[(?P<letter>[EWIF])\d{4} \d\d:\d\d:\d\d\.\d+(?: \d+)? [\w./]+:\d+\] ?",  # torch, glog
        r"\[(?:Rank \d+|PG [^\]]*)\] ?",  # torch ProcessGroupNCCL
    )
)
_CARRIERS = (re.compile(rf"{_STAMP}(?: - |\s+)"), re.compile(r"[\w.-]+ +\| "))
"""What ``docker logs -t`` and compose put before every line, a logger's or not (Python's logging before its own)."""
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_EXCEPTION_LINE = re.compile(r"[\w.]*(?:Error|Exception)\b")
_QUIET_LEVELS = frozenset({"TRACE", "DEBUG", "INFO", "I"})


@dataclass(frozen=True, slots=True)
class Message:
    """A log line without its prefixes. ``bare``: it had none. ``pid`` and ``process`` as the prefix names them."""

    text: str
    level: str | None = None
    bare: bool = True
    pid: int | None = None
    process: str | None = None


def read_message(line: str) -> Message:
    """Take colour codes and the known prefixes off a line. The message keeps its own indentation."""
    text = _ANSI.sub("", line.rstrip("\r\n")).rpartition("\r")[2]  # a progress bar draws itself over and over
    level: str | None = None
    pid: int | None = None
    process: str | None = None
    bare = True
    for _ in range(8):
        match = next((found for prefix in (*_PREFIXES, *_CARRIERS) if (found := prefix.match(text))), None)
        if match is None:
            break
        bare = bare and match.re in _CARRIERS
        groups = match.groupdict()
        level = groups.get("level") or groups.get("letter") or level
        if groups.get("pid"):
            pid, process = int(groups["pid"]), groups["process"]
        text = text[match.end() :]
    return Message(text, level, bare, pid, process)


class Reader:
    """Judges lines one after the other; remembers the last traceback, which lends bare exception lines their weight."""

    WINDOW = 400
    """Lines after a traceback's head within which a bare exception line is its end."""

    def __init__(self) -> None:
        self._since_traceback = self.WINDOW

    def judge(self, message: Message) -> tuple[Line, Severity] | None:
        """The table's row that the message matches, and its severity here; None for an ordinary line.

        ``info`` in place of the row's own severity: it may be text that was merely quoted.
        """
        self._since_traceback += 1
        if message.level in _QUIET_LEVELS:
            return None
        if "Traceback (most recent call last):" in message.text:
            self._since_traceback = 0
        for line in LINES:
            if line.pattern.match(message.text):
                alone = message.bare and self._since_traceback >= self.WINDOW
                quoted = alone and line.severity == "fault" and _EXCEPTION_LINE.match(message.text)
                return line, "info" if quoted else line.severity
        return None
