"""Judge a machine against its peers: the way to a peer, equal versions, similar speeds.

A `Report` is one machine's examination as data; two of them can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from holdfast.engine.host.findings import (
    Finding,
    Grade,
    Limits,
    Pair,
    fail_if,
    grade_above,
    grade_below,
    limit_text,
)

FORMAT = 1
PYTHON_MIN, TORCH_MIN = (3, 10), (2, 6)

# Properties that all machines of a job share, and the grade of a difference.
EQUAL = {
    "holdfast": (Grade.FAIL, "machines of one job speak one release"),
    "torch": (Grade.FAIL, "other kernels give other bits"),
    "cuda": (Grade.FAIL, "other kernels give other bits"),
    "cudnn": (Grade.FAIL, "other kernels give other bits"),
    "nccl": (Grade.FAIL, "NCCL of two releases may refuse each other"),
    "gloo": (Grade.FAIL, "both sides need it"),
    "python": (Grade.FAIL, "scripts and their random numbers may differ"),
    "machine": (Grade.FAIL, "another kind of processor gives other bits"),
    "gpus": (Grade.WARN, "other GPUs give other bits and another speed"),
    "processor": (Grade.WARN, "another model may use other kernels, which give other bits"),
    "numpy": (Grade.WARN, "data may be prepared differently"),
    "driver": (Grade.WARN, "use one driver everywhere"),
    "links": (Grade.WARN, "the slower link slows every exchange"),
}
DISK_SPEEDS = ("disk-write", "disk-syncs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Lists the findings of one machine's examination."""

    format: int = FORMAT
    host: str = ""
    facts: dict[str, str]
    speeds: dict[str, float]  # more is better; units in docs/doctor.md
    findings: tuple[Finding, ...] = ()
    verdict: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSample:
    """A peer sample contains measurements of the way to a peer, or why there are none."""

    peer: str
    failure: str = ""
    round_trip_s: float = 0.0  # the least of several
    offset_s: float = 0.0  # the peer's clock minus ours
    sent_per_s: float | None = None
    received_per_s: float | None = None
    moved_bytes: int = 0
    stream_failure: str = ""  # what kept bandwidth from being measured


def judge_peer(sample: PeerSample, limits: Limits) -> list[Finding]:
    """Judge whether a peer is reached, how its clock goes, and how fast bytes come and go."""
    if sample.failure:
        return [
            Finding(
                check="peer",
                subject=sample.peer,
                grade=Grade.FAIL,
                reason=sample.failure,
                advice="is `holdfast doctor --serve` running there, with the same secret, and does "
                "a firewall let it through?",
            )
        ]
    grade = grade_above(sample.round_trip_s, *limits.round_trip_s)
    found = [
        Finding(
            check="peer",
            subject=sample.peer,
            grade=grade,
            value=round(1e3 * sample.round_trip_s, 3),
            unit="ms",
            limit=limit_text("above", limits.round_trip_s, 1e-3) + " ms",
            reason=f"round trip {1e3 * sample.round_trip_s:.2f} ms",
            advice="are both in one data centre, on one network?",
        ),
        judge_clock(sample, limits),
    ]
    if sample.stream_failure:
        found.append(
            Finding(
                check="network-ports",
                subject=sample.peer,
                grade=Grade.FAIL,
                reason=f"a port of the system's choice was not reached: {sample.stream_failure}",
                advice="gloo and NCCL need such ports: let the firewall pass them between nodes",
            )
        )
    speeds = (("network-send", sample.sent_per_s), ("network-receive", sample.received_per_s))
    for check, rate in speeds:
        if rate is None:
            continue
        grade = grade_below(rate, *limits.network)
        found.append(
            Finding(
                check=check,
                subject=sample.peer,
                grade=grade,
                value=round(rate / 1e6, 1),
                unit="MB/s",
                limit=limit_text("below", limits.network, 1e6) + " MB/s",
                reason=f"{rate / 1e6:.0f} MB/s on one connection",
                advice="look at link speed, cables and switch",
            )
        )
    return found


def clock_offset(times: Sequence[tuple[float, float, float, float]]) -> tuple[float, float]:
    """Estimate (offset of the other clock, round trip) in seconds by the quickest exchange.

    Each is (sent by us, received there, answered there, received by us), by each side's own clock.
    The true offset is within half the round trip of the estimate, as in NTP (RFC 5905).
    """
    best = min(times, key=lambda t: (t[3] - t[0]) - (t[2] - t[1]))
    sent, received, answered, back = best
    round_trip_s = max(0.0, (back - sent) - (answered - received))
    return ((received - sent) + (answered - back)) / 2, round_trip_s


def judge_clock(sample: PeerSample, limits: Limits) -> Finding:
    """Judge by how much clocks differ for certain: half the round trip may be the network's."""
    certain_s = max(0.0, abs(sample.offset_s) - sample.round_trip_s / 2)
    way = "ahead of" if sample.offset_s > 0 else "behind"
    return Finding(
        check="clock",
        subject=sample.peer,
        grade=grade_above(certain_s, *limits.clock_s),
        value=round(1e3 * sample.offset_s, 3),
        unit="ms",
        limit=limit_text("above", limits.clock_s, 1e-3) + " ms",
        reason=f"the peer's clock is {1e3 * abs(sample.offset_s):.2f} ms {way} ours, "
        f"give or take {1e3 * sample.round_trip_s / 2:.2f} ms",
        advice="run a time service (chrony, ntpd) on both",
    )


def compare_facts(ours: dict[str, str], other: Report) -> list[Finding]:
    """Make a finding of each fact that both know and that differs; one in all if none does."""
    found: list[Finding] = []
    both = [name for name in EQUAL if name in ours and name in other.facts]
    for name in both:
        grade, why = EQUAL[name]
        if ours[name] != other.facts[name]:
            found.append(
                Finding(
                    check=f"same-{name}",
                    subject=other.host,
                    grade=grade,
                    limit="equal on all machines",
                    reason=f"{ours[name]} here, {other.facts[name]} there: {why}",
                    advice="install the same on both" if grade is Grade.FAIL else "",
                )
            )
    if found:
        return found
    reason = f"{', '.join(both)} are equal" if both else "nothing to compare"
    grade = Grade.OK if both else Grade.SKIPPED
    return [Finding(check="same-versions", subject=other.host, grade=grade, reason=reason)]


def compare_speeds(
    ours: dict[str, float], others: Sequence[Report], limits: Limits
) -> list[Finding]:
    """Judge each speed by the median of the peers that measured it; one odd peer is not enough."""
    found: list[Finding] = []
    for name in sorted(ours):
        known = [r.speeds[name] for r in others if r.speeds.get(name, 0.0) > 0.0]
        if not known:
            continue
        pair = limits.slow_disk if name in DISK_SPEEDS else limits.slow
        count = "1 machine" if len(known) == 1 else f"{len(known)} machines"
        why = "find out why: cooling, power, other programs, memory modules, BIOS settings"
        found.append(
            _make_slow_finding("speed", name, ours[name] / median(known), pair, count, why)
        )
    return found


def _make_slow_finding(
    check: str, subject: str, part: float, pair: Pair, others: str, advice: str
) -> Finding:
    return Finding(
        check=check,
        subject=subject,
        grade=grade_below(part, *pair),
        value=round(part, 3),
        unit="of the others'",
        limit=limit_text("below", pair),
        reason=f"{part:.2f} of the median of {others}",
        advice=advice,
    )


def compare_siblings(speeds: dict[str, float], limits: Limits) -> list[Finding]:
    """Judge the GPUs of one machine by each other. `speeds`: by GPU."""
    if len(speeds) < 2:
        return []
    middle = median(speeds.values())
    others = f"this machine's {len(speeds)} GPUs"
    why = "look at its temperature, power and clocks"
    parts = {name: speed / middle if middle > 0 else 0.0 for name, speed in speeds.items()}
    return [
        _make_slow_finding("gpu-speed", name, p, limits.slow, others, why)
        for name, p in parts.items()
    ]


def judge_versions(facts: dict[str, str], *, gpus: int) -> list[Finding]:
    """Judge whether a worker can run at all. `gpus`: how many are on the PCI bus."""
    python = facts.get("python", "0")
    torch = facts.get("torch", "")
    found = [_version("python", python, PYTHON_MIN)]
    if not torch:
        missing = "is not installed for this Python: workers cannot run"
        return [*found, _need("torch", Grade.FAIL, missing, "install PyTorch")]
    found.append(_version("torch", torch, TORCH_MIN))
    if facts.get("gloo") == "no":
        found.append(_need("gloo", Grade.FAIL, "torch was built without gloo", "install another"))
    if gpus and facts.get("cuda") == "no":
        reason = f"there are {gpus} GPUs, but this torch was built without CUDA"
        found.append(_need("cuda", Grade.WARN, reason, "install torch for CUDA to use them"))
    elif gpus and facts.get("nccl") == "no":
        reason = f"there are {gpus} GPUs, but this torch was built without NCCL"
        found.append(_need("nccl", Grade.FAIL, reason, "install torch with NCCL"))
    return found


def _version(name: str, version: str, oldest: tuple[int, int]) -> Finding:
    numbers = [int(part) if part.isdecimal() else 0 for part in version.split(".")[:2]]
    least = "at least " + ".".join(map(str, oldest))
    return Finding(
        check="versions",
        subject=name,
        grade=fail_if(tuple(numbers) < oldest),
        limit=least,
        reason=version,
        advice=f"install {least}",
    )


def _need(name: str, grade: Grade, reason: str, advice: str) -> Finding:
    return Finding(check="versions", subject=name, grade=grade, reason=reason, advice=advice)
