"""Every branch of the verdict on a GPU, through a fake NVML that is compared with the real one."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import replace
from typing import Any

import pytest

from fake_nvml import FakeNvml, Gpu, names_used
from holdfast.engine.host import checks_gpu
from holdfast.engine.host import gpu as gpu_module
from holdfast.engine.host.checks_gpu import (
    GpuReport,
    GpuSample,
    bus_name,
    judge_all_gpus,
    judge_gpu_change,
    judge_gpu_count,
    with_logged_xids,
)
from holdfast.engine.host.checks_trials import KernelLogSample
from holdfast.engine.host.findings import Finding, Grade, Limits
from holdfast.engine.host.gpu import XID_AGE_S, GpuReader, gpu_looker

LIMITS = Limits()
LOST = FakeNvml.NVML_ERROR_GPU_IS_LOST


def look(nvml: FakeNvml, present: int = 0) -> GpuReport:
    return gpu_looker(present, nvml)()


def judged(gpu: Gpu, *, before_job: bool = True) -> dict[str, Finding]:
    report = look(FakeNvml([gpu]))
    return {f.check: f for f in judge_all_gpus(report, LIMITS, before_job=before_job)}


def test_a_healthy_gpu_is_well_in_every_check() -> None:
    found = judged(Gpu())
    assert {f.grade for f in found.values()} == {Grade.OK}
    assert all(f.subject == "GPU 0" for f in found.values())
    assert sorted(found) == [
        "gpu",
        "gpu-clocks",
        "gpu-ecc",
        "gpu-memory",
        "gpu-pcie",
        "gpu-rows",
        "gpu-temperature",
        "gpu-xid",
    ]


OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED
CASES = [
    ("gpu", Gpu(recovery=1), FAIL, "recovery"),
    ("gpu", Gpu(recovery=99), FAIL, "recovery"),
    ("gpu", Gpu(recovery=None), OK, "answers"),
    ("gpu", Gpu(lost=LOST), FAIL, "lost"),
    ("gpu", Gpu(lost=FakeNvml.NVML_ERROR_RESET_REQUIRED), FAIL, "says"),
    ("gpu", Gpu(gone=LOST), FAIL, "lost"),
    ("gpu-ecc", Gpu(uncorrected=1), FAIL, "1 uncorrected"),
    ("gpu-ecc", Gpu(corrected=LIMITS.gpu_corrected), OK, "100 corrected"),
    ("gpu-ecc", Gpu(corrected=LIMITS.gpu_corrected + 1), WARN, "101 corrected"),
    ("gpu-ecc", Gpu(uncorrected=None), SKIPPED, "does not tell"),
    ("gpu-rows", Gpu(rows=(1, 1, 0, 0)), OK, "no row"),
    ("gpu-rows", Gpu(rows=(0, 1, 1, 0)), WARN, "row to be remapped"),
    ("gpu-rows", Gpu(rows=(0, 1, 1, 1)), FAIL, "no spare rows"),
    ("gpu-rows", Gpu(rows=None, pages_pending=1), WARN, "page to be retired"),
    ("gpu-rows", Gpu(rows=None, pages_pending=0), OK, "no row"),
    ("gpu-rows", Gpu(rows=None), SKIPPED, "does not tell"),
    ("gpu-temperature", Gpu(temperature=81), OK, "81 C"),
    ("gpu-temperature", Gpu(temperature=82), WARN, "82 C"),
    ("gpu-temperature", Gpu(temperature=84, slowdown=None), OK, "84 C"),
    ("gpu-temperature", Gpu(temperature=85, slowdown=None), WARN, "85 C"),
    ("gpu-temperature", Gpu(temperature=None), SKIPPED, "does not tell"),
    ("gpu-clocks", Gpu(reasons=0x4), OK, "not slowed"),  # the power cap is ordinary under load
    ("gpu-clocks", Gpu(reasons=0x8), WARN, "hardware slows"),
    ("gpu-clocks", Gpu(reasons=0x48), WARN, "heat"),
    ("gpu-clocks", Gpu(reasons=0x88), WARN, "power brake"),
    ("gpu-clocks", Gpu(reasons=0x20), WARN, "driver slows"),
    ("gpu-clocks", Gpu(reasons=None), SKIPPED, "does not tell"),
    ("gpu-pcie", Gpu(width=(8, 16)), WARN, "x8"),
    ("gpu-pcie", Gpu(generation=(3, 5)), WARN, "generation 3"),
    ("gpu-pcie", Gpu(generation=(1, 5), state=8), OK, "generation 1"),  # it is resting
    ("gpu-pcie", Gpu(width=None), SKIPPED, "does not tell"),
    ("gpu-memory", Gpu(used=LIMITS.gpu_memory_used_bytes), OK, "2.0 GiB"),
    ("gpu-memory", Gpu(used=LIMITS.gpu_memory_used_bytes + 1), WARN, "in use"),
    ("gpu-memory", Gpu(used=None), SKIPPED, "does not tell"),
    ("gpu-xid", Gpu(events=False), SKIPPED, "does not tell"),
]


@pytest.mark.parametrize(("check", "gpu", "grade", "words"), CASES)
def test_a_branch_of_the_verdict(check: str, gpu: Gpu, grade: Grade, words: str) -> None:
    found = judged(gpu)[check]
    assert found.grade is grade
    assert words in found.reason
    assert bool(found.advice) == (grade in (WARN, FAIL))


def test_a_lost_gpu_is_one_finding_and_the_others_are_still_asked() -> None:
    report = look(FakeNvml([Gpu(), Gpu(lost=LOST), Gpu(gone=LOST), Gpu()]))
    found = judge_all_gpus(report, LIMITS, before_job=False)
    assert [f.subject for f in found if f.grade is FAIL] == ["GPU 1", "GPU 2"]
    assert [f.check for f in found if f.subject == "GPU 1"] == ["gpu"]
    assert sum(f.subject == "GPU 3" for f in found) == 7


def test_memory_in_use_only_matters_before_a_job() -> None:
    assert "gpu-memory" not in judged(Gpu(used=70 << 30), before_job=False)


@pytest.mark.parametrize(
    ("xid", "grade"),
    [(79, FAIL), (48, FAIL), (119, FAIL), (63, WARN), (94, WARN), (13, OK), (43, OK), (777, WARN)],
)
def test_xids_that_the_driver_reports(xid: int, grade: Grade) -> None:
    gpu = Gpu()
    nvml = FakeNvml([gpu], xids=[(gpu, xid)])
    found = {f.check: f for f in judge_all_gpus(look(nvml), LIMITS, before_job=False)}
    assert found["gpu-xid"].grade is grade
    assert nvml.xids == []


def test_xids_are_kept_for_a_while_by_gpu_and_a_fatal_one_is_named_first() -> None:
    one, two = Gpu(), Gpu(bus="00000000:5E:00.0")
    nvml = FakeNvml([one, two], xids=[(two, 79), (two, 63), (two, 43)])
    reader = GpuReader(nvml)
    assert reader.open() == ""
    assert [gpu.xids for gpu in reader.read(2, 100.0).gpus] == [(), (79, 63, 43)]
    nvml.xids.append((one, 94))
    later = reader.read(2, 99.0 + XID_AGE_S)
    assert [gpu.xids for gpu in later.gpus] == [(94,), (79, 63, 43)]
    found = [f for f in judge_all_gpus(later, LIMITS, before_job=False) if f.check == "gpu-xid"]
    assert [f.value for f in found] == [94, 79]
    gone = reader.read(2, 100.0 + XID_AGE_S)
    assert [gpu.xids for gpu in gone.gpus] == [(94,), ()]
    reader.close()
    assert nvml.opened == 0


def test_xids_from_the_kernels_log_go_to_their_gpu() -> None:
    report = look(FakeNvml([Gpu(), Gpu(bus="00000000:5E:00.0")]))
    log = KernelLogSample(xids=(("0000:5e:00", 79), ("0000:99:00", 48)))
    logged = with_logged_xids(report, log)
    assert [gpu.xids for gpu in logged.gpus] == [(), (79,)]
    unreadable = with_logged_xids(report, KernelLogSample(unreadable="no permission"))
    assert [gpu.xids for gpu in unreadable.gpus] == [None, None]
    assert bus_name("00000000:3B:00.0") == bus_name("0000:3b:00") == "0000:3b:00"


def test_an_old_library_and_driver() -> None:
    report = look(FakeNvml([Gpu(reasons=0x40)], old=True))
    assert report.gpus[0].clock_reasons == 0x40
    assert report.gpus[0].recovery is None


def test_a_missing_driver_or_gpu_skips_the_check_and_warns_if_gpus_are_on_the_bus() -> None:
    nvml = FakeNvml(init_error=FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED)
    absent = judge_all_gpus(look(nvml, present=0), LIMITS, before_job=True)
    assert [f.grade for f in absent] == [SKIPPED]
    assert "Driver Not Loaded" in absent[0].reason
    broken = judge_all_gpus(look(nvml, present=8), LIMITS, before_job=True)
    assert [f.grade for f in broken] == [WARN]
    assert "8 on the PCI bus" in broken[0].reason
    assert [f.grade for f in judge_all_gpus(look(FakeNvml()), LIMITS, before_job=True)] == [SKIPPED]


def test_a_missing_python_package_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_module, "load_nvml", lambda: "it is not installed")
    assert gpu_looker(0)().missing == "it is not installed"


def test_corrected_errors_that_grow_and_gpus_that_go() -> None:
    before = GpuSample(index=3, corrected=5)
    grown, same = (
        judge_gpu_change(before, replace(before, corrected=6)),
        judge_gpu_change(before, before),
    )
    assert [f.grade for f in (*grown, *same)] == [WARN, OK]
    assert grown[0].subject == "GPU 3"
    assert judge_gpu_change(GpuSample(index=3), before) == []
    assert judge_gpu_count(7, 8).grade is FAIL
    assert judge_gpu_count(8, 8).grade is OK


def test_bytes_from_an_older_library_are_text() -> None:
    nvml = FakeNvml([Gpu(name=b"Tesla V100", bus=b"00000000:3B:00.0")])  # type: ignore[arg-type]
    assert look(nvml).gpus[0].name == "Tesla V100"
    assert look(nvml).gpus[0].bus == "0000:3b:00"


def real() -> Any:
    return pytest.importorskip("pynvml")


@pytest.mark.parametrize("name", names_used())
def test_the_fake_has_the_shape_of_the_real_library(name: str) -> None:
    ours, theirs = getattr(FakeNvml, name), getattr(real(), name)
    if callable(ours) and not isinstance(ours, type):
        mine = list(inspect.signature(ours).parameters)[1:]
        needed = [p for p in inspect.signature(theirs).parameters.values() if p.default is p.empty]
        assert len(mine) == len(needed)
    elif isinstance(ours, type):
        assert issubclass(theirs, Exception)
        assert theirs(3).value == 3
    else:
        assert ours == theirs


def test_bits_and_actions_are_those_of_the_real_library() -> None:
    nvml = real()
    assert nvml.nvmlClocksEventReasonHwSlowdown == checks_gpu.HW_SLOWDOWN
    assert nvml.nvmlClocksEventReasonSwThermalSlowdown == checks_gpu.SW_THERMAL
    assert nvml.nvmlClocksEventReasonHwThermalSlowdown == checks_gpu.HW_THERMAL
    assert nvml.nvmlClocksEventReasonHwPowerBrakeSlowdown == checks_gpu.POWER_BRAKE
    actions = {
        getattr(nvml, name) for name in dir(nvml) if name.startswith("NVML_GPU_RECOVERY_ACTION_")
    }
    assert actions == {0, *checks_gpu.RECOVERY}
    value = nvml.c_nvmlFieldValue_t()
    assert hasattr(value, "nvmlReturn")
    assert hasattr(value.value, "uiVal")
    event = nvml.c_nvmlEventData_t()
    assert all(hasattr(event, name) for name in ("device", "eventType", "eventData"))
    assert hasattr(nvml.nvmlPciInfo_t(), "busId")
    assert hasattr(nvml.c_nvmlMemory_t(), "used")


def test_this_machine_answers_or_says_why() -> None:
    """The real library, if there is one, examines this machine."""
    if importlib.util.find_spec("pynvml") is None:
        pytest.skip("nvidia-ml-py is not installed")
    report = gpu_looker(0)()
    assert report.gpus or report.missing
