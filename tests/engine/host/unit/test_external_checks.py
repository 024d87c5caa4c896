"""External checks: a site's own commands are believed, bounded, and never leave anything behind."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import RUN_S
from health_kit import CALM
from holdfast.cli.main import main
from holdfast.engine.core.errors import UserError
from holdfast.engine.host import external_checks as external
from holdfast.engine.host.external_checks import (
    CHECKS_MAX,
    CommandSample,
    ExternalCheck,
    RepeatedCheck,
    judge_command,
    load_checks,
    make_repeated_check,
    parse_all_checks,
    parse_check,
    run,
    save_checks,
)
from holdfast.engine.host.findings import REASON_MAX, Finding, Grade
from holdfast.engine.host.history import Health, Watch
from holdfast.engine.host.light import light_checks
from holdfast.engine.net.descriptors import wait_readable
from places import ROOT

OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED

Script = Callable[..., ExternalCheck]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Return script(text): it makes a check run by sh, which may call its own folder $HERE."""

    def make(text: str, limit_s: float = RUN_S, every_s: float = 0.0) -> ExternalCheck:
        path = tmp_path / "check.sh"
        path.write_text(f"#!/bin/sh\nHERE={tmp_path}\n{text}\n")
        path.chmod(0o755)
        return ExternalCheck(name="own", command=(str(path),), limit_s=limit_s, every_s=every_s)

    return make


@pytest.fixture
def repeated() -> Iterator[Callable[[ExternalCheck], RepeatedCheck]]:
    made: list[RepeatedCheck] = []

    def make(check: ExternalCheck) -> RepeatedCheck:
        made.append(make_repeated_check(check))
        return made[-1]

    yield make
    for each in made:
        each.watcher.close()


def gone(fifo: int) -> bool:
    """Return whether every process that held the other end of a FIFO has ended."""
    return bool(wait_readable([fifo], RUN_S)) and os.read(fifo, 1) == b""


# ---------------------------------------------------------------- what is asked for


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dcgm", ["'dcgm'", "NAME=COMMAND"]),
        ("=true", ["'=true'", "NAME=COMMAND"]),
        ("Two Words=true", ["'Two Words=true'", "small letters"]),
        ("-x=true", ["'-x=true'", "small letters"]),
        ("x" * 41 + "=true", ["up to 40"]),
        ("dcgm=", ["'dcgm='", "no command"]),
        ("dcgm=''", ["no command"]),
        ("dcgm='half", ["No closing quotation", "NAME=COMMAND"]),
        ("\x1b[2J=true", ["?[2J"]),
    ],
)
def test_a_malformed_check_is_refused_with_its_text(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as refused:
        parse_check(text)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\x1b" not in str(refused.value)


def test_a_check_is_a_name_and_words() -> None:
    check = parse_check("dcgm-quick=/opt/check --label 'two words' a=b", 5.0)
    assert check.name == "dcgm-quick"
    assert check.command == ("/opt/check", "--label", "two words", "a=b")
    assert check.limit_s == 5.0
    for limit_s in (0.0, -1.0, 1e9, float("nan")):
        with pytest.raises(UserError, match="--check-limit-s"):
            parse_check("a=b", limit_s)


def test_names_are_given_once_and_not_without_end() -> None:
    with pytest.raises(UserError, match=r"a=\.\.\. is given twice"):
        parse_all_checks(["a=true", "b=true", "a=false"])
    with pytest.raises(UserError, match=f"at most {CHECKS_MAX}"):
        parse_all_checks([f"c{n}=true" for n in range(CHECKS_MAX + 1)])


def test_no_name_can_be_that_of_a_built_in_check() -> None:
    """Their prefix distinguishes them, which no check of ours may have."""
    assert run(parse_check("disk=true")).check == "external-disk"
    for path in (ROOT / "src/holdfast/doctor").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.keyword) and node.arg == "check":
                assert not ast.unparse(node.value).strip("'\"").startswith(external.PREFIX)


# ---------------------------------------------------------------- one run


@pytest.mark.parametrize(
    ("text", "grade", "words"),
    [
        ("echo all well; exit 0", OK, "all well"),
        ("echo getting warm; echo more; exit 1", WARN, "getting warm"),
        ("echo 'GPU 3 is lost | gpus=7;8;8'; exit 2", FAIL, "GPU 3 is lost"),
        ("echo no driver; exit 3", SKIPPED, "exit status 3; it said: no driver"),
        ("exit 4", SKIPPED, "exit status 4"),
        ("exit 255", SKIPPED, "exit status 255"),
        ("nonesuch-command", SKIPPED, "exit status 127; it said: "),
        ("exit 0", OK, "it said nothing"),
        ("echo; echo '  '; echo third; exit 2", FAIL, "third"),
        ("echo it speaks here >&2; exit 1", WARN, "it speaks here"),
        ("echo first; echo second >&2; exit 1", WARN, "first"),
        ("echo '| a=1'; exit 1", WARN, "| a=1"),
        ("kill -9 $$", SKIPPED, "killed by signal 9"),
        ("printf '\\377\\000\\033[2J bin'; exit 2", FAIL, "bin"),
        ("read line || echo no input; exit 0", OK, "no input"),
        ("head -c 50000000 /dev/zero | tr '\\0' x; exit 2", FAIL, "xxx"),
        ("head -c 50000000 /dev/zero | tr '\\0' x >&2; echo said; exit 2", FAIL, "said"),
    ],
)
def test_how_a_command_ends_is_the_verdict(
    script: Script, text: str, grade: Grade, words: str
) -> None:
    found = run(script(text))
    assert (found.check, found.grade) == ("external-own", grade)
    assert words in found.reason
    assert found.reason.isprintable()
    assert len(found.reason) <= REASON_MAX
    assert bool(found.advice) == (grade is not OK)


def test_performance_data_is_not_part_of_the_reason(script: Script) -> None:
    assert run(script("echo 'warm | t=80;70;90'; exit 1")).reason == "warm"


def test_a_command_that_cannot_be_started_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "plain").write_text("no program")
    for command, why in (
        (str(tmp_path / "none"), "No such file"),
        (str(tmp_path / "plain"), "Permission denied"),
        ("a\0b", "null byte"),
    ):
        found = run(ExternalCheck(name="own", command=(command,)))
        assert found.grade is SKIPPED
        assert found.reason.startswith("cannot start ")
        assert why in found.reason
        assert "by hand" in found.advice


def test_a_command_that_hangs_is_killed_with_all_that_it_started(
    script: Script, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    found = run(script("exec 3>$HERE/held\nsleep 1000 &\necho half\nsleep 1000", limit_s=2.0))
    assert found.grade is SKIPPED
    assert found.reason == "no answer in 2 s; it said: half"
    assert gone(held)
    os.close(held)


def test_processes_that_a_command_leaves_behind_are_killed_and_not_waited_for(
    script: Script, tmp_path: Path
) -> None:
    """The process that is left holds the pipes, and even writes to them."""
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    found = run(script("exec 3>$HERE/held\nyes >&2 &\nsleep 1000 &\necho done; exit 1"))
    assert (found.grade, found.reason) == (WARN, "done")
    assert gone(held)
    os.close(held)


def test_an_answer_that_makes_no_sense_is_unknown() -> None:
    check = parse_check("a=b")
    assert judge_command(check, CommandSample()).grade is SKIPPED
    assert external._finding(check, b"[7]", "").grade is SKIPPED
    assert external._finding(check, None, "").grade is SKIPPED


# ---------------------------------------------------------------- again and again


def told(check: RepeatedCheck, now: float) -> Finding:
    """Return the finding of the current run."""
    while True:
        found = check.round(now)
        if found:
            return found[0]
        assert wait_readable([check.watcher], RUN_S)


def test_a_repeated_check_runs_when_it_is_time_and_tells_each_run_once(
    script: Script, tmp_path: Path, repeated: Callable[[ExternalCheck], RepeatedCheck]
) -> None:
    check = repeated(script("echo x >> $HERE/runs; wc -l < $HERE/runs; exit 1", every_s=60.0))
    assert check.round(0.0) == [], "it is started and not waited for"
    assert told(check, 1.0).reason == "1"
    assert check.round(50.0) == [], "it is not yet time"
    assert check.watcher.waited_s(50.0) == 0.0
    assert check.round(60.0) == []
    assert told(check, 61.0).reason == "2"


def test_a_node_that_fails_an_external_check_is_drained_and_taken_back(
    script: Script, tmp_path: Path
) -> None:
    verdict = script("echo broken; test -e $HERE/mended && exit 0; exit 2")
    checks = light_checks(str(tmp_path), CALM, [verdict])
    watch, own, healths = Watch(), checks.external[0], []
    try:
        for now in (10.0, 30.0, 50.0):
            checks.round(now)
            assert wait_readable([own.watcher], RUN_S)
            found = [f for f in checks.round(now + 10.0) if f.check == "external-own"]
            healths.append(watch.observe(found, now + 10.0).health)
        assert healths == [Health.SUSPECT, Health.SUSPECT, Health.DRAIN]
        assert watch.verdict.check == "external-own"
        assert watch.verdict.reason.startswith("external-own: broken (3 failed")
        (tmp_path / "mended").touch()
        own.round(70.0)
        assert told(own, 80.0).grade is OK
    finally:
        checks.close()


def test_closing_ends_the_command_with_all_that_it_started(script: Script, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDWR | os.O_NONBLOCK)
    checks = light_checks(
        str(tmp_path), CALM, [script("exec 3>$HERE/held\nsleep 999 & echo >&3; wait")]
    )
    checks.round(0.0)
    assert wait_readable([held], RUN_S), "it runs"
    assert os.read(held, 1) == b"\n"
    reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
    os.close(held)
    checks.close()
    assert gone(reader)
    os.close(reader)


def test_a_command_ends_with_the_process_that_asked(script: Script, tmp_path: Path) -> None:
    """Even if that was killed: its agent may be."""
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDWR | os.O_NONBLOCK)
    check = script("exec 3>$HERE/held\nsleep 999 & echo >&3; wait")
    code = (
        "import sys, signal\n"
        "from holdfast.engine.host.external_checks import ExternalCheck, make_repeated_check\n"
        "check = make_repeated_check(ExternalCheck(name='own', command=(sys.argv[1],)))\n"
        "check.round(0.0)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, *check.command]) as parent:
        assert wait_readable([held], RUN_S), "it runs"
        os.read(held, 1)
        reader = os.open(tmp_path / "held", os.O_RDONLY | os.O_NONBLOCK)
        os.close(held)
        parent.kill()
    assert gone(reader)
    os.close(reader)


def test_an_agent_finds_its_checks_in_its_run_directory(tmp_path: Path) -> None:
    assert load_checks(tmp_path, "n1") == ()
    checks = parse_all_checks(["a=true", "b=sh -c 'exit 2'"], 5.0)
    save_checks(tmp_path, "n1", checks)
    save_checks(tmp_path, "../n/2", ())
    assert load_checks(tmp_path, "n1") == checks
    assert load_checks(tmp_path, "../n/2") == ()
    assert sorted(path.parent for path in tmp_path.iterdir()) == [tmp_path] * 2
    external.checks_file(tmp_path, "n1").write_text("[7]")
    with pytest.raises(UserError, match="give --check again"):
        load_checks(tmp_path, "n1")
    with pytest.raises(UserError, match="--run-dir"):
        save_checks(tmp_path / "none", "n1", checks)


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
def test_the_doctor_shows_what_external_checks_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["doctor", "--quick", "--dir", str(tmp_path), "--check-limit-s", "50"]
    args += ["--check", "good=echo fine", "--check", "bad=sh -c 'echo worn out; exit 2'"]
    assert main([*args, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = {f["check"]: (f["grade"], f["reason"]) for f in report["findings"]}
    assert found["external-good"] == ("ok", "fine")
    assert found["external-bad"] == ("fail", "worn out")
    assert main([*args, "--check", "gone=/nowhere/x"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("external-bad" in line and "worn out" in line for line in lines)
    assert any(line.startswith("skipped: external-gone: nothing was learned") for line in lines)


@pytest.mark.slow
def test_the_doctor_repeats_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--watch", "--json", "--every-s", "0.2", "--for-s", "4", "--dir", str(tmp_path)]
    assert main(["doctor", *args, "--check", "own=sh -c 'echo worn out; exit 2'"]) == 0
    rounds = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    own = [f for r in rounds for f in r["findings"] if f["check"] == "external-own"]
    assert [f["reason"] for f in own] == ["worn out"], "once a minute, and told once"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--check", "nothing"], ["'nothing'", "NAME=COMMAND"]),
        (["--check", "a=true", "--check", "a=true"], ["given twice"]),
        (["--check", "a=true", "--check-limit-s", "0"], ["--check-limit-s 0"]),
        (["--watch", "--check", "nothing"], ["'nothing'"]),
        (["agent", "--join", "127.0.0.1:1", "--check", "nothing"], ["'nothing'"]),
    ],
)
def test_bad_options(args: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*(("doctor",) if args[0] != "agent" else ()), *args]) == 2
    text = capsys.readouterr().err
    assert all(word in text for word in words), text
