"""`holdfast completion SHELL` prints a script with which a shell completes commands and options.

The script has all words in it, so completing starts no Python. They come from the
parsers of the commands, also those of plugins.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.plugins import find_command, find_launcher, list_commands, list_launchers, load

USE = """where to keep the script:
  bash   holdfast completion bash > ~/.local/share/bash-completion/completions/holdfast
  zsh    holdfast completion zsh > ~/.holdfast.zsh; echo '. ~/.holdfast.zsh' >> ~/.zshrc
  fish   holdfast completion fish > ~/.config/fish/completions/holdfast.fish"""
# `before`: the words between `holdfast` and the one to complete, each with a blank after it.
BASH = """_holdfast() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} before= words= n
  for ((n = 1; n < COMP_CWORD; n++)); do before+="${{COMP_WORDS[n]}} "; done
  case $before in
{cases}
  esac
  COMPREPLY=()
  if [[ $cur == -* || $words != -* ]]; then COMPREPLY=($(compgen -W "$words" -- "$cur")); fi
}}
complete -o default -F _holdfast holdfast
"""
ZSH = "autoload -Uz compinit bashcompinit\nwhence compdef >/dev/null || compinit\nbashcompinit\n"
FISH = """function __holdfast_follows
    set -l words (commandline -opc)[2..-1]
    string match -q -- $argv[1] "$words "
end
"""


@dataclass(frozen=True, slots=True)
class Word:
    """Describes a command or an option. `takes_value`: it is an option with a value."""

    text: str
    help: str
    takes_value: bool = False


Words = dict[tuple[str, ...], list[Word]]  # by the words before


class _Parsed(Exception):
    """Carries the parser of a command out of it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def main(argv: list[str]) -> int:
    """Run the command; `argv` follows `holdfast completion`."""
    found = argparse.ArgumentParser(
        prog="holdfast completion",
        description="Print a script with which a shell completes holdfast's commands and options.",
        epilog=USE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument("shell", choices=SHELLS)
    print_plain(SHELLS[found.parse_args(argv).shell](list_words()), end="")
    return 0


def list_words() -> Words:
    """List all commands, their subcommands and their options."""
    found: Words = {(): []}
    for name, command in list_commands().items():
        found[()].append(Word(name, command.text))
        found.update(_list_words_of((name,), find_command(name)))
    found["launch",] = []
    for word, manager in list_launchers().items():
        found["launch",].append(Word(word, manager.text))
        launch = load("launcher", word, find_launcher(word).launcher).main
        found.update(_list_words_of(("launch", word), launch))
    return found


def _list_words_of(name: tuple[str, ...], command: Callable[[list[str]], int]) -> Words:
    """Call a command to obtain its parser; without one it is only asked for its help."""

    def stop(parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise _Parsed(parser)

    parse = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign,assignment]
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            command(["--help"])
    except _Parsed as parsed:
        return dict(_walk(name, parsed.parser))
    except SystemExit:
        pass
    finally:
        argparse.ArgumentParser.parse_known_args = parse  # type: ignore[method-assign]
    return {}


def _walk(
    before: tuple[str, ...], parser: argparse.ArgumentParser
) -> Iterator[tuple[tuple[str, ...], list[Word]]]:
    formatter, words = parser._get_formatter(), []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            texts = {each.dest: each.help or "" for each in action._choices_actions}
            yield before, [Word(name, texts.get(name, "")) for name in action.choices]
            for name, each in action.choices.items():
                yield from _walk((*before, name), each)
            return
        if action.help != argparse.SUPPRESS:
            text = formatter._expand_help(action) if action.help else ""
            words += [Word(each, text, action.nargs != 0) for each in action.option_strings]
    yield before, words


def _list_cases(words: Words) -> Iterator[tuple[str, str, list[Word]]]:
    """Yield the words before, a star if more may follow them, and the words to choose from."""
    for before, following in words.items():
        has_options = bool(following) and following[0].text.startswith("-")
        yield "".join(f"{word} " for word in before), "*" * has_options, following


def _write_bash(words: Words) -> str:
    cases = [
        f"    {shlex.quote(before)}{star}) words={shlex.quote(' '.join(w.text for w in found))} ;;"
        for before, star, found in _list_cases(words)
    ]
    return BASH.format(cases="\n".join(cases))


def _write_zsh(words: Words) -> str:
    return ZSH + _write_bash(words)


def _write_fish(words: Words) -> str:
    lines = [FISH]
    for before, star, found in _list_cases(words):
        test = shlex.quote(f"__holdfast_follows {shlex.quote((before or ' ') + star)}")
        for word in found:
            kind = "-l" if word.text.startswith("--") else "-s" if word.text[0] == "-" else "-fa"
            value = " -r" if word.takes_value else ""
            parts = shlex.quote(word.text.lstrip("-")), value, shlex.quote(word.help)
            lines.append("complete -c holdfast -n {} {} {}{} -d {}\n".format(test, kind, *parts))
    return "".join(lines)


SHELLS = {"bash": _write_bash, "zsh": _write_zsh, "fish": _write_fish}
