"""The rule on names of functions: they begin with a verb, and are no bare participles.

A reader who meets `self._told(x)` or `waits.after(n)` far from its definition must be able to guess
what happens. Properties are values, so these may be any noun or participle.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tidy_modules import Finding, Module, functions, in_src

BARE = frozenset(
    "added adopted after again agreed applied around arrived asked at audited awaited before "
    "began begun between borne broken brought by called came changed checked chosen closed "
    "committed compared computed connected copied counted dead decided described did died differ "
    "directed discarded done drained dropped due ended enough entered everyone everywhere exited "
    "expected failed fed fenced finished fitted formed found full gathered given gone happened "
    "heard held here hosted hung installed instead joined kept killed known late left listed "
    "loaded located lost made may met missed missing mixed moved must named needed new next_one "
    "noted noticed obtained often once opened ordered other others over owed placed proved queued "
    "read_by reached received recovered reduced refused released removed replaced reported "
    "restored resumed returned reviewed running said same saved seen sent served settled shown "
    "sorted sound spawned staged started stopped suddenly summed synced taken told too tried "
    "unheard unlike unreached used verified voted waited wanted watched when whole why "
    "within without woken worked worth written wrong".split()
)


def is_value(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function is read like an attribute, and not called."""
    return any("property" in ast.unparse(each) for each in function.decorator_list)


def find_bare_names(modules: list[Module]) -> Iterator[Finding]:
    for module in in_src(modules):
        for function in functions(module):
            if function.name.strip("_") in BARE and not is_value(function):
                what = f"`{function.name}` does not say what it does: begin with a verb"
                yield Finding(module, function.lineno, what)
