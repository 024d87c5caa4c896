"""Stands in for pynvml (nvidia-ml-py): the same names, calls, structures and exceptions.

`FakeNvml(gpus)` is the module. A `Gpu` that has None for something raises NotSupported for it, as
older, virtual and MIG-split GPUs do. test_gpu_health.py compares all this with the real module.
"""

# ruff: noqa: N802, N815 -- the names are those of the library

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    def __init__(self, value: int, text: str = "") -> None:
        super().__init__(text or f"NVML error {value}")
        self.value = value


@dataclass
class Gpu:
    """Is one healthy data-centre GPU, unless a test changes it."""

    bus: str = "00000000:3B:00.0"
    name: str = "NVIDIA H100 80GB HBM3"
    temperature: int | None = 41
    slowdown: int | None = 87
    reasons: int | None = 0x1  # idle
    uncorrected: int | None = 0
    corrected: int | None = 0
    rows: tuple[int, int, int, int] | None = (0, 0, 0, 0)
    pages_pending: int | None = None  # only GPUs before Ampere retire pages
    state: int | None = 0
    generation: tuple[int, int] | None = (5, 5)
    width: tuple[int, int] | None = (16, 16)
    used: int | None = 500 << 20
    recovery: int | None = 0
    lost: int = 0  # the error that every question gets
    gone: int = 0  # the error that asking for its handle gets
    events: bool = True


@dataclass
class FakeNvml:
    gpus: list[Gpu] = field(default_factory=list)
    init_error: int = 0
    old: bool = False  # a library and driver from before clock event reasons and recovery actions
    xids: list[tuple[Gpu, int]] = field(default_factory=list)  # events that wait to be read
    opened: int = 0

    NVMLError = NVMLError
    NVML_SUCCESS = 0
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_DRIVER_NOT_LOADED = 9
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_LIBRARY_NOT_FOUND = 12
    NVML_ERROR_GPU_IS_LOST = 15
    NVML_ERROR_RESET_REQUIRED = 16
    NVML_ERROR_UNKNOWN = 999
    NVML_TEMPERATURE_GPU = 0
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1
    NVML_MEMORY_ERROR_TYPE_CORRECTED = 0
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
    NVML_VOLATILE_ECC = 0
    NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
    nvmlEventTypeXidCriticalError = 0x8

    def __getattribute__(self, name: str) -> Any:
        newer = ("nvmlDeviceGetCurrentClocksEventReasons", "NVML_FI_DEV_GET_GPU_RECOVERY_ACTION")
        if name in newer and object.__getattribute__(self, "old"):
            raise AttributeError(name)
        return object.__getattribute__(self, name)

    def nvmlInit(self) -> None:
        if self.init_error:
            raise NVMLError(self.init_error, "Driver Not Loaded")
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return "570.86.15"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        if self.gpus[index].gone:
            raise NVMLError(self.gpus[index].gone, "GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetPciInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(busId=self._told(gpu, gpu.bus))

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return self._told(gpu, gpu.name)

    def nvmlDeviceGetTemperature(self, gpu: Gpu, sensor: int) -> int:
        assert sensor == self.NVML_TEMPERATURE_GPU
        return self._told(gpu, gpu.temperature)

    def nvmlDeviceGetTemperatureThreshold(self, gpu: Gpu, threshold: int) -> int:
        assert threshold == self.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return self._told(gpu, gpu.slowdown)

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.reasons)

    def nvmlDeviceGetTotalEccErrors(self, gpu: Gpu, kind: int, counter: int) -> int:
        assert counter == self.NVML_VOLATILE_ECC
        counts = {
            self.NVML_MEMORY_ERROR_TYPE_CORRECTED: gpu.corrected,
            self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED: gpu.uncorrected,
        }
        return self._told(gpu, counts[kind])

    def nvmlDeviceGetRemappedRows(self, gpu: Gpu) -> tuple[int, int, int, int]:
        return self._told(gpu, gpu.rows)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.pages_pending)

    def nvmlDeviceGetPerformanceState(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.state)

    def nvmlDeviceGetCurrPcieLinkGeneration(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.generation)[0]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.generation)[1]

    def nvmlDeviceGetCurrPcieLinkWidth(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.width)[0]

    def nvmlDeviceGetMaxPcieLinkWidth(self, gpu: Gpu) -> int:
        return self._told(gpu, gpu.width)[1]

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:
        return SimpleNamespace(used=self._told(gpu, gpu.used))

    def nvmlDeviceGetFieldValues(self, gpu: Gpu, fields: list[int]) -> list[Any]:
        """Answer like the real one: mark unsupported values, raise no error."""
        assert fields == [230]
        self._told(gpu, 0)
        code = self.NVML_SUCCESS if gpu.recovery is not None else self.NVML_ERROR_NOT_SUPPORTED
        return [SimpleNamespace(nvmlReturn=code, value=SimpleNamespace(uiVal=gpu.recovery))]

    def nvmlEventSetCreate(self) -> list[Gpu]:
        return []

    def nvmlDeviceRegisterEvents(self, gpu: Gpu, types: int, event_set: list[Gpu]) -> None:
        assert types == self.nvmlEventTypeXidCriticalError
        if not gpu.events:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED, "Not Supported")
        event_set.append(gpu)

    def nvmlEventSetWait_v2(self, event_set: list[Gpu], timeoutms: int) -> Any:
        assert timeoutms == 0, "this call must not wait"
        for number, (gpu, xid) in enumerate(self.xids):
            if gpu in event_set:
                del self.xids[number]
                kind = self.nvmlEventTypeXidCriticalError
                return SimpleNamespace(device=gpu, eventType=kind, eventData=xid)
        raise NVMLError(self.NVML_ERROR_TIMEOUT, "Timeout")

    def nvmlEventSetFree(self, event_set: list[Gpu]) -> None:
        event_set.clear()

    def _told(self, gpu: Gpu, answer: Any) -> Any:
        if gpu.lost:
            raise NVMLError(gpu.lost, "GPU is lost")
        if answer is None:
            raise NVMLError(self.NVML_ERROR_NOT_SUPPORTED, "Not Supported")
        return answer


def names_used() -> list[str]:
    """Return the names in the real module for which the fake stands."""
    own = {f.name for f in dataclasses.fields(FakeNvml)}
    return [n for n in dir(FakeNvml) if n.upper().startswith("NVML") and n not in own]
