"""Findings and verdicts: the limits of every check, and what a history of findings leads to."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.exact_products import NARROW, WIDE
from holdfast.engine.host import checks_host, checks_trials
from holdfast.engine.host.checks_host import (
    AllowanceSample,
    CpuSample,
    HostSample,
    MemorySample,
    PressureSample,
)
from holdfast.engine.host.checks_peers import (
    EQUAL,
    PeerSample,
    Report,
    clock_offset,
    compare_facts,
    compare_siblings,
    compare_speeds,
    judge_peer,
    judge_versions,
)
from holdfast.engine.host.checks_trials import (
    LOG_KINDS,
    ArithmeticSample,
    DiskSample,
    KernelLogSample,
    MemorySpeedSample,
)
from holdfast.engine.host.findings import (
    GIB,
    MIB,
    REASON_MAX,
    Finding,
    Grade,
    Limits,
    grade_above,
    grade_below,
    summary,
    to_one_line,
    worst,
)

OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED
LIMITS = Limits()
MEMORY = MemorySample(total_bytes=100 * GIB, available_bytes=90 * GIB)
ALLOWED = AllowanceSample(
    open_files=65536,
    open_files_hard=None,
    processes=30000,
    shared_bytes=8 * GIB,
    shared_free_bytes=8 * GIB,
)
HOST = HostSample(
    at_s=100.0,
    memory=MEMORY,
    cpu=CpuSample(visible=8, allowed=8, ticks=1000),
    pressure=PressureSample(cpu_some=1.0, memory_full=0.0, io_full=0.0),
    allowance=ALLOWED,
)
DISK = DiskSample(
    directory="/data",
    filesystem="ext4",
    free_bytes=100 * GIB,
    inodes=0.9,
    sync_s=0.001,
    sync_max_s=0.002,
    write_per_s=1e9,
)
PEER = PeerSample(peer="b:1", round_trip_s=0.0002, sent_per_s=1e9, received_per_s=1e9)


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    assert len({f.name for f in findings}) == len(findings), "two findings of one name"
    return {f.check: f for f in findings}


def test_grades_at_their_limits() -> None:
    assert [grade_above(x, 1, 2) for x in (0.5, 1, 1.1, 2, 2.1)] == [OK, OK, WARN, WARN, FAIL]
    assert [grade_below(x, 2, 1) for x in (2.5, 2, 1.9, 1, 0.9)] == [OK, OK, WARN, WARN, FAIL]
    nan = float("nan")
    assert grade_above(nan, 1, 2) is grade_below(nan, 2, 1) is FAIL


def memory(**changes: object) -> list[Finding]:
    return checks_host.judge_memory(replace(MEMORY, **changes), LIMITS)


def changed(**changes: object) -> list[Finding]:
    after = replace(HOST, at_s=110.0, memory=replace(MEMORY, **changes))
    return checks_host.judge_memory_change(HOST, after, LIMITS)


def cpu(**changes: object) -> list[Finding]:
    after = replace(HOST, cpu=replace(HOST.cpu, **changes))
    return checks_host.judge_cpu(HOST, after, LIMITS)


def quota(**changes: object) -> list[Finding]:
    return [checks_host.judge_cpu_limits(replace(HOST.cpu, **changes))]


def pressure(**changes: object) -> list[Finding]:
    return checks_host.judge_pressure(replace(HOST.pressure, **changes), LIMITS)


def allowance(need: int = 0, **changes: object) -> list[Finding]:
    return checks_host.judge_allowance(replace(ALLOWED, **changes), LIMITS, need)


def disk(**changes: object) -> list[Finding]:
    return checks_trials.judge_disk(replace(DISK, **changes), LIMITS)


def busy_disk(**changes: object) -> list[Finding]:
    return checks_trials.judge_disk_running(replace(DISK, **changes), LIMITS)


def ports(**changes: object) -> list[Finding]:
    return [checks_host.judge_ports(replace(HOST, **changes))]


def peer(**changes: object) -> list[Finding]:
    return judge_peer(replace(PEER, **changes), LIMITS)


CASES = [
    ("memory-available", memory(), OK, "90%"),
    ("memory-available", memory(available_bytes=9 * GIB), WARN, "9%"),
    ("memory-available", memory(available_bytes=GIB // 2), FAIL, "0%"),
    ("memory-available", memory(limit_bytes=10 * GIB, limit_used_bytes=4 * GIB), OK, "container"),
    ("memory-available", memory(limit_bytes=10 * GIB, limit_used_bytes=10 * GIB), FAIL, "0%"),
    ("swap", memory(swap_used_bytes=GIB), OK, "1.00"),
    ("swap", memory(swap_used_bytes=2 * GIB), WARN, "2.00"),
    ("memory-errors", memory(), SKIPPED, "EDAC"),
    ("memory-errors", memory(uncorrected=0, corrected=7), OK, "7 corrected"),
    ("memory-errors", memory(uncorrected=1), FAIL, "1 uncorrected"),
    ("swapping", changed(), OK, "0 pages/s"),
    ("swapping", changed(swapped_pages=1001), WARN, "100 pages/s"),
    ("out-of-memory", changed(), OK, "memory: 0"),
    ("out-of-memory", changed(oom_kills=1), WARN, "memory: 1"),
    ("memory-corrected", changed(corrected=0), OK, "0 more"),
    ("memory-corrected", changed(corrected=2), WARN, "2 more"),
    ("cpu-steal", cpu(), SKIPPED, "no time"),
    ("cpu-steal", cpu(ticks=2000, stolen=20), OK, "2.0%"),
    ("cpu-steal", cpu(ticks=2000, stolen=21), WARN, "2.1%"),
    ("cpu-steal", cpu(ticks=2000, stolen=201), FAIL, "20.1%"),
    ("cpu-throttled", cpu(quota=2.0, periods=100, throttled=10), OK, "10%"),
    ("cpu-throttled", cpu(quota=2.0, periods=100, throttled=11), WARN, "11%"),
    ("cpu-limit", quota(), OK, "no quota"),
    ("cpu-limit", quota(quota=8.0), OK, "quota 8"),
    ("cpu-limit", quota(quota=1.5), WARN, "quota 1.5"),
    ("cpu-pressure", pressure(), OK, "some tasks"),
    ("cpu-pressure", pressure(cpu_some=25.1), WARN, "25.1"),
    ("memory-pressure", pressure(memory_full=5.1), WARN, "all tasks"),
    ("io-pressure", pressure(io_full=26.0), WARN, "disks"),
    ("io-pressure", pressure(io_full=None), SKIPPED, "does not tell"),
    ("open-files", allowance(), OK, "65536"),
    ("open-files", allowance(open_files=None), OK, "no limit"),
    ("open-files", allowance(open_files=1024), WARN, "1024"),
    ("open-files", allowance(open_files=256), FAIL, "256"),
    ("processes", allowance(processes=1000), WARN, "1000"),
    ("processes", allowance(processes=100), FAIL, "100"),
    ("shared-memory", allowance(), OK, "8192 of 8192"),
    ("shared-memory", allowance(shared_bytes=64 * MIB), WARN, "of 64"),  # a container's default
    ("shared-memory", allowance(65 * MIB, shared_free_bytes=64 * MIB), FAIL, "need 65"),
    ("shared-memory", allowance(shared_bytes=MIB), FAIL, "of 1"),
    ("shared-memory", allowance(shared_bytes=512 * MIB), WARN, "of 512"),
    ("shared-memory", allowance(9 * GIB), FAIL, "need 9216"),
    ("shared-memory", allowance(7 * GIB), OK, "need 7168"),
    ("shared-memory", allowance(GIB, shared_free_bytes=GIB - 1), FAIL, "1024 of 8192"),
    ("shared-memory", allowance(shared_bytes=None), FAIL, "no /dev/shm"),
    ("infiniband", ports(), SKIPPED, "no InfiniBand"),
    ("infiniband", ports(ports=2), OK, "all 2"),
    ("infiniband", ports(ports=2, ports_down=("mlx5_1/1 DOWN",)), WARN, "mlx5_1/1 DOWN"),
    ("disk", disk(), OK, "ext4"),
    ("disk", disk(failure="Read-only file system"), FAIL, "Read-only"),
    ("disk-space", disk(free_bytes=9 * GIB), WARN, "9.0 GiB"),
    ("disk-space", disk(free_bytes=GIB - 1), FAIL, "free"),
    ("disk-space", disk(inodes=0.04), WARN, "4.0% of the inodes"),
    ("disk-space", disk(inodes=0.0), FAIL, "inodes"),
    ("disk-space", disk(inodes=None), OK, "100.0 GiB"),
    ("disk-sync", disk(sync_s=0.021), WARN, "21.00 ms"),
    ("disk-sync", disk(sync_s=1.1), FAIL, "1100"),
    ("disk-write", disk(write_per_s=99e6), WARN, "99 MB/s"),
    ("disk-write", disk(write_per_s=9e6), FAIL, "9 MB/s"),
    ("disk-read-back", disk(), OK, "read back"),
    ("disk-read-back", disk(read_back_wrong=True), FAIL, "other bytes were read"),
    ("disk", busy_disk(failure="Input/output error"), FAIL, "Input/output"),
    ("disk-sync", busy_disk(sync_s=4.0), OK, "4000"),  # a checkpoint is being written
    ("disk-sync", busy_disk(sync_s=6.0), WARN, "6000"),
    ("disk-space", busy_disk(free_bytes=0), FAIL, "0.0 GiB"),
    ("peer", peer(), OK, "0.20 ms"),
    ("peer", peer(round_trip_s=0.02), WARN, "20.00 ms"),
    ("peer", peer(round_trip_s=0.6), FAIL, "600"),
    ("peer", peer(failure="Connection refused"), FAIL, "refused"),
    ("clock", peer(offset_s=0.1), OK, "ahead"),
    ("clock", peer(offset_s=-0.11), WARN, "behind"),
    ("clock", peer(offset_s=1.2), FAIL, "1200.00 ms ahead"),
    ("clock", peer(offset_s=0.15, round_trip_s=0.2), OK, "give or take 100"),
    ("network-send", peer(sent_per_s=99e6), WARN, "99 MB/s"),
    ("network-ports", peer(stream_failure="timed out"), FAIL, "timed out"),
    ("network-receive", peer(received_per_s=9e6), FAIL, "9 MB/s"),
]


@pytest.mark.parametrize(("check", "findings", "grade", "words"), CASES)
def test_a_limit(check: str, findings: list[Finding], grade: Grade, words: str) -> None:
    found = by_check(findings)[check]
    assert found.grade is grade
    assert words in found.reason
    if grade is OK:
        assert not found.advice
    if grade is FAIL:
        assert found.advice
    if found.value is not None and grade is not SKIPPED:
        assert found.limit


def test_nothing_is_said_of_bandwidth_that_was_not_measured() -> None:
    assert set(by_check(peer(sent_per_s=None, received_per_s=None))) == {"peer", "clock"}
    assert "disk-write" not in by_check(disk(write_per_s=None))


def test_trials_of_arithmetic_and_memory_fail_on_wrong_results() -> None:
    run = ArithmeticSample(device="numpy", repeats=9, wrong=0)
    assert checks_trials.judge_arithmetic(run).grade is OK
    assert checks_trials.judge_arithmetic(replace(run, repeats=0)).grade is FAIL
    wrong = checks_trials.judge_arithmetic(replace(run, wrong=1, where="row 7"))
    assert (wrong.grade, wrong.value) == (FAIL, 1)
    assert "row 7" in wrong.reason
    speed = MemorySpeedSample(copied_per_s=1e10, tested_bytes=MIB, wrong_bytes=0)
    assert worst(checks_trials.judge_memory_speed(speed)) is OK
    bad = checks_trials.judge_memory_speed(replace(speed, wrong_bytes=1, where="byte 5"))
    assert by_check(bad)["memory-pattern"].grade is FAIL


def test_the_kernels_log() -> None:
    rest = ("hardware", "pcie", "memory")
    log = KernelLogSample(counts=(("disk", 2, "I/O error"),), xids=(("0000:3b:00", 79),))
    found = checks_trials.judge_kernel_log(log, gpus=False, without=rest)
    assert {f.subject: f.grade for f in found} == {"disk": WARN, "hung": OK, "gpu": WARN}
    assert "2 of late, newest: I/O error" in found[0].reason
    asked = checks_trials.judge_kernel_log(log, gpus=True, without=rest)
    assert {f.subject for f in asked} == {"disk", "hung"}
    closed = checks_trials.judge_kernel_log(KernelLogSample(unreadable="no"), gpus=True)
    assert [f.grade for f in closed] == [SKIPPED]
    everything = checks_trials.judge_kernel_log(log, gpus=False)
    assert [f.subject for f in everything] == list(LOG_KINDS)


def test_a_trial_that_hangs_fails_and_one_that_merely_breaks_warns() -> None:
    assert checks_trials.judge_failure("disk", "/x", "no answer", hung=True).grade is FAIL
    assert checks_trials.judge_failure("disk", "/x", "ImportError", hung=False).grade is WARN


# ---------------------------------------------------------------- against others


@given(
    offset=st.floats(-1e4, 1e4),
    ways=st.lists(st.tuples(st.floats(1e-5, 0.5), st.floats(1e-5, 0.5)), min_size=1, max_size=9),
)
def test_the_offset_is_within_half_the_quickest_round_trip(
    offset: float, ways: list[tuple[float, float]]
) -> None:
    times = []
    for number, (there, back) in enumerate(ways):
        sent = 1000.0 + number
        received = sent + there + offset
        answered = received + 0.25
        times.append((sent, received, answered, answered - offset + back))
    found, round_trip = clock_offset(times)
    assert round_trip == pytest.approx(min(there + back for there, back in ways), abs=1e-6)
    assert abs(found - offset) <= round_trip / 2 + 1e-6


def report(host: str = "b", **changes: object) -> Report:
    facts = dict.fromkeys(EQUAL, "1")
    return replace(Report(host=host, facts=facts, speeds={"memory-copy": 100.0}), **changes)


@pytest.mark.parametrize("name", EQUAL)
def test_a_fact_that_differs(name: str) -> None:
    ours = report().facts | {name: "2"}
    found = compare_facts(ours, report())
    assert [(f.check, f.subject, f.grade) for f in found] == [(f"same-{name}", "b", EQUAL[name][0])]
    assert "2 here, 1 there" in found[0].reason


def test_facts_that_are_equal_or_unknown_to_one() -> None:
    assert [f.grade for f in compare_facts(report().facts, report())] == [OK]
    assert [f.grade for f in compare_facts({"python": "1"}, report())] == [OK]
    assert [f.grade for f in compare_facts({"kernel": "6"}, report())] == [SKIPPED]


@pytest.mark.parametrize(
    ("name", "part", "grade"),
    [
        ("memory-copy", 0.7, OK),
        ("memory-copy", 0.69, WARN),
        ("memory-copy", 0.5, WARN),
        ("memory-copy", 0.49, FAIL),
        ("memory-copy", 9.0, OK),
        ("disk-write", 0.49, WARN),
        ("disk-write", 0.19, FAIL),
    ],
)
def test_a_speed_against_others(name: str, part: float, grade: Grade) -> None:
    others = [report(speeds={name: 100.0})]
    found = compare_speeds({name: 100.0 * part, "unknown": 1.0}, others, LIMITS)
    assert [(f.subject, f.grade) for f in found] == [(name, grade)]


def test_one_odd_peer_does_not_decide() -> None:
    for odd in (1.0, 1e9):
        others = [report(speeds={"x": speed}) for speed in (100.0, 101.0, odd)]
        assert compare_speeds({"x": 95.0}, others, LIMITS)[0].grade is OK
        assert compare_speeds({"x": 40.0}, others, LIMITS)[0].grade is FAIL
    zero = compare_speeds({"x": 1.0}, [report(speeds={"x": 0.0})], LIMITS)
    assert zero == []


def test_gpus_of_one_machine_against_each_other() -> None:
    speeds = {"GPU 0": 100.0, "GPU 1": 99.0, "GPU 2": 60.0, "GPU 3": 101.0}
    found = {f.subject: f.grade for f in compare_siblings(speeds, LIMITS)}
    assert found == {"GPU 0": OK, "GPU 1": OK, "GPU 2": WARN, "GPU 3": OK}
    assert compare_siblings({"GPU 0": 1.0}, LIMITS) == []


@pytest.mark.parametrize(
    ("facts", "gpus", "grades"),
    [
        ({"python": "3.11.7", "torch": "2.13.0+cpu", "gloo": "yes"}, 0, [OK, OK]),
        ({"python": "3.9.1", "torch": "2.6.0", "gloo": "yes"}, 0, [FAIL, OK]),
        ({"python": "3.10.0", "torch": "2.5.1", "gloo": "yes"}, 0, [OK, FAIL]),
        ({"python": "3.10.0"}, 0, [OK, FAIL]),
        ({"python": "3.10.0", "torch": "2.6", "gloo": "no"}, 0, [OK, OK, FAIL]),
        ({"python": "3.10.0", "torch": "2.6", "cuda": "no", "nccl": "no"}, 8, [OK, OK, WARN]),
        ({"python": "3.10.0", "torch": "2.6", "cuda": "13", "nccl": "no"}, 8, [OK, OK, FAIL]),
        ({"python": "3.10.0", "torch": "2.6", "cuda": "no", "nccl": "no"}, 0, [OK, OK]),
    ],
)
def test_versions(facts: dict[str, str], gpus: int, grades: list[Grade]) -> None:
    assert [f.grade for f in judge_versions(facts, gpus=gpus)] == grades


# ---------------------------------------------------------------- the whole


def finding(grade: Grade, check: str = "disk", **rest: str) -> Finding:
    return Finding(check=check, grade=grade, reason=rest.pop("reason", "because"), **rest)


def test_the_verdict_of_an_examination() -> None:
    assert summary([finding(OK), finding(SKIPPED)]) == "fit to join"
    warned = [finding(WARN, "swap"), finding(WARN, "swap", subject="b"), finding(WARN, "gpu")]
    assert summary(warned) == "fit to join, with 3 warnings: swap, gpu"
    failed = [*warned, finding(FAIL, advice="mend it"), finding(FAIL, "gpu")]
    assert summary(failed) == "NOT FIT to join: disk: because (and 1 more)"
    assert [worst(x) for x in (warned, failed, [finding(SKIPPED)], [])] == [WARN, FAIL, OK, OK]


def test_a_reason_is_one_bounded_line_of_plain_text() -> None:
    text = to_one_line("first\nsecond\t\x1b[31mred " + "x" * 1000)
    assert text.startswith("first second ?[31mred x")
    assert len(text) == REASON_MAX


def test_no_partial_sum_is_ever_rounded() -> None:
    assert WIDE.sum_max < 2**24, "float32 holds every whole number up to 2^24"
    assert WIDE.entry_max < 2**8, "bfloat16, float16 and TF32 hold every entry"
    assert NARROW.sum_max <= 2**8, "bfloat16 holds every sum"
    for product in (WIDE, NARROW):
        for data in (product.left_entries(), product.right_entries()):
            entries = memoryview(data).cast("b")
            assert max(entries) == product.entry_max
            assert min(entries) == -product.entry_max
