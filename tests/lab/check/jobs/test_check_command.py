"""Tests `holdfast check` on real processes: scripts that keep the promise, and some that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.local_run import processes_that_name
from holdfast.lab.check import check_command
from holdfast.lab.check.check_command import (
    DIFFERS_BY_WORKER,
    LACKS_AT_JOIN,
    START,
    TracedRun,
    compare,
)
from support import until

SCRIPT = """
import torch, holdfast
from torch import nn
{before}
job = holdfast.join()
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1))
{shard}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 8)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=8)
scale = 1.0
for step in job.steps(data, until={until}):
    for a, b in step:
        step.backward(scale * nn.functional.mse_loss(model(a), b))
    {after}
    optimizer.step()
"""


def check(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    *options: str,
    before: str = "",
    after: str = "pass",
    shard: str = "",
    until: int = 400,
) -> tuple[int, dict]:
    script = path / "train.py"
    script.write_text(SCRIPT.format(before=before, after=after, shard=shard, until=until))
    code = check_command.main(["--json", "--steps", "8", *options, str(script)])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_script_that_keeps_the_promise(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a few steps, too: the check waits for the worker that is to join."""
    code, found = check(tmp_path, capsys, until=9)
    assert (code, found["same"], found["findings"]) == (0, True, [])
    assert [run["name"] for run in found["runs"]] == [
        "1 worker",
        "2 workers",
        "2 workers, one killed in step 3",
    ]
    assert found["steps"] >= 8


@pytest.mark.slow
def test_a_variable_that_a_joiner_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = check(tmp_path, capsys, after="scale *= 0.9")
    assert code == 1
    assert "steps change scale in line" in found["runs"][2]["told"][0]


CARRIES = """
hidden = [torch.zeros(16)]
def remember(module, inputs, output):
    found = output + 0.5 * hidden[0]
    hidden[0] = output.detach().mean(0)
    return found
model[0].register_forward_hook(remember)
"""


@pytest.mark.slow
def test_a_script_that_carries_something_is_named_before_any_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(before="", after="pass", shard=CARRIES, until=400))
    assert check_command.main(["--steps", "8", str(script)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "hidden[0]" in said, said
    assert "deterministic" not in said
    before, _, _ = said.partition("wrongly")
    assert "hidden[0]" in before


@pytest.mark.slow
def test_random_numbers_between_steps_and_sets_of_strings_are_keyed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "import random; scales = [1 + random.random(), *map(len, {'a', 'bcd', 'ef'})]"
    after = "model[0].bias.data += torch.rand(16) * scales[0] * scales[1]"
    code, found = check(tmp_path, capsys, before=before, after=after)
    assert (code, found["same"]) == (0, True)


@pytest.mark.slow
def test_workers_of_several_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shard = "torch.distributed.fsdp.fully_shard(model, mesh=job.mesh)"
    before = "import torch.distributed.fsdp"
    options = ("--procs-per-worker", "2")
    code, found = check(tmp_path, capsys, *options, before=before, shard=shard, until=9)
    assert (code, found["same"], found["findings"]) == (0, True, []), found


@pytest.mark.slow
def test_a_join_that_fails_is_told_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = "import os; wide = 16 if os.environ['HOLDFAST_INCARNATION'] == '1' else 17"
    after = "model.extra = nn.Linear(1, wide)"
    code, found = check(tmp_path, capsys, before=before, after=after)
    assert code == 1
    problem = found["runs"][2]["problem"]
    assert "\n" not in problem, problem


def traced(name: str, *digests: str) -> TracedRun:
    states = {step: {"model.weight": "same", "model.bias": d} for step, d in enumerate(digests)}
    return TracedRun(name=name, states={"0-1": states}, told=())


@pytest.mark.parametrize(
    ("alone", "two", "killed", "cause", "step"),
    [
        ("abc", "abc", "abc", None, 0),
        ("abc", "abc", "abd", LACKS_AT_JOIN, 2),
        ("abc", "abd", "abd", DIFFERS_BY_WORKER, 2),
        ("abc", "xbc", "abc", START, 0),
    ],
)
def test_the_first_tensor_that_differs_is_named(
    alone: str, two: str, killed: str, cause: str | None, step: int
) -> None:
    runs = [traced("1", *alone), traced("2", *two), traced("killed", *killed)]
    found = compare(runs, 3)
    assert [(each.step, each.path, each.cause) for each in found][:1] == (
        [] if cause is None else [(step, "model.bias", cause)]
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["none.py"], "there is no script none.py"),
        (["--virtual", "1", "SCRIPT"], "--virtual 1 is too few"),
        (["--steps", "2", "SCRIPT"], "--steps 2 is too few"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(UserError, match=says):
        check_command.main([str(script) if each == "SCRIPT" else each for each in arguments])


@pytest.mark.slow
def test_a_check_that_is_killed_leaves_no_process_behind(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(before="", after="pass", shard="", until=400))
    command = [sys.executable, "-m", "holdfast.cli.main", "check", str(script)]
    check = subprocess.Popen(command, env={**os.environ, "TMPDIR": str(tmp_path)})

    def trained() -> bool:
        assert check.poll() is None
        return any(tmp_path.glob("holdfast-check-*/*/traces/*"))

    try:
        until(trained, "a step")
    finally:
        check.kill()
        check.wait()
    until(lambda: not processes_that_name(tmp_path), "the end of all that it has started")


@pytest.mark.slow
def test_a_script_that_fails_everywhere_is_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('boom')")
    assert check_command.main([str(script)]) == 1
    said = capsys.readouterr().out
    assert said.count("boom") <= 2  # the worker that says so may be another one
    assert "holdfast-check-" not in said


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_check_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script, disk = tmp_path / "train.py", tmp_path / "disk"
    script.write_text(SCRIPT.format(before="", after="pass", shard="", until=400))
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=40k", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    try:
        with pytest.raises(UserError, match=f"recorded in {disk}: No space left on device"):
            check_command.main([str(script)])
        until(lambda: not processes_that_name(disk), "the end of all that it has started")
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
