"""The tutorial's script and commands do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.testing.local_run import LocalRun, strike

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
RUN_S = 120.0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_tutorial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    with LocalRun(Path("one"), ["--nproc", "1", "--virtual", "4"], ["train.py"]) as run:
        assert run.wait(RUN_S) == 0, run.log()
        model = run.out[-1]
    assert re.fullmatch(r"model [0-9a-f]{16}", model)
    with LocalRun(Path("killed"), ["--nproc", "4"], ["train.py"]) as run:
        members = run.until_members(4)
        run.until(lambda: run.status()["step"] >= 1, RUN_S, "a step")
        assert strike(members[2])
        assert run.wait(RUN_S) == 0, run.log()
        assert run.out[-1] == model
    assert any("worker 2 was lost: ended by SIGKILL" in line for line in run.err)
    for words, told in (
        (["ledger", "verify", "killed"], "every sample was used exactly once"),
        (["compare", "one", "killed"], "the runs do not differ in their 1500 common steps"),
        (["replay", "killed", "--step", "70"], "computed again, with the recorded result: 0-70"),
    ):
        assert f"holdfast {' '.join(words[:2])}" in PAGE.read_text()
        assert main(words) == 0
        assert told in capsys.readouterr().out
