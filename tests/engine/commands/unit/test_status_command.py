"""What `holdfast status` prints where no coordinator is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.commands.status_command import main

# The first two are runs; the third is a folder that a run has not filled.
NAMES = ("20261130-222823-3082", "20261201-090000-17", "20261202-100000-1")


@pytest.mark.parametrize(("runs", "named"), [(0, "RUN"), (2, f"holdfast-runs/{NAMES[1]}")])
def test_a_status_without_a_run_names_the_newest(
    runs: int,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        (tmp_path / "holdfast-runs" / name).mkdir(parents=True)
    for name in NAMES[:runs]:
        (tmp_path / "holdfast-runs" / name / "job.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == f"holdfast status: error: name one run directory: holdfast status {named}"
