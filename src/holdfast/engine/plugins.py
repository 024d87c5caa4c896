"""Finds the parts that products bring to the engine, which imports no product.

A product is a folder of holdfast, or another distribution. A `Plugin` describes its parts. In a
folder this is the value PLUGIN; another distribution has an entry point of the group
`holdfast.plugins`. A plugin names modules, which are imported when they are needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from holdfast.engine.core.errors import HoldfastError, UserError

GROUP = "holdfast.plugins"
ROOT = Path(__file__).parents[1]
COMMANDS = "engine.commands"

Found = TypeVar("Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """Describes a word after `holdfast`.

    `module` has a function of the name `main`: it takes the words that follow, and returns an exit
    status.
    """

    text: str
    module: str
    main: str = "main"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manager:
    """Describes a cluster manager.

    `name`: as people write it. `adapter`: a module with `open_manager(plan, spec)`, which returns a
    ClusterManager. `launcher`: a module with `main(argv)`, the command `holdfast launch WORD`, and
    `go_on(run_dir, host, port)`, which resumes a job; both return an exit status. Without one there
    is no such command. `word`: if it is not the manager's key. `text`: a line for the help.
    """

    name: str
    adapter: str
    launcher: str = ""
    word: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """Describes the parts that a product brings, each by a key.

    `services`: modules of hosted services, which run in processes of their own on the job's nodes;
    `listen(spec, identity, host, say)` starts one and returns its address, and `connect` is called
    in each worker (engine/train/script/service_link.py). `listeners`: modules
    whose `listen(run_dir, tls)` returns a process (Kept) to run next to a job, whose files it
    reads; UserError if it cannot work here.
    """

    commands: Mapping[str, Command] = field(default_factory=dict)
    managers: Mapping[str, Manager] = field(default_factory=dict)
    services: Mapping[str, str] = field(default_factory=dict)
    listeners: Mapping[str, str] = field(default_factory=dict)


def list_commands() -> dict[str, Command]:
    """List the commands of all products, ours first."""
    return dict(_merge(lambda plugin: plugin.commands))


def list_launchers() -> dict[str, Manager]:
    """List the managers that have a launcher, by the word that calls it, ours first."""
    return dict(_merge(_launchers_of))


def find_command(key: str) -> Callable[[list[str]], int]:
    """Import the function of a command. UserError: there is no such command, or it is broken."""
    command = _find("command", key, lambda plugin: plugin.commands)
    main: Callable[[list[str]], int] = getattr(load("command", key, command.module), command.main)
    return main


def find_manager(key: str) -> Manager:
    """Return a cluster manager. UserError if there is none of that name."""
    return _find("manager", key, lambda plugin: plugin.managers)


def find_launcher(word: str) -> Manager:
    """Return the manager whose launcher this word calls. UserError if there is none."""
    return _find("launcher", word, _launchers_of)


def name_service(key: str) -> str:
    """Return the name of a hosted service's module. UserError: there is none."""
    return _find("hosted service", key, lambda plugin: plugin.services)


def find_service(key: str) -> ModuleType:
    """Import the module of a hosted service. UserError: there is none, or it is broken."""
    return load("hosted service", key, name_service(key))


def find_listener(key: str) -> ModuleType:
    """Import the module of a listener of runs. UserError: there is no such one, or it is broken."""
    return load("listener", key, _find("listener", key, lambda plugin: plugin.listeners))


def load(kind: str, key: str, module: str) -> ModuleType:
    """Import a module that a plugin names. UserError with the error of its code."""
    try:
        return import_module(module)
    except HoldfastError:
        raise
    except Exception as error:  # noqa: BLE001 - the code may be a stranger's
        raise UserError(
            f"the {kind} {key!r} cannot be used, because its module {module} cannot be imported: "
            f"{type(error).__name__}: {error}"
        ) from None


def _find(kind: str, key: str, choose: Callable[[Plugin], Mapping[str, Found]]) -> Found:
    for plugins in (find_ours, find_foreign):  # the foreign ones take longer to find
        for plugin in plugins():
            if key in choose(plugin):
                return choose(plugin)[key]
    names = ", ".join(key for key, _ in _merge(choose))
    raise UserError(f"there is no {kind} {key!r}: use one of {names}")


def _launchers_of(plugin: Plugin) -> dict[str, Manager]:
    return {each.word or key: each for key, each in plugin.managers.items() if each.launcher}


def _merge(choose: Callable[[Plugin], Mapping[str, Found]]) -> Iterator[tuple[str, Found]]:
    taken: set[str] = set()
    for plugin in (*find_ours(), *find_foreign()):
        new = {key: found for key, found in choose(plugin).items() if key not in taken}
        taken.update(new)
        yield from new.items()


@functools.cache
def find_ours() -> list[Plugin]:
    """Load the plugins of this distribution, the engine's first."""
    folders = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    packages = [import_module(f"{ROOT.name}.{name}") for name in (COMMANDS, *folders)]
    return [package.PLUGIN for package in packages if hasattr(package, "PLUGIN")]


@functools.cache
def find_foreign() -> list[Plugin]:
    """Load the plugins of other distributions. UserError if one is broken."""
    from importlib.metadata import entry_points  # takes 25 ms, and most commands are ours

    found = []
    for each in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        try:
            plugin = each.load()
        except Exception as error:  # noqa: BLE001 - the code is not ours
            raise UserError(
                f"the plugin {each.name} ({each.value}) of another package cannot be loaded: "
                f"{type(error).__name__}: {error}"
            ) from None
        if not isinstance(plugin, Plugin):
            raise UserError(f"the plugin {each.name} ({each.value}) is no holdfast Plugin")
        found.append(plugin)
    return found
