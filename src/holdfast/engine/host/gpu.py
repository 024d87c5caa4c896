"""Ask NVIDIA's driver about GPUs through NVML (the optional package nvidia-ml-py).

Runs in a process of its own: a driver in trouble hangs or crashes its callers. A GPU that does not
know an answer (older, virtual, or split by MIG) gives None for it; a lost one gives an error. The
library is an argument, so that tests bring their own.
"""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

from holdfast.engine.host.checks_gpu import GpuReport, GpuSample, bus_name

GPUS_MAX = 64
EVENTS_MAX = 64  # read at one look
XIDS_MAX = 64  # remembered of each GPU
XID_AGE_S = 1800.0  # for so long: an error is over when the GPU was reset and works again


class GpuReader:
    """Asks the driver about all GPUs: `open`, then `read` as often as wanted."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._handles: list[Any] = []
        self._buses: list[str] = []
        self._event_set: list[Any] = []  # none or one
        self._xids: dict[str, tuple[tuple[float, int], ...]] = {}  # by bus: when, which

    def open(self) -> str:
        """Open the library; returns why there are no GPUs to ask, or an empty text."""
        nvml = self._nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            return f"NVML: {error}"
        for index in range(min(count, GPUS_MAX)):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
            except nvml.NVMLError as error:
                handle = error  # lost before we came
            self._handles.append(handle)
            self._buses.append("" if isinstance(handle, Exception) else self._bus(handle))
        self._watch_events()
        return ""

    def read(self, present: int, now: float) -> GpuReport:
        """Take one look at all GPUs. `present`: how many the PCI bus shows."""
        self._read_events(now)
        driver = self._tell(self._nvml.nvmlSystemGetDriverVersion)
        return GpuReport(
            driver=_text(driver),
            present=present,
            gpus=tuple(self._look(index) for index in range(len(self._handles))),
        )

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            for event_set in self._event_set:
                self._nvml.nvmlEventSetFree(event_set)
            self._nvml.nvmlShutdown()
        self._event_set = []

    def _look(self, index: int) -> GpuSample:
        handle, bus = self._handles[index], self._buses[index]
        if isinstance(handle, Exception):
            return GpuSample(index=index, lost=f"the driver says: {handle}")
        try:
            return self._ask(index, handle, bus)
        except self._nvml.NVMLError as error:
            return GpuSample(index=index, bus=bus, lost=f"the driver says: {error}")

    def _ask(self, index: int, handle: Any, bus: str) -> GpuSample:
        nvml, tell = self._nvml, self._tell
        ecc, volatile = nvml.nvmlDeviceGetTotalEccErrors, nvml.NVML_VOLATILE_ECC
        slow = nvml.nvmlDeviceGetTemperatureThreshold
        rows = tell(nvml.nvmlDeviceGetRemappedRows, handle)
        pages = tell(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
        memory = tell(nvml.nvmlDeviceGetMemoryInfo, handle)
        return GpuSample(
            index=index,
            bus=bus,
            name=_text(tell(nvml.nvmlDeviceGetName, handle)),
            recovery=self._recovery(handle),
            temperature_c=tell(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            slowdown_c=tell(slow, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
            clock_reasons=self._clock_reasons(handle),
            uncorrected=tell(ecc, handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, volatile),
            corrected=tell(ecc, handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, volatile),
            remap_pending=bool(rows[2]) if rows is not None else None,
            remap_failed=bool(rows[3]) if rows is not None else None,
            retire_pending=bool(pages) if pages is not None else None,
            performance_state=tell(nvml.nvmlDeviceGetPerformanceState, handle),
            pcie_generation=tell(nvml.nvmlDeviceGetCurrPcieLinkGeneration, handle),
            pcie_generation_max=tell(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
            pcie_width=tell(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            pcie_width_max=tell(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            memory_used_bytes=int(memory.used) if memory is not None else None,
            xids=tuple(x for _, x in self._xids.get(bus, ())) if self._event_set else None,
        )

    def _tell(self, call: Callable[..., Any], *args: Any) -> Any:
        """Ask; None when this GPU or driver has no answer, NVMLError when the GPU is lost."""
        nvml = self._nvml
        try:
            return call(*args)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED):
                raise
            return None

    def _bus(self, handle: Any) -> str:
        try:
            info = self._tell(self._nvml.nvmlDeviceGetPciInfo, handle)
        except self._nvml.NVMLError:
            return ""
        return "" if info is None else bus_name(_text(info.busId))

    def _clock_reasons(self, handle: Any) -> int | None:
        """Ask why clocks are low; older releases know the same bits as throttle reasons."""
        for name in (
            "nvmlDeviceGetCurrentClocksEventReasons",
            "nvmlDeviceGetCurrentClocksThrottleReasons",
        ):
            call = getattr(self._nvml, name, None)
            reasons = self._tell(call, handle) if call is not None else None
            if reasons is not None:
                return int(reasons)
        return None

    def _recovery(self, handle: Any) -> int | None:
        """Ask what the driver wants to be done; only newer drivers know."""
        field = getattr(self._nvml, "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION", None)
        if field is None:
            return None
        values = self._tell(self._nvml.nvmlDeviceGetFieldValues, handle, [field])
        if values is None or values[0].nvmlReturn != self._nvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def _watch_events(self) -> None:
        """Ask the driver to keep Xid errors from now on; where it will not, they stay None."""
        nvml = self._nvml
        try:
            event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return
        watched = 0
        for handle in self._handles:
            if isinstance(handle, Exception):
                continue
            try:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, event_set)
                watched += 1
            except nvml.NVMLError:
                continue
        if watched:
            self._event_set = [event_set]
        else:
            nvml.nvmlEventSetFree(event_set)

    def _read_events(self, now: float) -> None:
        """Read Xids without waiting. An event has a handle of its own: ask for its bus."""
        nvml = self._nvml
        for bus, known in self._xids.items():
            self._xids[bus] = tuple((t, x) for t, x in known if now - t < XID_AGE_S)
        for event_set in self._event_set:
            for _ in range(EVENTS_MAX):
                try:
                    event = nvml.nvmlEventSetWait_v2(event_set, 0)
                except nvml.NVMLError:
                    break  # a time-out: there was no event
                if event.eventType & nvml.nvmlEventTypeXidCriticalError:
                    bus = self._bus(event.device)
                    known = self._xids.get(bus, ())
                    self._xids[bus] = (*known, (now, int(event.eventData)))[-XIDS_MAX:]


def _text(value: Any) -> str:
    if isinstance(value, bytes):  # older releases of the library
        return value.decode(errors="replace")
    return "" if value is None else str(value)


def load_nvml() -> ModuleType | str:
    """Return the library, or why there is none."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return "nvidia-ml-py is not installed (pip install 'holdfast[gpu]')"


def gpu_looker(
    present: int, nvml: Any = None, clock: Callable[[], float] = time.monotonic
) -> Callable[[], GpuReport]:
    """Make a function for one look after another; without a driver it reports that each time."""
    library = load_nvml() if nvml is None else nvml
    if isinstance(library, str):
        return lambda: GpuReport(missing=library, present=present)
    reader = GpuReader(library)
    missing = reader.open()
    if missing:
        return lambda: GpuReport(missing=missing, present=present)
    return lambda: reader.read(present, clock())
