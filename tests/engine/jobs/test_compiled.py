"""Compiled models: the same bits whatever a worker has computed before, or a word about it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from conftest import RUN_S, SCRIPTS, finish
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node import fork_server
from holdfast.engine.train.process_settings import advice

TOLD = "net is compiled with automatic dynamic shapes"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", "auto"), ("in place", "False"), ("inductor", "False"), ("inductor", "True")],
)
def test_workers_and_deaths_change_nothing(backend: str, dynamic: str, tmp_path: Path) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 1 step 2 kill\nworker 0 step 5 kill\n")
    script, last = [str(SCRIPTS / "compiled.py"), backend, dynamic], []
    for name, options in (
        ("alone", ["--nproc", "1"]),
        ("two", ["--nproc", "2"]),
        ("deaths", ["--nproc", "2", "--faults", str(faults)]),
    ):
        with LocalRun(tmp_path / name, [*options, "--virtual", "4"], script) as run:
            last.append(finish(run))
        said = [event["text"] for event in run.events("compiled")]
        assert any(TOLD in text for text in said) == (dynamic == "auto")
    assert last == last[:1] * 3
    assert len(run.events("lost")) == 2


@pytest.mark.slow_with("None-True-True")
@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize(("dynamic", "told"), [(None, True), (True, False), (False, False)])
def test_automatic_dynamic_shapes_are_told(inner: bool, dynamic: bool | None, told: bool) -> None:
    model: nn.Module = nn.Sequential(nn.Linear(2, 2))
    if inner:
        model[0].compile(backend="aot_eager", dynamic=dynamic)
    else:
        model = torch.compile(model, backend="aot_eager", dynamic=dynamic)
    assert (TOLD in advice({"net": model})) == told
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):
        assert advice({"net": model}) == ""
    assert advice({"net": nn.Linear(2, 2)}) == ""


COMPILER = """#!/bin/sh
# Dies with its worker while it writes one of two files for the first time.
for each in "$@"; do
    [ "$before" = -o ] && out=$each
    before=$each
done
case $out in *.main.so*) kind=kernel ;; *.so*) kind=trial ;; esac
if [ -n "$kind" ] && mkdir "{marks}/$kind" 2> /dev/null; then
    : > "$out"
    kill -9 $PPID
    exec sleep 60
fi
exec c++ "$@"
"""


@pytest.mark.slow
@pytest.mark.timeout(4 * RUN_S)
@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler (package g++)")
def test_a_death_while_a_kernel_is_compiled_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither half a kernel stays in the cache, nor half a trial of what the processor can do."""
    script, last = [str(SCRIPTS / "compiled.py"), "inductor", "True"], []
    compiler, marks = tmp_path / "g++", tmp_path / "marks"
    compiler.write_text(COMPILER.format(marks=marks))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv(fork_server.VARIABLE)  # it has read CXX already
    for name in ("deaths", "undisturbed"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / f"{name}-kernels"))
        marks.mkdir(exist_ok=True)
        with LocalRun(tmp_path / name, ["--nproc", "2", "--virtual", "4"], script) as run:
            assert run.wait(2 * RUN_S) == 0, run.log()
        last.append(run.out[-1])
        assert sorted(each.name for each in marks.iterdir()) == ["kernel", "trial"]
        assert len(run.events("lost")) == (2 if name == "deaths" else 0)
    assert last == last[:1] * 2
