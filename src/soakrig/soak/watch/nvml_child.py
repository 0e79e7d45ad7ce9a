"""The process that talks to NVML: ``python -P -m soakrig.soak.watch.nvml_child PARENT``.

NVML can hang for good inside the driver, and then takes every thread of its process along; so only this process loads
it. One JSON object a line each way: to ``{"id": n, "op": "open"}``, then ``"poll"`` (events and figures of a second) or
``"state"`` (what a card is and the condition it is in), it answers with ``{"id": n, "ok": {...}}``, or with
``{"id": n, "absent": text}`` where the machine has no NVML. It ends at the end of its input, and with its parent even
while a call hangs. Calls come from one thread: NVML's event sets are not thread safe.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import sys
import threading
from collections.abc import Callable
from typing import Any

UNKNOWN_XID = 999
"""``eventData`` of an Xid event whose number NVML does not know (DCGM's dcgm_nvml.h)."""
_EVENTS = {
    "nvmlEventTypeXidCriticalError": "xid",
    "nvmlEventTypeDoubleBitEccError": "ecc_double_bit",
    "nvmlEventTypeDramRetirementFailure": "dram_retirement_failure",
    "nvmlEventTypeFatalPoisonError": "fatal_poison",
    "nvmlEventTypeGpuUnavailableError": "gpu_unavailable",
}
_RECOVERY_FIELD = 230  # NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_GPU_IS_LOST, _RESET_REQUIRED = 15, 16
_MAX_EVENTS = 256


class _Nvml:
    """One NVML session over every GPU of the machine."""

    def __init__(self) -> None:
        import pynvml  # the only place that may load it

        self._nv: Any = pynvml
        self._handles: list[Any] = []
        self._names: list[dict[str, Any]] = []
        self._set: Any = None
        self._types: dict[int, str] = {}

    def open(self) -> dict[str, Any]:
        nv = self._nv
        nv.nvmlInit()
        notes: list[str] = []
        for index in range(nv.nvmlDeviceGetCount()):
            try:
                handle = nv.nvmlDeviceGetHandleByIndex(index)
            except nv.NVMLError as error:
                notes.append(f"GPU {index}: {_text(error)}")
                continue
            self._handles.append(handle)
            pci = self._value(lambda h=handle: _str(nv.nvmlDeviceGetPciInfo(h).busId))
            uuid = self._value(lambda h=handle: _str(nv.nvmlDeviceGetUUID(h)))
            name = self._value(lambda h=handle: _str(nv.nvmlDeviceGetName(h)))
            self._names.append({"index": index, "pci": short_pci(pci), "uuid": uuid, "name": name})
        if self._handles:
            notes += self._register()
        driver = self._value(lambda: _str(nv.nvmlSystemGetDriverVersion()))
        return {"driver": driver, "gpus": self._names, "notes": notes}

    def poll(self) -> dict[str, Any]:
        gpus = [self._read(n, self._figures(handle)) for n, handle in enumerate(self._handles)]
        return {"events": self._events(), "gpus": gpus}

    def state(self) -> dict[str, Any]:
        return {"gpus": [self._read(n, self._conditions(handle)) for n, handle in enumerate(self._handles)]}

    def _register(self) -> list[str]:
        nv = self._nv
        known = {getattr(nv, name): kind for name, kind in _EVENTS.items() if hasattr(nv, name)}
        notes: list[str] = []
        try:
            self._set = nv.nvmlEventSetCreate()
        except nv.NVMLError as error:
            return [f"no NVML events: {_text(error)}"]
        for number, handle in enumerate(self._handles):
            try:
                wanted = sum(known) & nv.nvmlDeviceGetSupportedEventTypes(handle)
                nv.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            except nv.NVMLError as error:
                notes.append(f"no NVML events of GPU {self._names[number]['index']}: {_text(error)}")
                continue
            if not wanted & nv.nvmlEventTypeXidCriticalError:
                notes.append(f"GPU {self._names[number]['index']} reports no Xid events through NVML")
        self._types = known
        return notes

    def _events(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        places = {_address(handle): names for handle, names in zip(self._handles, self._names, strict=True)}
        while self._set is not None and len(found) < _MAX_EVENTS:
            try:
                data = self._nv.nvmlEventSetWait_v2(self._set, 1)
            except self._nv.NVMLError_Timeout:
                break
            except self._nv.NVMLError as error:
                found.append({"kind": "error", "code": error.value, "text": _text(error)})
                break
            where = places.get(_address(data.device), {})
            kind = self._types.get(data.eventType, f"type 0x{data.eventType:x}")
            event = {"kind": kind, "data": data.eventData, "pci": where.get("pci"), "index": where.get("index")}
            for name in ("gpuInstanceId", "computeInstanceId"):
                if (value := getattr(data, name, 0xFFFFFFFF)) != 0xFFFFFFFF:
                    event[name] = value
            found.append(event)
        return found

    def _read(self, number: int, readings: dict[str, Callable[[], Any]]) -> dict[str, Any]:
        """What the GPU supports of ``readings``; ``failed`` where it is lost."""
        gpu: dict[str, Any] = {**self._names[number]}
        for name, read in readings.items():
            try:
                gpu[name] = read()
            except self._nv.NVMLError as error:
                if error.value in (_GPU_IS_LOST, _RESET_REQUIRED):
                    gpu["failed"] = {"code": error.value, "text": _text(error)}
                    break
        return gpu

    def _figures(self, handle: Any) -> dict[str, Callable[[], Any]]:
        nv = self._nv
        return {
            "memory": lambda: _memory(nv.nvmlDeviceGetMemoryInfo(handle)),
            "util_percent": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu,
            "temperature_c": lambda: nv.nvmlDeviceGetTemperature(handle, nv.NVML_TEMPERATURE_GPU),
            "power_w": lambda: nv.nvmlDeviceGetPowerUsage(handle) / 1000.0,
            "clocks_reasons": lambda: nv.nvmlDeviceGetCurrentClocksEventReasons(handle),
            "ecc_corrected": lambda: self._ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": lambda: self._ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
            "recovery_action": lambda: self._recovery(handle),
            "processes": lambda: self._processes(handle),
        }

    def _conditions(self, handle: Any) -> dict[str, Callable[[], Any]]:
        nv = self._nv
        clocks = {"graphics": nv.NVML_CLOCK_GRAPHICS, "sm": nv.NVML_CLOCK_SM, "memory": nv.NVML_CLOCK_MEM}
        rows = ("correctable", "uncorrectable", "pending", "failed")
        lifetime = nv.NVML_AGGREGATE_ECC
        return {
            **self._figures(handle),
            # Graphics processes hold memory on a desktop and are nobody's intruders, so they are left out.
            "compute_pids": lambda: [pid for pid, _ in self._processes(handle, ("Compute", "MPSCompute"))],
            "vbios": lambda: _str(nv.nvmlDeviceGetVbiosVersion(handle)),
            "power_limit_w": lambda: nv.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000.0,
            "clocks_mhz": lambda: {name: nv.nvmlDeviceGetClockInfo(handle, one) for name, one in clocks.items()},
            "performance_state": lambda: nv.nvmlDeviceGetPerformanceState(handle),
            "persistence_mode": lambda: bool(nv.nvmlDeviceGetPersistenceMode(handle)),
            "pcie_generation": lambda: nv.nvmlDeviceGetCurrPcieLinkGeneration(handle),
            "pcie_width": lambda: nv.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "ecc_lifetime_corrected": lambda: self._ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_CORRECTED, lifetime),
            "ecc_lifetime_uncorrected": lambda: self._ecc(handle, nv.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, lifetime),
            "remapped_rows": lambda: dict(zip(rows, nv.nvmlDeviceGetRemappedRows(handle), strict=True)),
        }

    def _ecc(self, handle: Any, kind: int, counter: int | None = None) -> int:
        """Errors since the driver was loaded, or of ``counter``."""
        since = self._nv.NVML_VOLATILE_ECC if counter is None else counter
        return self._nv.nvmlDeviceGetTotalEccErrors(handle, kind, since)

    def _recovery(self, handle: Any) -> int | None:
        (value,) = self._nv.nvmlDeviceGetFieldValues(handle, [_RECOVERY_FIELD])
        return int(value.value.uiVal) if value.nvmlReturn == 0 else None

    def _processes(
        self, handle: Any, kinds: tuple[str, ...] = ("Compute", "Graphics", "MPSCompute")
    ) -> list[tuple[int, int | None]]:
        """(pid, bytes or None) of everything that NVML says holds memory; a pid may be in several lists."""
        held: dict[int, int | None] = {}
        for name in kinds:
            for row in getattr(self._nv, f"nvmlDeviceGet{name}RunningProcesses")(handle):
                known = held.get(row.pid)
                held[row.pid] = row.usedGpuMemory if known is None else max(known, row.usedGpuMemory or 0)
        return list(held.items())

    def _value(self, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except self._nv.NVMLError:
            return None


def short_pci(text: str | None) -> str | None:
    """NVML's ``00000000:C1:00.0`` in the kernel log's shape, ``0000:c1:00``: domain, bus, device."""
    if not text:
        return None
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}"


def _memory(info: Any) -> list[int]:
    return [info.used, info.total]


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value


def _str(text: str | bytes) -> str:
    return text.decode("utf-8", "replace") if isinstance(text, bytes) else text


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end_with(parent: int) -> None:
    """End this process as soon as the parent is gone, also while NVML hangs (ctypes calls let other threads run)."""
    try:
        fd = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)
    except OSError:
        return  # an old kernel: the end of the input has to do
    if os.getppid() == parent:
        select.select([fd], [], [])
    os._exit(0)


def _answer(nvml: _Nvml | None, request: dict[str, Any]) -> tuple[_Nvml | None, dict[str, Any]]:
    try:
        if request["op"] == "open":
            nvml = _Nvml()
            return nvml, {"ok": nvml.open()}
        if nvml is None:
            return None, {"absent": "NVML was not opened"}
        return nvml, {"ok": nvml.state() if request["op"] == "state" else nvml.poll()}
    except ImportError as error:
        return None, {"absent": f"the Python binding of NVML cannot be loaded: {error}"}
    except Exception as error:
        if not type(error).__name__.startswith("NVML"):
            raise
        return nvml, {"absent": _text(error)} if request["op"] == "open" else {"failed": _text(error)}


def main() -> int:
    """Answer requests until the input ends."""
    threading.Thread(target=_end_with, args=(int(sys.argv[1]),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints is not an answer
    nvml: _Nvml | None = None
    for line in sys.stdin.buffer:
        request = json.loads(line)
        nvml, answer = _answer(nvml, request)
        try:
            out.write(json.dumps({"id": request["id"], **answer}).encode() + b"\n")
            out.flush()
        except BrokenPipeError:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
