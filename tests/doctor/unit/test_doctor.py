"""`holdfast doctor`: measuring, in bounds, and reporting; no test depends on our speed."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conftest import RUN_S
from health_kit import CALM
from holdfast.cli.main import main
from holdfast.doctor import doctor_command as cli
from holdfast.doctor import examination as doctor
from holdfast.engine.host.bounded import ChildAnswer
from holdfast.engine.host.checks_gpu import GpuReport, GpuSample
from holdfast.engine.host.checks_peers import PeerSample, Report
from holdfast.engine.host.checks_trials import (
    ArithmeticSample,
    DiskSample,
    KernelLogSample,
    MemorySpeedSample,
    TorchLine,
)
from holdfast.engine.host.findings import GIB, Finding, Grade
from holdfast.engine.host.host import HostReader

HOLDFAST = [sys.executable, "-m", "holdfast.cli.main"]
OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED
FACTS = {"torch": "2.13.0", "cuda": "13.0", "cudnn": "9", "nccl": "2.28", "gloo": "yes"}
GPUS = tuple(
    GpuSample(index=n, bus=f"0000:0{n}:00", name="H100", temperature_c=40) for n in range(2)
)
TORCH = (
    TorchLine(facts=FACTS, trying="processors (torch)"),
    TorchLine(run=ArithmeticSample(device="processors (torch)", repeats=5, wrong=0)),
    TorchLine(run=ArithmeticSample(device="GPU 0", repeats=5, wrong=0, operations_per_s=9e14)),
    TorchLine(run=ArithmeticSample(device="GPU 1", repeats=5, wrong=0, operations_per_s=8e14)),
)
WELL: dict[str, tuple[Any, ...]] = {
    "arithmetic": (ArithmeticSample(device="numpy", repeats=5, wrong=0, operations_per_s=5e10),),
    "memory": (MemorySpeedSample(copied_per_s=1e10, tested_bytes=1 << 20, wrong_bytes=0),),
    "disk": (DiskSample(directory="/d", free_bytes=100 * GIB, sync_s=0.001, write_per_s=1e9),),
    "kernel-log": (KernelLogSample(),),
    "gpu": (GpuReport(driver="570", present=2, gpus=GPUS),),
    "torch": TORCH,
    "peer": (PeerSample(peer="b:1", round_trip_s=0.001, sent_per_s=1e9, received_per_s=1e9),),
}


def answer(*samples: Any, failure: str = "", hung: bool = False) -> ChildAnswer:
    lines = tuple(msgspec.json.encode(sample) for sample in samples)
    return ChildAnswer(lines=lines, failure=failure, hung=hung)


class Fake:
    """Stands for all measurements: well, unless said otherwise."""

    def __init__(self, **changes: ChildAnswer) -> None:
        self.answers = {name: answer(*samples) for name, samples in WELL.items()}
        self.answers |= {name.replace("_", "-"): value for name, value in changes.items()}
        self.asked: list[str] = []

    def __call__(self, name: str, arguments: dict[str, Any], limit_s: float) -> ChildAnswer:
        msgspec.json.encode(arguments)  # they cross a process boundary
        assert limit_s > 0
        self.asked.append(name)
        return self.answers[name]


def examined(fake: Fake, **wanted: Any) -> Report:
    examination = doctor.Examination(directory="/d", version="0.1.0", **wanted)
    steps: list[tuple[int, int, str]] = []
    who = doctor.Doctor(examination, CALM, HostReader(), fake)
    report = who.examine(lambda *step: steps.append(step))
    assert [done for done, _, _ in steps] == list(range(steps[0][1] + 1))
    return report


def graded(report: Report, check: str) -> set[Grade]:
    return {f.grade for f in report.findings if f.check == check}


# ---------------------------------------------------------------- the examination


def test_a_healthy_machine() -> None:
    fake = Fake()
    report = examined(fake, peers=(("b", 1),), secret=b"x" * 32)
    assert fake.asked == ["arithmetic", "memory", "disk", "kernel-log", "gpu", "torch", "peer"]
    ours = ("arithmetic", "memory-pattern", "disk", "disk-write", "gpu", "gpu-xid", "peer", "clock")
    for check in (*ours, "gpu-speed", "versions", "network-send"):
        assert graded(report, check) == {OK}, check
    assert report.facts["gpus"] == "2 x H100"
    assert report.facts["nccl"] == "2.28"
    assert report.facts["driver"] == "570"
    assert report.speeds["arithmetic-gpu"] == 8e14, "a job waits for the slowest"
    assert report.speeds["disk-syncs"] == 1000.0


def test_the_quick_examination_leaves_out_what_takes_long() -> None:
    fake = Fake()
    examined(fake, pace=doctor.QUICK)
    assert fake.asked == ["arithmetic", "disk", "kernel-log", "gpu"]


HUNG = answer(failure="no answer in 15 s", hung=True)
BROKEN = answer(failure="ImportError: numpy")
HANGS = [
    ("arithmetic", "arithmetic"),
    ("memory", "memory-pattern"),
    ("disk", "disk"),
    ("kernel_log", "kernel-log"),
    ("gpu", "gpu-driver"),
    ("torch", "torch"),
    ("peer", "peer"),
]


@pytest.mark.parametrize(("measurement", "check"), HANGS)
def test_a_measurement_that_hangs_is_a_finding_and_the_rest_goes_on(
    measurement: str, check: str
) -> None:
    report = examined(Fake(**{measurement: HUNG}), peers=(("b", 1),))
    assert FAIL in graded(report, check)
    assert report.verdict.startswith("NOT FIT")
    assert {f.check for f in report.findings if f.grade is FAIL} == {check}
    assert graded(report, "cpu-limit"), "the rest was looked at"


@pytest.mark.parametrize(("measurement", "check"), [h for h in HANGS if h[0] != "torch"])
def test_a_measurement_that_breaks_or_lies_is_a_warning(measurement: str, check: str) -> None:
    for broken in (BROKEN, ChildAnswer(lines=(b"not json",)), ChildAnswer(lines=(b"[7]",))):
        report = examined(Fake(**{measurement: broken}), peers=(("b", 1),))
        assert WARN in graded(report, check)
        assert FAIL not in {f.grade for f in report.findings}


def test_a_gpu_that_hangs_torch_is_named() -> None:
    told = TorchLine(facts=FACTS, trying="processors (torch)"), TorchLine(trying="GPU 5")
    report = examined(Fake(torch=answer(*told, failure="no answer in 60 s", hung=True)))
    assert [f.subject for f in report.findings if f.grade is FAIL] == ["GPU 5"]
    assert report.facts["nccl"] == "2.28", "what it said before counts"


def test_torch_that_cannot_be_used_and_a_gpu_that_cannot_compute() -> None:
    broken = examined(Fake(torch=answer(failure="ImportError: libcudart.so.13")))
    assert graded(broken, "torch") == {FAIL}
    run = ArithmeticSample(device="GPU 1", repeats=0, wrong=0, failure="CUDA error: ECC")
    report = examined(Fake(torch=answer(*TORCH[:3], TorchLine(run=run))))
    failed = [f for f in report.findings if f.grade is FAIL]
    assert [(f.check, f.subject) for f in failed] == [("arithmetic", "GPU 1")]
    assert report.speeds["arithmetic-gpu"] == 9e14


def test_wrong_sums_and_slow_gpus_are_found() -> None:
    lines = list(TORCH)
    lines[2] = TorchLine(run=ArithmeticSample(device="GPU 0", repeats=5, wrong=2, where="row 3"))
    report = examined(Fake(torch=answer(*lines)))
    wrong = [f for f in report.findings if f.check == "arithmetic" and f.grade is FAIL]
    assert [f.subject for f in wrong] == ["GPU 0"]
    assert [f.subject for f in report.findings if f.check == "gpu-speed" and f.grade is FAIL] == [
        "GPU 0"
    ]


def test_xids_of_the_kernels_log_are_found() -> None:
    log = KernelLogSample(xids=(("0000:01:00", 79),))
    report = examined(Fake(kernel_log=answer(log)))
    assert [f.subject for f in report.findings if f.grade is FAIL] == ["GPU 1"]
    unreadable = examined(Fake(kernel_log=answer(KernelLogSample(unreadable="no"))))
    assert graded(unreadable, "gpu-xid") == {SKIPPED}


def test_data_loaders_need_shared_memory() -> None:
    report = examined(Fake(), shared_need_bytes=1 << 60)
    assert graded(report, "shared-memory") == {FAIL}


def test_a_machine_against_itself_and_against_a_faster_one() -> None:
    plain = examined(Fake())
    data = json.dumps(doctor.to_plain(plain)).encode()
    other = doctor.read_report(data)
    assert other == plain
    same = examined(Fake(), against=(other,))
    assert {f.grade for f in same.findings if f.check in ("speed", "same-versions")} == {OK}
    faster = {name: 3 * speed for name, speed in plain.speeds.items()}
    facts = other.facts | {"torch": "2.12.0"}
    worse = examined(Fake(), against=(Report(host="b", facts=facts, speeds=faster),))
    assert graded(worse, "speed") == {WARN, FAIL}, "a third: disks may vary more"
    assert graded(worse, "same-torch") == {FAIL}


# ---------------------------------------------------------------- the command


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    found = Fake()
    monkeypatch.setattr(doctor, "measure", found)
    examine = functools.partial(doctor.examine, limits=CALM)
    monkeypatch.setattr(doctor, "examine", examine)
    return found


def test_the_table_ends_with_the_verdict(fake: Fake, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "gpu-temperature" in text
    assert "fit to join" in text.splitlines()[-1]
    fake.answers["disk"] = answer(DiskSample(directory="/d", failure="Input/output error"))
    assert main(["doctor", "--quick"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "NOT FIT to join: disk /d: Input/output error" in lines[-1]
    assert any(line.startswith("fail: disk /d: mend it") for line in lines)


def test_the_json_report_can_be_read_by_against(
    fake: Fake, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json"]) == 0
    text = capsys.readouterr().out
    assert json.loads(text)["findings"][0]["grade"] in ("ok", "warn")
    (tmp_path / "other.json").write_text(text)
    assert main(["doctor", "--against", str(tmp_path / "other.json")]) == 0
    assert "same-versions" in capsys.readouterr().out


def test_text_from_other_programs_cannot_draw_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    evil = Finding(check="x", grade=WARN, reason="\x1b[2J[red]boo[/red]", advice="\x07 [b]")
    cli.show(Report(host="a\nb\x1b", facts={}, speeds={}, findings=(evil,), verdict="v"))
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]boo[/red]" in text


def test_equal_rows_of_gpus_are_one_row() -> None:
    gpus = [Finding(check="gpu-ecc", subject=f"GPU {n}", grade=OK, reason=str(n)) for n in range(8)]
    bad = Finding(check="gpu-ecc", subject="GPU 8", grade=FAIL, reason="1 uncorrected")
    speeds = [Finding(check="speed", subject=str(n), grade=OK, reason=str(n)) for n in range(5)]
    rows = cli.collapse([*gpus, bad, *speeds])
    assert [row.name for row in rows] == ["gpu-ecc (8 of them)", "gpu-ecc GPU 8"] + [
        f"speed {n}" for n in range(5)
    ]


BAD = [
    (["--peer", "nowhere"], ["'nowhere'", "HOST:PORT"]),
    (["--peer", "host:99999"], ["host:99999", "HOST:PORT"]),
    (["--peer", "127.0.0.1:1"], ["--run-dir", "--secret-file"]),
    (["--peer", "127.0.0.1:1", "--secret-file", "none"], ["none", "No such file"]),
    (
        ["--peer", "127.0.0.1:1", "--secret-file", "short"],
        ["short", "holds 4 hexa", "openssl"],
    ),
    (["--peer", "127.0.0.1:1", "--run-dir", "none"], ["none", "secret"]),
    (["--against", "none"], ["none", "--json"]),
    (["--against", "short"], ["short", "not a report"]),
    (["--against", "format"], ["format", "format 99"]),
    (["--loaders", "-1"], ["--loaders -1"]),
    (["--loaders", "4"], ["--loaders", "--batch-bytes"]),
    (["--batch-bytes", "4X"], ["'4X'", "40M"]),
    (["--serve", "--for-s", "0"], ["--for-s 0"]),
    (["--watch", "--every-s", "-1"], ["--every-s -1"]),
    (["--serve", "--host", "256.0.0.1", "--secret-file", "secret"], ["256.0.0.1"]),
]


@pytest.mark.parametrize(("args", "words"), BAD)
def test_bad_options(
    args: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("short").write_text("abcd")
    Path("secret").write_text("ab" * 32)
    for name in ("short", "secret"):
        Path(name).chmod(0o600)
    Path("format").write_text('{"format": 99, "facts": {}, "speeds": {}}')
    try:
        code = main(["doctor", *args])
    except SystemExit as end:
        code = int(end.code or 0)
    text = capsys.readouterr().err
    assert code == 2
    assert "Traceback" not in text
    lines = [line for line in text.splitlines() if line.startswith("holdfast")]
    assert len(lines) == 1, text
    assert all(word in lines[0] for word in words), lines


def command(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, "doctor", *args],
        check=False,
        capture_output=True,
        text=True,
        timeout=RUN_S,
        **more,
    )


def test_a_real_quick_examination(tmp_path: Path) -> None:
    """Real children run. The verdict depends on this machine; the form of the report does not."""
    found = command("--quick", "--json", "--dir", str(tmp_path))
    report = doctor.read_report(found.stdout.encode())
    assert graded(report, "arithmetic") == {OK}
    assert graded(report, "disk") == {OK}
    assert report.speeds["arithmetic-numpy"] > 0
    assert report.facts["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found.returncode == (1 if FAIL in {f.grade for f in report.findings} else 0)
    assert found.stderr == ""
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_a_real_whole_examination(tmp_path: Path) -> None:
    found = command("--json", "--dir", str(tmp_path))
    report = doctor.read_report(found.stdout.encode())
    for check in ("arithmetic", "memory-pattern", "disk-read-back"):
        assert graded(report, check) == {OK}
    assert {"arithmetic-torch", "memory-copy", "disk-write"} <= set(report.speeds)
    assert os.listdir(tmp_path) == []


def test_a_directory_that_is_not_there_is_not_fit(tmp_path: Path) -> None:
    found = command("--quick", "--dir", str(tmp_path / "none"))
    assert found.returncode == 1
    assert "No such file or directory" in found.stdout


@pytest.mark.slow
def test_one_machine_serves_and_another_measures(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("ab" * 32)
    secret.chmod(0o600)
    serve = [*HOLDFAST, "doctor", "--serve", "--host", "127.0.0.1", "--secret-file", str(secret)]
    # The process that runs the tests may ignore this signal, as a shell's background jobs do.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(serve, stdout=subprocess.PIPE, text=True) as server:
        signal.signal(signal.SIGINT, before)
        try:
            assert server.stdout is not None
            address = server.stdout.readline().split(" on ")[1].split()[0]
            args = ("--quick", "--json", "--peer", address, "--dir", str(tmp_path))
            found = command(*args, "--secret-file", str(secret))
            report = doctor.read_report(found.stdout.encode())
            peers = [f for f in report.findings if f.check in ("peer", "clock")]
            assert [f.subject for f in peers] == [address, address]
            assert FAIL not in {f.grade for f in peers}
            (tmp_path / "other").write_text("cd" * 32)
            (tmp_path / "other").chmod(0o600)
            stranger = command(*args, "--secret-file", str(tmp_path / "other"))
            assert stranger.returncode == 1
            told = doctor.read_report(stranger.stdout.encode())
            assert graded(told, "peer") == {FAIL}
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(RUN_S) == 0


def test_watching_from_a_terminal(tmp_path: Path) -> None:
    args = ["--watch", "--json", "--every-s", "0.2", "--for-s", "0.5", "--dir", str(tmp_path)]
    found = command(*args)
    rounds = [json.loads(line) for line in found.stdout.splitlines()]
    assert rounds
    assert rounds[0].keys() == {"health", "reason", "findings"}
    assert found.returncode == 0
    assert found.stderr == ""
