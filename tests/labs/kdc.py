"""Runs a Kerberos key distribution centre of its own, MIT's, on a free port of the loopback.

    with Kdc(tmp_path / "kdc") as kdc:
        kdc.add("HTTP/localhost", keytab=tmp_path / "web.keytab")
        kdc.add("ann", password="secret")
        environment = kdc.log_in("ann", "secret")

No other realm, ticket or configuration of this machine is read or changed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from labs.yarn_lab import free_ports

REALM = "HOLDFAST.TEST"
UP_S = 30.0
COMMAND_S = 60.0
TOOLS = {
    "krb5kdc": "krb5-kdc",
    "kdb5_util": "krb5-kdc",
    "kadmin.local": "krb5-kdc",
    "kinit": "krb5-user",
    "curl": "curl",  # by which the lab asks its servers
}
PLACES = f"{os.environ.get('PATH', '')}:/usr/sbin"
CONFIGURATION = """[libdefaults]
 default_realm = {realm}
 dns_lookup_kdc = false
 dns_lookup_realm = false
 dns_canonicalize_hostname = false
 rdns = false
 udp_preference_limit = 1
[realms]
 {realm} = {{
  kdc = 127.0.0.1:{port}
 }}
"""
SERVER = """[kdcdefaults]
 kdc_listen = 127.0.0.1:{port}
 kdc_tcp_listen = 127.0.0.1:{port}
[realms]
 {realm} = {{
  database_name = {folder}/principal
  key_stash_file = {folder}/stash
  max_life = 1d
 }}
[logging]
 kdc = FILE:{folder}/kdc.log
"""


def missing() -> str:
    """Return the reason why it cannot run here, or ""."""
    for tool, package in TOOLS.items():
        if shutil.which(tool, path=PLACES) is None:
            return f"there is no {tool} (package {package})"
    return ""


class Kdc:
    """Keeps the server of one realm; used as a context manager. `folder`: its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "krb5.conf"
        self._port = 0
        self._server: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Kdc:
        self.folder.mkdir(parents=True)
        (self._port,) = free_ports(1)
        given = {"realm": REALM, "port": self._port, "folder": self.folder}
        self.configuration.write_text(CONFIGURATION.format(**given))
        (self.folder / "kdc.conf").write_text(SERVER.format(**given))
        self._run("kdb5_util", "create", "-s", "-r", REALM, "-P", "master")
        with open(self.folder / "server.log", "wb") as log:
            self._server = subprocess.Popen(
                [find("krb5kdc"), "-n", "-r", REALM],
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server is not None:
            self._server.kill()
            self._server.wait()

    def environment(self, tickets: str = "none") -> dict[str, str]:
        """Return the environment of a process that uses this realm, with tickets of that name."""
        return {
            **os.environ,
            "KRB5_CONFIG": str(self.configuration),
            "KRB5_KDC_PROFILE": str(self.folder / "kdc.conf"),
            "KRB5CCNAME": f"FILE:{self.folder}/tickets-{tickets}",
        }

    def add(self, name: str, *, password: str = "", keytab: Path | None = None) -> None:
        """Make a principal, with a password or with random keys that a keytab gets."""
        key = f"-pw {password}" if password else "-randkey"
        self._run("kadmin.local", "-r", REALM, "-q", f"addprinc {key} {name}")
        if keytab is not None:
            self._run("kadmin.local", "-r", REALM, "-q", f"ktadd -k {keytab} {name}")

    def log_in(self, name: str, password: str, life_s: int = 3600) -> dict[str, str]:
        """Get a ticket for a user; return the environment of processes that have it."""
        environment = self.environment(f"{name.replace('/', '-')}-{life_s}")
        words = [find("kinit"), "-l", f"{life_s}s", f"{name}@{REALM}"]
        subprocess.run(
            words,
            env=environment,
            input=f"{password}\n".encode(),
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=COMMAND_S,
        )
        return environment

    def _run(self, *words: str) -> None:
        subprocess.run(
            [find(words[0]), *words[1:]],
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=COMMAND_S,
        )

    def _wait(self) -> None:
        deadline = time.monotonic() + UP_S
        while not self._answers():
            assert time.monotonic() < deadline, f"no KDC in {UP_S:g} s ({self.folder})"
            time.sleep(0.1)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", self._port), 1.0).close()
            return True
        return False


def find(tool: str) -> str:
    found = shutil.which(tool, path=PLACES)
    assert found, tool
    return found
