"""Runs a pod's container in runc, from the files of an image, as a kubelet and containerd would.

A container has namespaces of its own for processes, mounts, IPC and its host name, a control group
with its memory's limit, a root file system over the image, and process 1 is the pod's command. It
shares the network of this machine (a pod with hostNetwork). Volumes:

- emptyDir: anybody may write. `medium: Memory`: a tmpfs, as large as the memory's limit;
- secret: the files have the volume's mode, belong to root, and to the group fsGroup if given;
- a claim: the hostPath of its volume. It belongs to root like a new disk; with fsGroup the group
  may write, as kubelets see to on disks (on a real hostPath they would not);
- hostPath: as it is.

Without a volume at /dev/shm a container has 64 MB there.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.containers import SITE, ContainerImage, run, unmount_below

SHARED_BYTES = 64 * 2**20
UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "k": 10**3, "M": 10**6, "G": 10**9}
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
# What containerd leaves to root.
CAPABILITIES = [
    f"CAP_{name}"
    for name in "CHOWN DAC_OVERRIDE FSETID FOWNER MKNOD NET_RAW SETGID SETUID SETFCAP SETPCAP "
    "NET_BIND_SERVICE SYS_CHROOT KILL AUDIT_WRITE".split()
]
TOGETHER = "together"  # a file beside the containers: one that the kernel kills in ends whole
GROUPS = Path("/sys/fs/cgroup")

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """Names who runs in a container, by numbers."""

    user: int
    group: int
    shared: int | None  # fsGroup

    @classmethod
    def of(cls, image: ContainerImage, pod: Manifest, container: Manifest) -> Owner:
        asked = {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}
        user, _, group = (image.user or "0").partition(":")
        return cls(
            int(asked.get("runAsUser", user)),
            int(asked.get("runAsGroup", group or 0)),
            asked.get("fsGroup"),
        )


class PodContainer:
    """Makes the bundle of one container in a folder, and the words that run it.

    `claimed`: returns the folder of a claim. `secret`: returns the files of a Secret.
    """

    def __init__(
        self,
        folder: Path,
        image: ContainerImage,
        pod: Manifest,
        container: Manifest,
        claimed: Callable[[str], Path],
        secret: Callable[[str], Mapping[str, bytes]],
    ) -> None:
        self.folder = folder
        self.name = f"holdfast-{pod['metadata']['uid']}"
        self._image = image
        self._pod = pod
        self._container = container
        self._claimed = claimed
        self._secret = secret
        self._owner = Owner.of(image, pod, container)
        self._limit = parse_size(
            container.get("resources", {}).get("limits", {}).get("memory", "0")
        )

    def make(
        self, command: list[str], environment: Mapping[str, str], account: Path | None
    ) -> None:
        """Make the bundle; `account`: the folder with the pod's token."""
        self.folder.mkdir(parents=True)
        self._mount_root()
        given = {**self._image.environment, **environment}
        (self.folder / "config.json").write_text(
            json.dumps(self._describe(command, given, account))
        )

    def run_words(self) -> list[str]:
        """Return the command that runs it and stays, passes signals on, and exits as it does."""
        return [*self._runc(), "run", "--keep", "--bundle", str(self.folder), self.name]

    def exec_words(self, command: list[str]) -> list[str]:
        return [*self._runc(), "exec", self.name, *command]

    def count_oom_kills(self) -> int:
        """Count the OOM kills in this container."""
        for path in (
            GROUPS / "memory" / self.name / "memory.oom_control",
            GROUPS / self.name / "memory.events",
        ):
            with contextlib.suppress(OSError):
                lines = path.read_text().splitlines()
                return next(int(x.split()[1]) for x in lines if x.startswith("oom_kill "))
        return 0

    def must_end(self) -> bool:
        """Return whether a kill for lack of memory ends all of it, as in a group of version 2."""
        return (self.folder.parent / TOGETHER).exists() and self.count_oom_kills() > 0

    def remove(self) -> None:
        """Kill its processes, and remove its control group and its files."""
        subprocess.run(
            [*self._runc(), "delete", "--force", self.name], capture_output=True, check=False
        )
        unmount_below(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _runc(self) -> list[str]:
        return runc_words(self.folder.parent)

    def _mount_root(self) -> None:
        for name in ("rootfs", "upper", "work"):
            (self.folder / name).mkdir()
        layers = (
            f"lowerdir={self._image.files},upperdir={self.folder}/upper,workdir={self.folder}/work"
        )
        run(["mount", "-t", "overlay", "overlay", "-o", layers, str(self.folder / "rootfs")])

    # ------------------------------------------------------------ the description for runc

    def _describe(
        self, command: list[str], environment: Mapping[str, str], account: Path | None
    ) -> Manifest:
        asked = self._container.get("securityContext", {})
        owner = self._owner
        user: Manifest = {"uid": owner.user, "gid": owner.group}
        user["additionalGids"] = [] if owner.shared is None else [owner.shared]
        sets = {} if owner.user else dict.fromkeys(("effective", "permitted"), CAPABILITIES)
        memory = {"limit": self._limit, "swap": self._limit} if self._limit else {}
        kinds = ("pid", "ipc", "uts", "mount")
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": user,
                "args": command,
                "env": [f"{key}={value}" for key, value in environment.items()],
                "cwd": self._container.get("workingDir") or self._image.folder or "/",
                "capabilities": {"bounding": CAPABILITIES, **sets},
                "noNewPrivileges": asked.get("allowPrivilegeEscalation") is False,
            },
            "root": {"path": "rootfs", "readonly": bool(asked.get("readOnlyRootFilesystem"))},
            "hostname": self._pod["metadata"]["name"],
            "mounts": [*self._system_mounts(), *self._volume_mounts(account)],
            "linux": {
                "cgroupsPath": f"/{self.name}",
                "resources": {"memory": memory} if memory else {},
                "namespaces": [{"type": kind} for kind in kinds],
            },
        }

    def _system_mounts(self) -> list[Manifest]:
        hosts = self.folder / "hosts"
        hosts.write_text(f"127.0.0.1 localhost {self._pod['metadata']['name']}\n")
        shm = f"size={SHARED_BYTES}"
        return [
            describe_mount("proc", "/proc", "proc"),
            describe_mount("tmpfs", "/dev", "tmpfs", "nosuid", "mode=755", "size=65536k"),
            describe_mount(
                "devpts", "/dev/pts", "devpts", "nosuid", "newinstance", "ptmxmode=0666"
            ),
            describe_mount("shm", "/dev/shm", "tmpfs", "nosuid", "nodev", "mode=1777", shm),
            describe_mount("sysfs", "/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            describe_mount("cgroup", "/sys/fs/cgroup", "cgroup", "nosuid", "noexec", "nodev", "ro"),
            bind(hosts, "/etc/hosts"),
            bind(self._image.site, SITE, "ro"),
        ]

    def _volume_mounts(self, account: Path | None) -> list[Manifest]:
        volumes = {each["name"]: each for each in self._pod["spec"].get("volumes", ())}
        found = [
            self._mount_volume(volumes[mount["name"]], mount)
            for mount in self._container.get("volumeMounts", ())
        ]
        if account is not None:
            found.append(bind(account, ACCOUNT, "ro"))
        return found

    def _mount_volume(self, volume: Manifest, mount: Manifest) -> Manifest:
        place, how = mount["mountPath"], ["ro"] if mount.get("readOnly") else []
        if volume.get("emptyDir", {}).get("medium") == "Memory":
            size = parse_size(volume["emptyDir"].get("sizeLimit", "0")) or self._limit
            sized = [f"size={size}"] if size else []
            return describe_mount("tmpfs", place, "tmpfs", "nosuid", "nodev", "mode=1777", *sized)
        folder = self.folder / "volumes" / volume["name"]
        if "secret" in volume:
            self._write_secret(volume["secret"], folder)
            how = ["ro"]
        elif "persistentVolumeClaim" in volume:
            folder = self._claimed(volume["persistentVolumeClaim"]["claimName"])
            folder.mkdir(parents=True, exist_ok=True)
            self._share(folder)
        elif "hostPath" in volume:
            folder = Path(volume["hostPath"]["path"])
        elif not folder.exists():
            folder.mkdir(parents=True)
            folder.chmod(0o777)
            self._share(folder)
        return bind(folder, place, *how)

    def _write_secret(self, secret: Manifest, folder: Path) -> None:
        folder.mkdir(parents=True)
        mode = secret.get("defaultMode", 0o644)
        for name, data in self._secret(secret["secretName"]).items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(mode if self._owner.shared is None else mode | 0o440)
            os.chown(folder / name, 0, self._owner.shared or 0)

    def _share(self, folder: Path) -> None:
        """Let the group fsGroup write in a volume, as the kubelet does before a pod starts."""
        group = self._owner.shared
        if group is None:
            return
        for path in (folder, *folder.rglob("*")):
            with contextlib.suppress(FileNotFoundError):
                if not path.is_symlink():
                    os.chown(path, -1, group)
                    extra = 0o2770 if path.is_dir() else 0o660
                    path.chmod(path.stat().st_mode | extra)


def runc_words(folder: Path) -> list[str]:
    """Return how a command to runc begins that is on the containers of a folder."""
    return ["runc", "--root", str(folder / "state")]


def parse_size(text: str) -> int:
    """Return how many bytes a size is, written as Kubernetes does: 2Gi."""
    unit = text.lstrip("0123456789.")
    return int(float(text[: len(text) - len(unit)]) * UNITS.get(unit, 1))


def bind(source: Path, place: str, *options: str) -> Manifest:
    return describe_mount(str(source), place, "bind", "rbind", *options)


def describe_mount(source: str, place: str, kind: str, *options: str) -> Manifest:
    return {"source": source, "destination": place, "type": kind, "options": list(options)}


def read_secret(found: Manifest) -> dict[str, bytes]:
    """Return the files of a Secret."""
    plain = {key: text.encode() for key, text in found.get("stringData", {}).items()}
    return {**{k: base64.b64decode(v) for k, v in found.get("data", {}).items()}, **plain}


def write_account(folder: Path, token: str, authority: Path, namespace: str) -> Path:
    """Write what a pod needs to reach the API as its service account; anybody there may read it."""
    folder.mkdir(parents=True)
    for name, data in (
        ("token", token.encode()),
        ("ca.crt", authority.read_bytes()),
        ("namespace", namespace.encode()),
    ):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o644)
    return folder


def remove_all(folder: Path) -> None:
    """Remove all containers below a folder that are still there."""
    state = folder / "state"
    for name in os.listdir(state) if state.exists() else ():
        words = [*runc_words(folder), "delete", "--force", name]
        subprocess.run(words, capture_output=True, check=False)
    unmount_below(folder)
