"""Builds the image of the Dockerfile with buildah, for tests, without a registry.

All of the Dockerfile runs as it is for a user: it builds the wheel of Holdfast, installs it with
its extras into an environment of its own by pip, and makes the user. The tests' shortcuts:

- the base is Debian bookworm with python3, made by mmdebstrap;
- the base "has torch" already, like many images, by links to the packages of the running
  environment, whose folder is mounted when the image is built and when it runs: torch is 5 GB.
  Packages that Holdfast itself needs are not linked;
- pip asks no index: the packages that Holdfast needs are packed into wheels again from the running
  environment. So pip refuses to build the image if a requirement is missing.

The programs are Debian's packages buildah, runc and mmdebstrap; they need root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROGRAMS = ("buildah", "runc", "mmdebstrap")
DEBIAN, DEBIAN_PYTHON = "bookworm", (3, 11)
SITE, LINKS, WHEELS = "/site", "/linked", "/wheels"  # where they are in containers
BASE, IMAGE, PAUSE = "localhost/base", "localhost/holdfast", "localhost/pause:1"
EXTRAS = ("kubernetes", "objects")
BUILD_S = 600.0


def missing() -> str:
    """Return the reason why no image can be built and run here; empty if one can."""
    for name in PROGRAMS:
        if not shutil.which(name):
            return f"{name} is not installed (package {name})"
    if os.geteuid() != 0:
        return "containers need root here"
    if sys.version_info[:2] != DEBIAN_PYTHON:
        return "the image's Python is 3.11, and this environment's packages are for another one"
    return ""


class ImageStore:
    """Keeps images in a folder of its own, while used as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._config = folder / "storage.conf"

    def __enter__(self) -> ImageStore:
        self.folder.mkdir(parents=True, exist_ok=True)
        places = f'runroot = "{self.folder}/run"\ngraphroot = "{self.folder}/graph"\n'
        self._config.write_text(f'[storage]\ndriver = "overlay"\n{places}')
        return self

    def __exit__(self, *exc: object) -> None:
        self._buildah("rm", "--all")
        self._buildah("rmi", "--all", "--force")
        unmount_below(self.folder)

    def build_base(self) -> None:
        """Make the base: Debian, and links to torch of the running environment."""
        context = self.folder / "base"
        context.mkdir()
        include = "--include=python3,python3-venv,libgomp1"
        command = ["mmdebstrap", "--quiet", "--variant=minbase", include, DEBIAN]
        run([*command, str(context / "debian.tar")])
        links = context / "linked"
        links.mkdir()
        for name in find_linked():
            (links / name).symlink_to(f"{SITE}/{name}")
        (context / "linked.pth").write_text(f"{LINKS}\n")
        (context / "Dockerfile").write_text(
            "FROM scratch\n"
            "ADD debian.tar /\n"
            f"COPY linked {LINKS}\n"
            "COPY linked.pth /usr/local/lib/python3.11/dist-packages/\n"
        )
        self.build(BASE, context)
        shutil.rmtree(context)

    def build_holdfast(self) -> None:
        """Build the image of the repository's own Dockerfile."""
        wheels = self.folder / "wheels"
        wheels.mkdir()
        for name in find_packed():
            pack(distribution(name), wheels)
        given = {"BASE": BASE, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": WHEELS}
        self.build(IMAGE, ROOT, given, {wheels: WHEELS})
        shutil.rmtree(wheels)

    def build(
        self,
        name: str,
        context: Path,
        arguments: dict[str, str] | None = None,
        mounts: dict[Path, str] | None = None,
    ) -> None:
        words = ["build", "--quiet", "--isolation=chroot", f"--tag={name}"]
        for key, value in (arguments or {}).items():
            words.append(f"--build-arg={key}={value}")
        for folder, place in {**(mounts or {}), site_packages(): SITE}.items():
            words.append(f"--volume={folder}:{place}:ro")
        self._buildah(*words, str(context))

    def build_pause(self, program: Path) -> None:
        """Build the image of a pod's empty container, from the program that waits in it."""
        context = self.folder / "pause"
        context.mkdir()
        shutil.copy(program, context)
        lines = ("FROM scratch", "COPY pause /", 'ENTRYPOINT ["/pause"]', "")
        (context / "Dockerfile").write_text("\n".join(lines))
        self.build(PAUSE, context)

    def export(self, name: str, archive: Path) -> None:
        """Write an image into an archive that containerd can import."""
        self._buildah("push", name, f"oci-archive:{archive}:{name}")

    def _buildah(self, *words: str) -> str:
        return run(["buildah", *words], {"CONTAINERS_STORAGE_CONF": str(self._config)})


def run(command: Sequence[str], more: dict[str, str] | None = None) -> str:
    """Return the output of a command; its errors if it fails."""
    done = subprocess.run(
        command,
        env={**os.environ, **(more or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=BUILD_S,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}\n{done.stderr}"
    return done.stdout.strip()


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder, the newest first."""
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        place = line.split(" ")[1].replace("\\040", " ")
        if Path(place).is_relative_to(folder):
            with contextlib.suppress(subprocess.CalledProcessError):
                subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)


# ---------------------------------------------------------------- packages of this environment


def site_packages() -> Path:
    """Return the folder that torch of this environment is in."""
    found: Path = Path(str(distribution("torch").locate_file(""))).resolve()
    return found


def find_linked() -> list[str]:
    """Return the entries of torch, and of packages that only torch needs."""
    others = set(find_packed())
    return sorted(
        {
            path.parts[0]
            for name in find_needed(["torch"]) - others
            for path in distribution(name).files or ()
            if path.parts[0] != ".."
        }
    )


def find_packed() -> list[str]:
    """Return the packages that pip needs besides torch to install Holdfast."""
    direct = [each.name for each in requirements("holdfast", EXTRAS) if each.name != "torch"]
    return sorted(find_needed([*direct, "setuptools"]))


def find_needed(names: Sequence[str]) -> set[str]:
    """Return packages, and all packages that these need."""
    found: set[str] = set()
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, ()) for name in names]
    while waiting:
        name, extras = waiting.pop()
        plain = name.lower().replace("_", "-")
        if plain not in found or extras:
            found.add(plain)
            waiting += [(each.name, tuple(each.extras)) for each in requirements(name, extras)]
    return found


def requirements(name: str, extras: Sequence[str] = ()) -> Iterator[Requirement]:
    """Yield what a package needs here."""
    for text in distribution(name).requires or ():
        each = Requirement(text)
        asked = [{"extra": extra} for extra in ("", *extras)]
        if each.marker is None or any(each.marker.evaluate(one) for one in asked):
            yield each


def pack(found: Distribution, folder: Path) -> None:
    """Make a wheel from an installed package; pip makes its commands and compiled files again."""
    about = found.read_text("WHEEL") or ""
    tag = next(line.split(": ")[1] for line in about.splitlines() if line.startswith("Tag: "))
    name = found.metadata["Name"].replace("-", "_").replace(".", "_")
    files = [
        path
        for path in found.files or ()
        if path.parts[0] != ".." and path.suffix != ".pyc" and path.parts[-1] != "RECORD"
    ]
    record = next(path for path in found.files or () if path.parts[-1] == "RECORD")
    kept = {str(path) for path in (*files, record)}
    lines = [
        line
        for line in (found.read_text("RECORD") or "").splitlines()
        if line.rsplit(",", 2)[0].strip('"') in kept
    ]
    with zipfile.ZipFile(folder / f"{name}-{found.version}-{tag}.whl", "w") as wheel:
        for path in files:
            if (there := Path(str(path.locate()))).exists():
                wheel.write(there, str(path))
        wheel.writestr(str(record), "\n".join(lines) + "\n")
