"""A real shell completes commands and options by the script of `holdfast completion`."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.engine import plugins
from holdfast.engine.commands.completion_command import list_words
from holdfast.engine.plugins import Command, Plugin

LIMIT_S = 60.0
SHELLS = {
    "bash": ("--norc", "--noprofile", "-i"),
    "zsh": ("-f", "-i"),
    "fish": ("--no-config", "-i"),
}
SHOW = 'holdfast() { echo "got: $*."; }\n'
FISH_SHOW = 'function holdfast; echo "got: $argv."; end\n'
# The words as they are typed, and as the command gets them.
TYPED = {
    "holdfast compl\t\n": "completion",
    "holdfast ckpt exp\t--fo\t\n": "ckpt export --format",
    "holdfast run --npr\t2 train\t\n": "run --nproc 2 train_me.py",
    "holdfast launch slu\t--nodes-mi\t3\n": "launch slurm --nodes-min 3",
}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes_commands_options_and_files(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"`{shell}` is not installed (package {shell})")
    assert main(["completion", shell]) == 0
    show = FISH_SHOW if shell == "fish" else SHOW
    (tmp_path / "script").write_text(show + capsys.readouterr().out)
    (tmp_path / "train_me.py").touch()
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(path, [shell, *SHELLS[shell]], {"HOME": str(tmp_path), "TERM": "dumb", "PS1": ""})
    try:
        os.write(terminal, b". ./script\n")
        for typed, words in TYPED.items():
            os.write(terminal, typed.encode())
            assert read_answer(terminal) == words
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def read_answer(terminal: int) -> str:
    """Return the words that the command was called with."""
    seen = ""
    while (found := re.search(r"got: (.*)\.\r?\n", seen)) is None:
        assert select.select([terminal], [], [], LIMIT_S)[0], seen
        seen += os.read(terminal, 4096).decode(errors="replace")
    return found[1]


def test_a_strangers_command_with_a_parser_of_its_own_is_only_asked_for_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = Command(text="odd", module="test_completion", main="run_odd")
    monkeypatch.setattr(plugins, "find_foreign", lambda: [Plugin(commands={"odd": command})])
    words = list_words()
    assert "odd" in [word.text for word in words[()]]
    assert ("odd",) not in words
    assert ASKED == ["--help"]


ASKED: list[str] = []


def run_odd(argv: list[str]) -> int:
    """Stand for a command that uses no argparse."""
    ASKED.extend(argv)
    return 0
