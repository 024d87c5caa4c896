"""`holdfast launch k8s` has kubectl apply and resume jobs, and reports refusals of Kubernetes."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.cli.main import main

LAUNCH = ["launch", "k8s", "--image", "i", "--nodes", "2"]
# It answers what files of its folder hold, and fails with the lines of the file FAIL-VERB-N.
KUBECTL = """\
#!/bin/sh
cd {folder}
echo "$@" >> asked
env > environment
count=$(grep -c "^$1" asked)
if test -e "fail-$1-$count"; then cat "fail-$1-$count" >&2; exit 1; fi
case "$1" in
get) test ! -e "$2" || cat "$2" ;;
*) cat > "given-$1-$count" ;;
esac
"""


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a kubectl on the path; return the folder with its answers and its input."""
    program = tmp_path / "kubectl"
    program.write_text(KUBECTL.format(folder=tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def answer(folder: Path, kind: str, found: Any) -> None:
    (folder / kind).write_text(json.dumps(found))


def given(folder: Path, verb: str, number: int) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((folder / f"given-{verb}-{number}").read_text()))


def test_a_missing_namespace_leaves_nothing(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = 'Error from server (NotFound): error when creating "STDIN": namespaces "ml" not found'
    (kubectl / "fail-apply-1").write_text(f"{line}\n{line}\n")
    assert main([*LAUNCH, "--namespace", "ml", "--apply", "train.py"]) == 2
    told = capsys.readouterr().err
    assert told == 'holdfast: kubectl apply has failed: namespaces "ml" not found\n'
    assert (kubectl / "asked").read_text() == "apply -f -\n"


def test_a_job_is_applied_whole_or_removed(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = 'clusterroles.rbac.authorization.k8s.io is forbidden: User "u" cannot create resource'
    (kubectl / "fail-apply-2").write_text(
        f'Error from server (Forbidden): error when creating "STDIN": {reason}\n'
    )
    assert main([*LAUNCH, "--apply", "train.py"]) == 2
    told = capsys.readouterr().err
    assert f"kubectl apply has failed: {reason}: nothing is left of the job; " in told
    assert len(told.splitlines()) == 1
    removed = given(kubectl, "delete", 1)
    assert {"Secret", "Job", "ClusterRole"} <= {each["kind"] for each in removed}


def test_a_refused_coordinator_is_reported(
    kubectl: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reason = 'pods "hf-1-x" is forbidden: failed quota: q: must specify limits.cpu'
    answer(kubectl, "job", {"status": {"ready": 0}})
    answer(kubectl, "events", {"items": [{"message": f"Error creating: {reason}"}]})
    assert main([*LAUNCH, "--apply", "train.py"]) == 2
    told = capsys.readouterr().err
    assert f"refuses the coordinator's pod (Error creating: {reason}) and goes on trying" in told
    assert "--coordinator-pod" in told

    answer(kubectl, "job", {"status": {"active": 1}})
    assert main([*LAUNCH, "--apply", "train.py"]) == 0


def test_a_deleted_job_is_made_again(kubectl: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*LAUNCH, "train.py"]) == 0
    objects = {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}
    name = objects["Job"]["metadata"]["name"]
    command = ["launch", "k8s", "--namespace", "ml", "--resume", name]
    assert main(command) == 2
    told = capsys.readouterr().err
    assert f"there is no job {name} in the namespace ml, nor its Secret" in told

    kept = objects["Secret"]["stringData"].items()
    data = {key: base64.b64encode(value.encode()).decode() for key, value in kept}
    answer(kubectl, "secret", {"data": data})
    assert main(command) == 0
    assert given(kubectl, "create", 1) == [objects["Job"]]
    assert "delete" not in (kubectl / "asked").read_text()


def test_only_the_kubeconfig_of_the_environment_counts(
    kubectl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Preferences and other variables would change what kubectl prints, or whether it asks."""
    monkeypatch.setenv("KUBECONFIG", "mine")
    monkeypatch.setenv("KUBECTL_KUBERC", "true")
    monkeypatch.setenv("KUBERC", "preferences")
    answer(kubectl, "job", {"status": {"active": 1}})
    assert main([*LAUNCH, "--apply", "train.py"]) == 0
    found = (kubectl / "environment").read_text().splitlines()
    assert {"KUBECONFIG=mine", "KUBERC=off"} <= set(found)
    assert not [line for line in found if line.startswith("KUBECTL_")]
