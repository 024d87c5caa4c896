"""Products are found, also those of another distribution: one of each kind of part."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.cli.main import main
from holdfast.engine import plugins
from holdfast.engine.core.errors import HoldfastError, UserError
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs.slurm_cluster import our_processes
from places import ROOT

EXAMPLE = ROOT / "examples" / "plugin"
OPTIONS = ["--nproc", "1", "--virtual", "4"]
SCRIPT = str(SCRIPTS / "paced.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Install the example; return the variable PYTHONPATH by which it is found."""
    folder = tmp_path_factory.mktemp("plugin")
    shutil.copytree(EXAMPLE, folder / "source")  # setuptools writes next to it
    site = str(folder / "site")
    words = ("install", "--quiet", "--no-deps", "--no-build-isolation", "--target", site)
    command = [sys.executable, "-m", "pip", *words, str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return os.pathsep.join([site, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_command(path: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *words],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=False,
    )


def test_a_plugin_of_another_distribution_is_found(installed: str) -> None:
    assert "count the events of a run, by kind" in run_command(installed, "--help").stdout
    assert "as an example of a plugin" in run_command(installed, "launch").stdout
    assert "there is no command 'tally'" in run_command("", "tally").stderr


@pytest.mark.timeout(300)
def test_a_job_runs_on_a_manager_of_a_plugin(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", installed)
    go, run_dir = tmp_path / "go", tmp_path / "run"
    command = ("launch", "desk", "--run-dir", str(run_dir), "--nodes", "2")
    with LocalRun(run_dir, OPTIONS, [SCRIPT, str(go)], command=command) as run:

        def serving() -> list[str]:
            with contextlib.suppress(HoldfastError):
                return serving_nodes(run.status())
            return []

        first = run.until(lambda: s if len(s := serving()) == 2 else [], RUN_S, "two nodes")
        for pid in our_processes(f"DESK_PLACEMENT={first[0]}"):
            strike(pid)

        def replaced() -> bool:
            return len(serving()) == 2 and first[0] not in serving()

        run.until(replaced, RUN_S, "another node in its place")
        go.touch()
        digest = finish(run)
    with LocalRun(tmp_path / "alone", OPTIONS, [SCRIPT, str(go)]) as run:
        assert finish(run) == digest


@pytest.mark.timeout(300)
def test_a_service_of_a_plugin_runs_on_servers_that_are_lost_and_move(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", installed)
    gate, weighted = tmp_path / "gate", str(SCRIPTS / "weighted.py")
    options = ["--nproc", "2", "--virtual", "4", "--servers", "2", "--hosted-service", "weights"]
    with LocalRun(tmp_path / "run", options, [weighted, str(gate)]) as run:

        def servers() -> set[int]:
            with contextlib.suppress(HoldfastError):
                return {each["pid"] for each in run.status()["servers"]}
            return set()

        run.until(lambda: len(servers()) == 2, RUN_S, "two servers")
        run.until(lambda: run.status()["step"] >= 5, RUN_S, "steps that ask the servers")
        lost = servers()
        for pid in lost:
            strike(pid)
        run.until(lambda: len(servers() - lost) == 2, RUN_S, "other processes of both")
        scaled = run_command(installed, "scale", str(run.run_dir.path), "--servers", "3")
        assert (scaled.returncode, scaled.stdout) == (0, "holdfast: the service is on 3 servers\n")
        gate.touch()
        digest = finish(run)
    with LocalRun(tmp_path / "alone", ["--nproc", "1", *options[2:]], [weighted, str(gate)]) as run:
        assert finish(run) == digest


def test_a_service_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, script = (
        ["run", "--run-dir", str(tmp_path / "run"), "--hosted-service", "none"],
        [SCRIPT, "go"],
    )
    assert main([*words, "--servers", "1", *script]) == 2
    assert "there is no hosted service 'none': use one of tables" in capsys.readouterr().err
    assert main([*words, *script]) == 2
    assert (
        "--hosted-service none needs servers: say how many with --servers"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "run").exists()


def test_a_listener_of_a_plugin_is_kept_beside_a_run(
    installed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", installed)
    (tmp_path / "go").touch()
    options = [*OPTIONS, "--listener", "tally"]
    with LocalRun(tmp_path / "run", options, [SCRIPT, str(tmp_path / "go"), "20"]) as run:
        finish(run)
    counted = json.loads((tmp_path / "run" / "tally.json").read_text())
    assert counted["view"] >= 1
    shown = run_command(installed, "tally", str(tmp_path / "run"))
    assert json.loads(shown.stdout)["view"] == counted["view"]


def test_a_listener_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--run-dir", str(tmp_path / "run"), "--listener", "nobody", SCRIPT, "go"]
    assert main(["run", *words]) == 2
    assert "there is no listener 'nobody': use one of dashboard" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_module_of_a_plugin_that_cannot_be_imported_is_named(
    source: str,
    error: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken_desk.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    plugin = plugins.Plugin(
        commands={"broken": plugins.Command(text="", module="broken_desk")},
        managers={"broken": plugins.Manager(name="b", adapter="", launcher="broken_desk")},
        listeners={"broken": "broken_desk"},
    )
    monkeypatch.setattr(plugins, "find_foreign", lambda: [plugin])
    run = ["run", "--run-dir", str(tmp_path / "run"), "--listener", "broken", SCRIPT, "go"]
    for kind, words in {
        "command": ["broken"],
        "launcher": ["launch", "broken"],
        "listener": run,
    }.items():
        assert main(words) == 2
        printed = capsys.readouterr().err
        named = f"the {kind} 'broken' cannot be used, because its module broken_desk cannot be"
        assert printed == f"holdfast: {named} imported: {error}\n"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("no_such_module:PLUGIN", "cannot be loaded: ModuleNotFoundError"),
        ("json:dumps", "is no holdfast Plugin"),
    ],
)
def test_a_plugin_that_cannot_be_loaded_is_named(
    value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = EntryPoint(name="broken", value=value, group=plugins.GROUP)
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [broken])
    plugins.find_foreign.cache_clear()
    try:
        with pytest.raises(UserError, match=rf"plugin broken \({value}\).*{said}"):
            plugins.find_manager("unheard of")
        assert plugins.find_manager("slurm").name == "Slurm"
        assert plugins.find_launcher("k8s").name == "Kubernetes"
        assert plugins.find_command("status").__module__.endswith("status_command")
    finally:
        plugins.find_foreign.cache_clear()
