"""The job document: one field makes an option, and each way to write it gives the same job."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import holdfast
from holdfast.cli.main import main
from holdfast.engine.commands.job_options import read_config, write_config
from holdfast.engine.commands.run_command import make_job, make_spec, parser
from holdfast.engine.core.errors import Damaged, UserError, WireError
from holdfast.engine.core.job_problems import as_flag, find_problem
from holdfast.engine.core.job_spec import SECTIONS, SETTINGS, JobSpec, with_settings
from holdfast.engine.core.settings import INTEGER_MAX, Setting, format_value
from holdfast.engine.core.types import Incarnation, ProcessRole, WorkerId
from holdfast.engine.runtime.node.bootstrap import HUGE_PAGES
from holdfast.engine.runtime.node.worker_process import WorkerTemplate
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.open import FORM, absolute_store
from holdfast.engine.train.script.environment import ALONE, WorkerEnvironment
from holdfast.engine.wire.job_document import decode_job, encode_job
from holdfast.engine.wire.messages import JoinReply, decode, encode
from holdfast.lab.check import check_command
from support import SPEC

KEYS = sorted(SETTINGS)
URL = "etcd://a,b:7000/job?ttl=9"
STORES = ("", "/ckpt", "s3://bucket/prefix", "ec:2+1:/a,/b,/c", '/odd "place"\n\x7f\\é😀')


def values_of(setting: Setting) -> st.SearchStrategy[object]:
    """Draw any values of the setting's type within its limits, and those at them."""
    about = setting.about
    found: st.SearchStrategy[object]
    if setting.key == "nodes.election":
        return st.sampled_from(["", URL])
    if setting.key == "compat.preload":
        return st.sampled_from(["", "a.b,c"])
    if setting.key == "memory.redundancy":
        return st.sampled_from(["none", "replicate:1", "rs:2+1", "rs:4+2"])
    if setting.key == "checkpoints.store":
        return st.sampled_from([absolute_store(each) if each else "" for each in STORES])
    if setting.base is bool:
        return st.booleans()
    if setting.base is int:
        least = 0 if about.least is None else int(about.least)
        found = st.one_of(st.integers(least, least + 9), st.integers(least, INTEGER_MAX))
    else:
        found = st.floats(
            min_value=about.least if about.above is None else about.above,
            max_value=about.most if about.below is None else about.below,
            exclude_min=about.above is not None,
            exclude_max=about.below is not None,
            allow_nan=False,
            allow_infinity=False,
        )
    if setting.size:
        return st.tuples(*[found] * setting.size).map(sorted).map(tuple)
    return st.none() | found if setting.auto else found


def text() -> st.SearchStrategy[str]:
    return st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8)


@st.composite
def specs(draw: st.DrawFn) -> JobSpec:
    """Draw good jobs: a few settings are not at their defaults."""
    keys = draw(st.lists(st.sampled_from(KEYS), unique=True, max_size=6))
    spec = with_settings(SPEC, {key: draw(values_of(SETTINGS[key])) for key in keys})
    spec = dataclasses.replace(spec, script=draw(text()), args=tuple(draw(st.lists(text()))))
    assume(not find_problem(spec))
    return spec


def told(spec: JobSpec) -> JobSpec:
    """Return the document without the parts that each launch makes again."""
    return dataclasses.replace(spec, job="", cwd="")


def flags(spec: JobSpec) -> list[str]:
    """Return the command line for a whole job."""
    found = []
    for each in SETTINGS.values():
        value = each.value_in(spec)
        if isinstance(value, bool):
            found.append(each.flag if value else each.flag.replace("--", "--no-", 1))
        elif isinstance(value, tuple):
            found += [each.flag, *map(repr, value)]
        else:
            found.append(f"{each.flag}={format_value(value) if value is None else value}")
    return found


# ---------------------------------------------------------------- one job, however it is said


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(spec=specs())
def test_each_way_to_say_a_job_comes_to_the_same(
    spec: JobSpec, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "job.toml"
    path.write_text(write_config(spec), encoding="utf-8")
    by_file = make_job(parser().parse_args(["--config", str(path)]))
    assert told(by_file) == told(spec)
    by_flags = make_job(parser().parse_args([*flags(spec), "train.py"]))
    assert told(by_flags) == told(dataclasses.replace(spec, script="train.py", args=()))
    assert decode_job(encode_job(spec)) == spec
    reply = JoinReply(spec=spec, seen_as="")
    assert decode(encode(reply), JoinReply) == reply


TEXTS = {"nodes.election": URL, "memory.redundancy": "replicate:1"}


@pytest.mark.parametrize("key", KEYS)
def test_every_setting_is_written_with_its_help_and_read_again(key: str, tmp_path: Path) -> None:
    default = SETTINGS[key].default
    assert default == SETTINGS[key].value_in(JobSpec(job="", cwd="", script=""))
    other = {
        bool: lambda: not default,
        int: lambda: 7 if key == "stragglers.backup" else 9,
        float: lambda: (0.25, 0.75) if SETTINGS[key].size else 0.25,
        str: lambda: TEXTS.get(key, "/ckpt"),
    }[SETTINGS[key].base]()
    values = {"workers.nproc": 9, "nodes.lease_s": 0.125, "nodes.abandon_s": 0.5, key: other}
    values |= {"workers.spares": 1} if key == "workers.hot_spares" else {}
    values |= {"checkpoints.store": "/ckpt"} if key == "workers.shard_optimizer" else {}
    values |= {"workers.procs": other, "nodes.min": other} if key == "workers.spread" else {}
    needs_servers = key.startswith("servers.") and key != "servers.count"
    values |= {"servers.count": 9} if needs_servers else {}
    spec = with_settings(dataclasses.replace(SPEC, script="", args=()), values)
    assert find_problem(spec) == ""
    written = write_config(spec)
    comments = " ".join(line[2:] for line in written.splitlines() if line.startswith("# "))
    assert SETTINGS[key].about.help in comments
    path = tmp_path / "job.toml"
    path.write_text(written)
    assert read_config(path).settings[key] == other
    assert told(make_job(parser().parse_args(["--config", str(path)]))) == told(spec)
    assert max(map(len, written.splitlines())) <= 100


def test_write_config_runs_nothing_and_keeps_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["run", "--write-config", "job.toml", "--nproc", "4", "train.py", "--steps", "3"]
    assert main(command) == 0
    assert [each.name for each in tmp_path.iterdir()] == ["job.toml"]
    config = read_config(Path("job.toml"))
    assert (config.script, config.args) == ("train.py", ("--steps", "3"))
    assert config.settings["workers.nproc"] == 4
    assert main(command) == 2
    assert "job.toml exists already" in capsys.readouterr().err
    assert main(["run", "--write-config", "-", *command[3:]]) == 0
    assert capsys.readouterr().out == Path("job.toml").read_text()


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text(
        'script = "one.py"\nargs = ["--x"]\n'
        "[workers]\nnproc = 4\nseed = 5\n[stragglers]\nrebalance = false\nbackup = 1\n"
    )

    def made(*options: str) -> JobSpec:
        return make_job(parser().parse_args(["--config", str(path), *options]))

    spec = made()
    assert (spec.script, spec.args) == ("one.py", ("--x",))
    assert (spec.workers.nproc, spec.workers.seed) == (4, 5)
    assert (spec.stragglers.rebalance, spec.stragglers.backup) == (False, 1)
    spec = made("--nproc", "2", "--rebalance", "two.py")
    assert (spec.script, spec.args) == ("two.py", ())
    assert (spec.workers.nproc, spec.workers.seed, spec.stragglers.rebalance) == (2, 5, True)
    expected = rf"^{path}: stragglers\.backup = 1 must be from 0 to 0"
    with pytest.raises(UserError, match=expected):
        made("--nproc", "1")


# ---------------------------------------------------------------- what a field must bring along


def test_every_setting_says_what_people_need() -> None:
    taken = {"--config", "--write-config", "--run-dir", "--host", "--port", "--tls", "--faults"}
    assert "checkpoints.store" in SETTINGS
    assert FORM in SETTINGS["checkpoints.store"].about.help
    for each in SETTINGS.values():
        assert len(each.about.help) > 20
        assert not each.about.help.endswith(".")
        assert each.flag.startswith("--")
        assert each.flag not in taken, "a flag is used twice"
        taken.add(each.flag)
        if each.base is not bool:
            assert each.about.metavar
    assert all(kind.__doc__ for kind in SECTIONS.values())


def test_help_shows_every_option_in_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    shown_help = capsys.readouterr().out
    titles = [*(name.replace("_", " ") for name in SECTIONS), "this launch"]
    places = [shown_help.index(f"\n{title}:\n") for title in titles]
    assert places == sorted(places)
    for each in SETTINGS.values():
        start = places[list(SECTIONS).index(each.section)]
        assert f"\n  {each.flag}" in shown_help[start:]


def test_version() -> None:
    command = [sys.executable, "-m", "holdfast.cli.main", "--version"]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout == f"holdfast {holdfast.__version__}\n"


# ---------------------------------------------------------------- checks


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"workers.nproc": 0}, "--nproc 0 must be from 1 to 1024"),
        ({"workers.seed": 1 << 63}, f"must be at most {INTEGER_MAX}"),
        ({"workers.hang_s": 0.0}, "--hang-s 0 must be greater than 0"),
        ({"nodes.min": 3, "nodes.max": 2}, "--nodes-max 2 must be at least --nodes-min 3"),
        ({"workers.nproc": 2, "nodes.min": 2, "workers.virtual": 3}, "the 4 workers of --nproc 2"),
        ({"workers.min": 2}, "--min-workers 2 must be from 1 to 1"),
        ({"nodes.abandon_s": 5.0}, "--abandon-s 5 must be at least twice --lease-s 3"),
        ({"checkpoints.every": 0}, "--save-every 0 must be at least 1, or auto"),
        ({"checkpoints.between_s": (9.0, 3.0)}, "--save-between 9 3: the shortest time must not"),
        ({"checkpoints.between_s": (0.0, 3.0)}, "--save-between 0 3 must be greater than 0"),
        (
            {"checkpoints.scrub_rate": math.inf},
            "--scrub-rate inf must be a finite number, at least 0",
        ),
        ({"checkpoints.store": "\ud800"}, "must be valid UTF-8 text"),
        ({"stragglers.speculation_budget": 1.5}, "--speculation-budget 1.5 must be from 0 to 1"),
        ({"stragglers.backup": 1}, "--backup 1 must be from 0 to 0: a step of 1 workers"),
        ({"silent_errors.audit_tolerance": 1.0}, "1 must be from 0 to below 1"),
        ({"silent_errors.audit": math.nan}, "--audit nan must be a finite number, from 0 to 1"),
        ({"silent_errors.fingerprint_steps": -1}, "--fingerprint-steps -1 must be at least 0"),
    ],
)
def test_a_bad_value_is_named_wherever_it_comes_from(
    values: dict[str, object], problem: str
) -> None:
    spec = with_settings(SPEC, values)
    assert problem in find_problem(spec, as_flag)
    with pytest.raises((Damaged, UnicodeEncodeError)):
        decode_job(encode_job(spec))
    with pytest.raises((WireError, UnicodeEncodeError, OverflowError)):
        decode(encode(JoinReply(spec=spec, seen_as="")), JoinReply)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("--compat --virtual 8", "--virtual 8 has no effect with --compat: leave it out"),
        ("--compat --audit 0.5", "--audit 0.5 has no effect with --compat: leave it out"),
        ("--compat --store /x", "--store /x has no effect with --compat: leave it out"),
        ("--waiting 3", "--waiting 3 has an effect only with --compat: add that, or leave it out"),
    ],
)
def test_options_that_a_script_has_no_use_for(options: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        make_spec(parser().parse_args([*options.split(), __file__]))
    assert make_spec(parser().parse_args(["--compat", "--waiting", "0", __file__])).compat.enabled


def test_a_redundancy_that_does_not_exist_is_refused() -> None:
    problem = find_problem(with_settings(SPEC, {"memory.redundancy": "parity:3"}))
    assert "parity:3" in problem


def test_backup_and_audit_exclude_each_other() -> None:
    values = {"workers.nproc": 2, "stragglers.backup": 1, "silent_errors.audit": 0.5}
    problem = find_problem(with_settings(SPEC, values))
    assert "stragglers.backup = 1 and silent_errors.audit = 0.5 exclude each other" in problem


def test_a_script_with_a_name_that_no_process_can_have() -> None:
    assert "script 'a\\x00b' must not contain a NUL" in find_problem(
        dataclasses.replace(SPEC, script="a\0b")
    )


# ---------------------------------------------------------------- what workers get


def test_a_worker_gets_the_whole_job(tmp_path: Path) -> None:
    long = tuple("x" * 100_000 for _ in range(4))  # more than a variable can hold
    spec = dataclasses.replace(with_settings(SPEC, {"silent_errors.audit": 0.5}), args=long)
    run_dir = RunDir(tmp_path)
    run_dir.create(spec, b"s" * 32)
    template = WorkerTemplate(
        run_dir=run_dir, spec=spec, host="10.0.0.1", orders_fd=9, memory_bytes=4096
    )
    variables = template.environment(WorkerId(3), Incarnation(2), 5, 6)
    found = WorkerEnvironment.read(variables)
    assert found.spec == spec
    assert found.memory_bytes == 4096
    assert variables[HUGE_PAGES] == "1"
    assert (found.worker, found.incarnation, found.role) == (3, 2, ProcessRole.WORKER)
    assert (found.channel_fd, found.orders_fd, found.host) == (5, 9, "10.0.0.1")
    run_dir.job.write_text("{}")
    with pytest.raises(UserError, match=r"job\.json is damaged.*unset HOLDFAST_RUN_DIR"):
        WorkerEnvironment.read(variables)
    run_dir.job.unlink()
    with pytest.raises(UserError, match=r"job\.json cannot be read: No such file"):
        WorkerEnvironment.read(variables)
    with pytest.raises(UserError, match=r"^HOLDFAST_ROLE='king' is no role"):
        WorkerEnvironment.read({"HOLDFAST_ROLE": "king"})


def test_a_users_choice_about_huge_pages_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HUGE_PAGES, "0")
    run_dir = RunDir(tmp_path)
    run_dir.create(SPEC, b"s" * 32)
    template = WorkerTemplate(run_dir=run_dir, spec=SPEC, host="10.0.0.1")
    variables = template.environment(WorkerId(3), Incarnation(2), 5, 6)
    assert variables[HUGE_PAGES] == "0"


def test_alone_a_script_is_a_job_of_one_worker() -> None:
    found = WorkerEnvironment.read({})
    assert found == WorkerEnvironment()
    assert found.spec is ALONE
    assert (found.spec.virtual_ranks, found.spec.workers_at_start) == (1, 1)
    assert find_problem(ALONE) == ""
    defaults = JobSpec(job="", cwd="", script="")
    differ = {key for key, each in SETTINGS.items() if each.value_in(ALONE) != each.default}
    assert differ == {"stragglers.speculation_budget", "silent_errors.fingerprint_steps"}
    assert find_problem(defaults) == ""


def test_defaults_follow_from_other_settings() -> None:
    spec = with_settings(SPEC, {"workers.nproc": 3, "nodes.min": 2})
    assert (spec.virtual_ranks, spec.nodes_max, spec.workers_at_start) == (6, 2, 6)
    assert spec.roles_per_node == {ProcessRole.WORKER: 3}
    spec = with_settings(spec, {"workers.virtual": 8, "nodes.max": 5, "stragglers.backup": 2})
    assert (spec.virtual_ranks, spec.nodes_max) == (8, 5)
    assert (spec.backup().workers, spec.backup().results_min) == (2, 4)


def test_a_job_document_of_an_earlier_release_has_fewer_settings() -> None:
    plain = msgspec.to_builtins(SPEC)
    del plain["silent_errors"], plain["workers"]["virtual"]
    assert decode_job(msgspec.json.encode(plain)) == SPEC


def test_a_script_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no script to run"):
        make_spec(parser().parse_args([]))
    with pytest.raises(UserError, match=r"there is no script nowhere\.py"):
        make_spec(parser().parse_args(["nowhere.py"]))


@pytest.mark.parametrize("flag", ["--nodes", "--no", "--vir"])
def test_options_of_a_script_are_never_taken_for_short_forms_of_the_jobs(flag: str) -> None:
    assert parser().parse_args(["train.py", flag, "3"]).args == [flag, "3"]
    assert check_command.parser().parse_args(["train.py", flag, "3"]).args == [flag, "3"]
