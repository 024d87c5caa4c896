"""No bytes do anything unannounced: they give a message of an accepted kind, or one clean refusal.

The quick tests are Hypothesis'; the slow ones run the fuzzers of fuzz/run.py, some million inputs.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tracemalloc

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fuzz import targets
from holdfast.engine.core.errors import WireError
from holdfast.engine.wire.messages import KINDS, decode, encode
from places import TESTS

RUN = str(TESTS / "fuzz" / "run.py")
INPUTS = 1_000_000
FUZZ_S = 900.0  # bounds a hang; a million inputs take one to two minutes

no_atheris = importlib.util.find_spec("atheris") is None
needs_atheris = pytest.mark.skipif(
    no_atheris, reason="no coverage-guided fuzzing: atheris is not installed (holdfast[fuzz])"
)
changes = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=3)))


def changed(data: bytes, how: list[tuple[int, int, bytes]]) -> bytes:
    """Return `data` with some places overwritten, cut out or grown."""
    for at, length, new in how:
        at %= len(data) + 1
        data = data[:at] + new + data[at + length :]
    return data


def test_every_message_of_the_corpus_fits() -> None:
    assert max(len(encode(message)) for message in targets.MESSAGES) <= targets.FIRST_BYTES_MAX


@settings(max_examples=500)
@given(data=st.binary(min_size=1, max_size=400))
@example(data=b"\x09" + b"\x81\xa6reason\xa3\xed\xa0\x80")  # half of a surrogate pair
@example(data=b"\x06" + b"\x81\xa1z" + b"\x91" * 100_000)  # nested too deep
@pytest.mark.parametrize("target", targets.TARGETS, ids=lambda t: t.__name__)
def test_any_bytes(target: object, data: bytes) -> None:
    assert callable(target)
    target(data)
    target(b"\xff\xff" + data)  # so that each kind is accepted


@settings(max_examples=1000)
@given(seed=st.sampled_from(list(targets.seeds())), how=changes)
def test_changed_good_input(seed: bytes, how: list[tuple[int, int, bytes]]) -> None:
    targets.one_input(seed[:1] + changed(seed[1:], how))


def test_the_seeds_are_good() -> None:
    """Otherwise the fuzzers would begin from inputs that are refused at once."""
    kinds = set()
    for seed in targets.seeds():
        targets.one_input(seed)
        if seed[0] == 0:
            decode(seed[3:], *KINDS.values())
            kinds.add(seed[3])
    assert kinds == set(KINDS), "give MESSAGES in fuzz/targets.py one of every kind"


def claims_much() -> list[bytes]:
    """Return short messages that claim to hold millions of things."""
    key, pack = msgspec.msgpack.encode, b"\x00\xff\xff\xff"
    return [
        b"\x06\x81" + key("addresses") + b"\xdd" + pack,
        b"\x06\xdf" + pack,
        b"\x06\x81" + key("no such field") + b"\xdd" + pack,
        b"\x05\x81" + key("address") + b"\xc6" + pack,
        b"\x04\x81" + key("wanted") + b"\xdd\xff\xff\xff\xff" + b"\x92\x01\x01" * 10,
        b"\x03\x81" + key("workers") + b"\xdd" + pack + encode(targets.STATUS)[1:],
    ]


def test_memory_for_a_message_follows_its_real_size_and_not_the_claimed_one() -> None:
    for payload in claims_much():
        tracemalloc.start()
        with pytest.raises(WireError, match="malformed"):
            decode(payload, *KINDS.values())
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 100_000, payload


def fuzz(how: str, count: int, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, RUN, how, str(count), *options],
        capture_output=True,
        text=True,
        errors="replace",
        timeout=FUZZ_S,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.timeout(FUZZ_S)
@pytest.mark.parametrize("how", ["plain", pytest.param("coverage", marks=needs_atheris)])
def test_a_million_inputs(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    done = fuzz(how, INPUTS)
    assert done.returncode == 0, done.stderr[-4000:]
    said = re.search(r"^fuzz: (\d+) inputs in .* a second$", done.stdout, re.MULTILINE)
    assert said is not None, done.stdout
    with capfd.disabled():
        print(f"\n{how} {said[0]}")
    assert int(said[1]) >= INPUTS


@pytest.mark.parametrize(
    "how", ["plain", pytest.param("coverage", marks=[needs_atheris, pytest.mark.slow])]
)
def test_a_planted_bug_is_found(how: str) -> None:
    done = fuzz(how, INPUTS, "--plant")
    assert done.returncode != 0
    assert "ZeroDivisionError: planted" in done.stdout + done.stderr
    assert f"fuzz: {INPUTS} inputs" not in done.stdout
