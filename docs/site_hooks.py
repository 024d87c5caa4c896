"""Bring the whole repository's prose into the site that MkDocs builds from docs/.

Documents link to files outside docs/: sheets, examples, stories. On a code host these links lead to
the files. Here each of these files becomes a page of the site, and the links lead to it. A comment
`<!-- docstring: NAME -->` becomes the documentation of that Python name, by mkdocstrings, with the
arguments that make it and all public members; `<!-- docstring: NAME: MEMBER, MEMBER -->` has these
members alone. `<!-- object: NAME: MEMBER -->` is for a class whose objects scripts never make.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(r"^(```|~~~).*?^\1[ \t]*$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<=\]\()([^()\s#]+)(#[^()\s]*)?(?=\))")
DOCSTRING = re.compile(
    r"^<!-- (docstring|object): ([\w.]+)(?:: (\w+(?:, \w+)*))? -->$", re.MULTILINE
)
ELSEWHERE = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\ssrc=[\"']?(?:https?:)?//[^>]*>"
    r"|<link\b(?=[^>]*rel=[\"']?(?:stylesheet|preconnect|icon))[^>]*href=[\"']?(?:https?:)?//[^>]*>"
)
TEXTS = {"", ".md", ".py", ".toml", ".txt"}
RENAMED = {"README.md": "index.md", "docs/README.md": "pages.md"}


def page_of(path: str) -> str:
    """Return the source name, in the site, of a file or folder of the repository."""
    if path in RENAMED:
        return RENAMED[path]
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    if (ROOT / path).is_dir():
        return f"{path}/index.md"
    return path if path.endswith(".md") else f"source/{path}.md"


def targets(path: str, markdown: str) -> Iterator[str]:
    """Find the files and folders of the repository that a document links to."""
    for found in LINK.finditer(FENCE.sub("", markdown)):
        target = resolve(path, found[1])
        if target is not None:
            yield target


def resolve(path: str, link: str) -> str | None:
    """Return the path in the repository that a link of a document means; None if there is none."""
    if re.match(r"[a-z]+:|/", link):
        return None
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).exists() else None


def markdown_of(path: str) -> str:
    """Return a file of the repository as Markdown; a folder as a list of its documents."""
    full = ROOT / path
    if full.is_dir():
        inside = sorted(full.glob("*.md")) or sorted(full.rglob("*.py"))
        names = [each.relative_to(full).as_posix() for each in inside]
        return f"# {path}\n\n" + "".join(f"- [{name}]({name})\n" for name in names)
    text = full.read_text()
    if full.suffix == ".md":
        return text
    return f"# {path}\n\n~~~~{full.suffix.removeprefix('.')}\n{text.rstrip()}\n~~~~\n"


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each file outside docs/ that some page links to, however far."""
    index = files.get_file_from_path("README.md")
    assert index is not None
    files.remove(index)
    waiting = ["README.md", "docs/README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
    waiting += [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    pages: dict[str, str] = {}
    while waiting:
        path = waiting.pop()
        if path in pages or not is_text(path):
            continue
        pages[path] = markdown_of(path)
        folder = f"{path}/" if (ROOT / path).is_dir() else path
        waiting += targets(folder, pages[path])
    for path, markdown in pages.items():
        uri = page_of(path)
        if (old := files.get_file_from_path(uri)) is not None:
            files.remove(old)
        folder = f"{path}/" if (ROOT / path).is_dir() else path
        content = rewrite(folder, uri, markdown)
        files.append(File.generated(config, uri, content=content))
    return files


def is_text(path: str) -> bool:
    """Return whether a file can be a page; a folder can."""
    return (ROOT / path).is_dir() or Path(path).suffix in {
        "",
        ".md",
        ".py",
        ".txt",
        ".toml",
        ".cff",
    }


def rewrite(path: str, uri: str, markdown: str) -> str:
    """Point the links of a document at pages of the site, and name the docstrings to show."""

    def replace(found: re.Match[str]) -> str:
        target = resolve(path, found[1])
        if target is None:
            return found[0]
        to = posixpath.relpath(page_of(target), posixpath.dirname(uri) or ".")
        return to + (found[2] or "")

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(replace, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    parts.append(LINK.sub(replace, markdown[end:]))
    return DOCSTRING.sub(show_docstring, "".join(parts))


def show_docstring(found: re.Match[str]) -> str:
    """Return the order for mkdocstrings that a comment stands for."""
    kind, name, members = found.groups()
    options: list[str] = []
    if kind == "object":
        options += ["merge_init_into_class: false", "show_bases: false", "members: false"]
    if members:
        options += [f"members: [{members}]", "inherited_members: true", "show_bases: false"]
    unique = dict(option.split(": ", 1) for option in options)
    lines = [f"      {option}: {value}" for option, value in unique.items()]
    return "\n".join([f"::: {name}", *(["    options:", *lines] if lines else [])])


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse a page that would load a script, a style or a picture from another server."""
    found = ELSEWHERE.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} loads from another server: {found[0]}")
    return output
