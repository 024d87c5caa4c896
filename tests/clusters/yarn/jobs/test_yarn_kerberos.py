"""A ResourceManager that demands Kerberos believes a ticket of a real realm, and no other user.

Hadoop's web endpoint asks for the ticket (SPNEGO); its own servers trust each other without one, so
that hosts need no keytabs. The services API is behind the same endpoint: a whole job runs by it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.clusters.rest_link import RestAccess, RestLink
from holdfast.clusters.yarn.yarn_manager import NODES, VERSION
from holdfast.engine.core.errors import Refused
from labs import kdc, yarn_lab
from labs.cluster_run import JOB_S, ClusterRun, run_undisturbed
from labs.kdc import REALM, Kdc
from labs.yarn_lab import YarnLab

pytest.importorskip("gssapi", reason="gssapi is not installed: pip install 'holdfast[yarn]'")

MISSING = kdc.missing() or yarn_lab.missing()
FILTER = "org.apache.hadoop.security.AuthenticationFilterInitializer"
HTTP = "hadoop.http.authentication"
USER, STRANGER, PASSWORD = "ann", "mallory", "secret"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


class SecureLab(YarnLab):
    """Is a cluster whose web endpoint believes the tickets of a realm."""

    def __init__(self, folder: Path, realm: Kdc) -> None:
        self.realm = realm
        self._keytab, self._secret = realm.folder / "web.keytab", realm.folder / "secret"
        settings = {
            "hadoop.http.filter.initializers": FILTER,
            f"{HTTP}.type": "kerberos",
            f"{HTTP}.kerberos.principal": f"HTTP/localhost@{REALM}",
            f"{HTTP}.kerberos.keytab": str(self._keytab),
            f"{HTTP}.signature.secret.file": str(self._secret),
            "hadoop.security.auth_to_local": f"RULE:[1:$1@$0]({USER}@{REALM})s/@.*//",
        }
        super().__init__(folder, 2, settings)

    def __enter__(self) -> SecureLab:
        self._secret.write_text("signs cookies")
        self.realm.add("HTTP/localhost", keytab=self._keytab)
        self.realm.add(USER, password=PASSWORD)
        self.realm.add(STRANGER, password=PASSWORD)
        self.ticket = self.realm.log_in(USER, PASSWORD)
        super().__enter__()
        return self

    @property
    def url(self) -> str:
        return super().url.replace("127.0.0.1", "localhost")  # as its principal is named

    def _environment(self, host: str) -> dict[str, str]:
        realm = f"-Djava.security.krb5.conf={self.realm.configuration}"
        return {**super()._environment(host), "JDK_JAVA_OPTIONS": realm}

    def _get(self, path: str) -> dict[str, Any]:
        """Ask by another client than the one under test."""
        command = ["curl", "-s", "--negotiate", "-u", ":", "-m", "10", self.url + path]
        done = subprocess.run(command, env=self.ticket, stdout=subprocess.PIPE, check=False)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            return {}
        return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecureLab]:
    folder = tmp_path_factory.mktemp("kerberos")
    with Kdc(folder / "kdc") as realm, SecureLab(folder / "yarn", realm) as made:
        yield made


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return use(environment), which gives this process and its children the tickets of one."""

    def use_tickets(environment: Mapping[str, str]) -> None:
        for name, value in environment.items():
            if name.startswith("KRB5"):
                monkeypatch.setenv(name, value)

    return use_tickets


def ask(url: str, path: str, *, kerberos: bool = True) -> Any:
    link = RestLink(RestAccess(address=url, kerberos=kerberos), "YARN")
    answer = link.ask_now("GET", path)
    if not answer.accepted:
        raise link.failure(answer)
    return answer.document


def test_a_ticket_opens_the_services_and_the_nodes(lab: SecureLab, use: Any) -> None:
    use(lab.ticket)
    assert "hadoop_version" in str(ask(lab.url, VERSION))
    hosts = {node["nodeHostName"] for node in ask(lab.url, NODES)["nodes"]["node"]}
    assert hosts == {"nm0", "nm1"}


def test_whoever_has_no_ticket_reads_it(lab: SecureLab, use: Any) -> None:
    use(lab.realm.environment())
    with pytest.raises(Refused) as refused:
        ask(lab.url, VERSION)
    said = str(refused.value)
    assert said.startswith("there is no Kerberos ticket for HTTP@localhost (No Kerberos cred")
    assert said.endswith("): run kinit")
    with pytest.raises(Refused, match="demands a proof of identity: use --kerberos, and run kinit"):
        ask(lab.url, VERSION, kerberos=False)


def test_whoever_has_an_expired_ticket_reads_it(lab: SecureLab, use: Any) -> None:
    use(lab.realm.log_in(USER, PASSWORD, life_s=1))
    lab.until(lambda: refusal(lab.url), "the ticket has expired")
    said = "there is no Kerberos ticket for HTTP@localhost (Ticket expired): run kinit"
    assert refusal(lab.url) == said


def refusal(url: str) -> str:
    try:
        ask(url, VERSION)
    except Refused as error:
        return str(error)
    return ""


def test_an_address_without_a_principal_is_named(lab: SecureLab, use: Any) -> None:
    use(lab.ticket)
    said = refusal(lab.url.replace("localhost", "127.0.0.1"))
    assert said == (
        f"Kerberos has no principal HTTP/127.0.0.1 (Server HTTP/127.0.0.1@{REALM} not found in "
        "Kerberos database): write the address with the host name that the principal of its web "
        "server has"
    )


@pytest.mark.parametrize(
    ("user", "options", "sentence"),
    [
        ("", (), "YARN demands a proof of identity: use --kerberos, and run kinit"),
        ("", ("--kerberos",), "there is no Kerberos ticket for HTTP@localhost (No Kerberos cred"),
        (STRANGER, ("--kerberos",), f"YARN says: No rules applied to {STRANGER}@{REALM}"),
    ],
    ids=["no proof", "no ticket", "a principal that Hadoop does not map"],
)
def test_the_command_refuses_in_one_sentence(
    lab: SecureLab, use: Any, tmp_path: Path, user: str, options: Sequence[str], sentence: str
) -> None:
    use(lab.realm.log_in(user, PASSWORD) if user else lab.realm.environment())
    job = ClusterRun(tmp_path, ("yarn", "--rm", lab.url), "--nodes", "1", *options)
    with job.run:
        assert job.run.wait(JOB_S) == 2
    (line,) = job.run.err
    assert line.startswith(f"holdfast: --rm {lab.url} cannot be used: {sentence}")


def test_a_job_runs_by_a_ticket(lab: SecureLab, use: Any, tmp_path: Path) -> None:
    use(lab.ticket)
    undisturbed = run_undisturbed(tmp_path)
    job = ClusterRun(tmp_path / "job", ("yarn", "--rm", lab.url), "--nodes", "2", "--kerberos")
    (tmp_path / "job").mkdir()
    with job.run:
        first = job.serving(2)
        job.lose(first[0])
        job.serving(2, without=first[:1])
        assert job.digest() == undisturbed
    assert lab.applications() == []
    assert lab.registry() == []
