"""`holdfast launch mesos` says in one sentence what is wrong, and leaves no framework behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.clusters import launch_application
from holdfast.clusters.mesos.mesos_manager import access_of
from holdfast.engine.fleet.cluster_manager import read_plan
from holdfast.engine.runtime.rundir import RunDir
from labs.fake_mesos import FakeMesos


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeMesos]:
    with FakeMesos(tmp_path, masters=2) as made:
        yield made


@pytest.fixture
def password(tmp_path: Path) -> str:
    path = tmp_path / "password"
    path.write_text("open sesame\n")
    return str(path)


def launch(fake: FakeMesos, *options: str) -> int:
    run_dir = str(fake.folder / "run")
    return main(["launch", "mesos", "--master", fake.url, "--run-dir", run_dir, *options, __file__])


def refusal(fake: FakeMesos, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """Return the one sentence by which a command is refused; Mesos has no framework of it."""
    assert launch(fake, *options) == 2
    assert not fake.frameworks
    said = [line for line in capsys.readouterr().err.splitlines() if "run directory" not in line]
    assert len(said) == 1, said
    return said[0]


def test_an_address_without_a_master_is_refused(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(fake, capsys, "--master", "http://127.0.0.1:1")
    assert "--master http://127.0.0.1:1 cannot be used: Mesos does not answer at" in said
    assert "[Errno 111] Connection refused" in said
    for address in ("zk://zk1:2181/mesos", "master:5050", f"{fake.url},", "http://m/?a=b"):
        said = refusal(fake, capsys, "--master", address)
        assert "is no address: write it as http://HOST:5050, a master's web address" in said
    assert "there is no Mesos master to ask" in refusal(fake, capsys, "--master", "")


def test_a_server_that_is_no_mesos_is_named(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.knobs.missing = True
    said = refusal(fake, capsys)
    assert said == f"holdfast: --master {fake.url} is no Mesos: it does not know /api/v1"


def test_a_role_that_is_refused_is_named(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refusal(fake, capsys, "--role", "cpu")
    text = "Role 'cpu' is not present in the master's --roles; name another"
    assert f"--role cpu: Mesos says: {text}" in said


def test_a_master_that_wants_to_know_who_asks_is_told(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str], password: str
) -> None:
    fake.knobs.passwords = {"joe": "open sesame"}
    who = "Mesos demands a proof of identity: give --user and --password-file"
    assert who in refusal(fake, capsys)
    assert who in refusal(fake, capsys, "--user", "ann", "--password-file", password)
    assert "belong together" in refusal(fake, capsys, "--user", "joe")
    said = refusal(fake, capsys, "--user", "joe", "--password-file", "/none")
    assert "--password-file cannot be read" in said
    (fake.folder / "empty").touch()
    said = refusal(fake, capsys, "--user", "joe", "--password-file", str(fake.folder / "empty"))
    assert "is empty: write one into it" in said


def test_too_few_nodes_are_refused(fake: FakeMesos, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(fake, capsys, "--nodes", "5")
    assert "--nodes 5: the cluster has 4 with 1 CPUs, 4096 MB; ask for fewer" in said
    assert "the cluster has 0 with 1 CPUs, 9000 MB" in refusal(fake, capsys, "--memory", "9000")
    assert "the cluster has 0 with 1 CPUs, 4096 MB, 2 GPUs" in refusal(fake, capsys, "--gpus", "2")
    fake.kill("agent0")
    assert "the cluster has 3" in refusal(fake, capsys, "--nodes", "4")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--cpus", "0"], "--cpus 0 must be from 0.01 to 10000"),
        (["--cpus", "nan"], "--cpus nan must be from 0.01 to 10000"),
        (["--memory", "-1"], "--memory -1 must be from 1 to"),
        (["--gpus", "-1"], "--gpus -1 must be from 0 to"),
        (["--failover-s", "5"], "--failover-s 5 must be from 60 to"),
        (["--ca-file", "/none.pem"], "--ca-file /none.pem is no file: name one"),
        (["--ca-file", __file__], "holds no certificates"),
    ],
)
def test_values_that_mesos_cannot_use_are_refused(
    fake: FakeMesos, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refusal(fake, capsys, *options)


def test_a_framework_has_the_jobs_name_and_ends_with_the_job(
    fake: FakeMesos, monkeypatch: pytest.MonkeyPatch, password: str
) -> None:
    fake.knobs.passwords = {"joe": "open sesame"}
    fake.knobs.shy = True
    seen: list[tuple[str, str]] = []

    def job(run_dir: RunDir, host: str, port: int) -> int:
        (framework,) = fake.frameworks.values()
        assert framework.info["principal"] == "joe"
        assert framework.info["roles"] == ["gpu"]
        assert framework.info["failover_timeout"] == 600.0
        settings = read_plan(run_dir).settings
        assert "open sesame" not in str(settings)
        assert "open sesame" not in str(access_of(settings))
        assert run_dir.spec().nodes.abandon_s == 60.0
        seen.append((framework.info["name"], host))
        return 130

    monkeypatch.setattr(launch_application, "launch_cluster_job", job)
    who = ("--user", "joe", "--password-file", password)
    assert launch(fake, "--nodes", "9", "--role", "gpu", "--failover-s", "600", *who) == 130
    assert seen == [(f"hf-{RunDir(fake.folder / 'run').spec().job[:8]}", "127.0.0.1")]
    assert not fake.frameworks


def test_the_next_master_is_asked_while_one_is_down(
    fake: FakeMesos, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_application, "launch_cluster_job", lambda *how: 0)
    assert launch(fake, "--master", f"http://127.0.0.1:1,{fake.url}") == 0
    assert fake.calls == ["GET_AGENTS", "SUBSCRIBE", "REVIVE", "SUBSCRIBE", "REVIVE", "TEARDOWN"]


def test_a_framework_ends_with_a_job_that_cannot_begin_and_a_lasting_one_is_named(
    fake: FakeMesos, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "cannot listen on 192.0.2.1" in refusal(fake, capsys, "--host", "192.0.2.1")
    names: list[str] = []

    def job(*how: object) -> int:
        names.extend(fake.frameworks)
        fake.away(True)
        return 0

    monkeypatch.setattr(launch_application, "launch_cluster_job", job)
    assert launch(fake, "--run-dir", str(fake.folder / "other")) == 0
    said = capsys.readouterr().err
    assert f"framework {names[0]} may still be there (Mesos does not answer at" in said
    assert f"remove it with `curl -d frameworkId={names[0]} MASTER/master/teardown`" in said
