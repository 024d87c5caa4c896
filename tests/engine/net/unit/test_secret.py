"""Where the job's secret may come from, and from where it is refused."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.engine.commands.run_command import make_spec, parser
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.net.secret import (
    derive_peer_key,
    load_secret,
    parse_secret,
    read_run_dir,
    read_secret_file,
)
from holdfast.engine.runtime.node.worker_process import WorkerTemplate
from holdfast.engine.runtime.rundir import RunDir

A, B, C = "a1" * 32, "b2" * 32, "c3" * 40


def written(path: Path, text: str, mode: int) -> Path:
    path.write_text(text)
    path.chmod(mode)
    return path


def test_the_order_of_places(tmp_path: Path) -> None:
    file = written(tmp_path / "file", A + "\n", 0o600)
    written(tmp_path / "secret", C, 0o600)
    environ = {"HOLDFAST_SECRET": B, "PATH": "/bin"}
    assert load_secret(dict(environ), file=file, run_dir=tmp_path) == bytes.fromhex(A)
    assert load_secret(dict(environ), run_dir=tmp_path) == bytes.fromhex(B)
    assert load_secret({}, run_dir=tmp_path) == bytes.fromhex(C)
    with pytest.raises(UserError, match="there is no job secret: give the job"):
        load_secret({})


def test_children_never_inherit_it(tmp_path: Path) -> None:
    file = written(tmp_path / "file", A, 0o600)
    for place in (file, None):
        environ = {"HOLDFAST_SECRET": B, "PATH": "/bin"}
        load_secret(environ, file=place)
        assert environ == {"PATH": "/bin"}
    environ = {"HOLDFAST_SECRET": "not hexadecimal"}
    with pytest.raises(UserError):
        load_secret(environ)
    assert environ == {}


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700])
def test_a_file_of_ours_is_taken_when_closed_to_others(mode: int, tmp_path: Path) -> None:
    assert read_secret_file(written(tmp_path / "f", A, mode)) == bytes.fromhex(A)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o601, 0o620, 0o610])
def test_a_file_open_to_others_is_refused(mode: int, tmp_path: Path) -> None:
    path = written(tmp_path / "f", A, mode)
    with pytest.raises(UserError) as told:
        read_secret_file(path)
    assert str(told.value) == (
        f"the secret file {path} has mode {mode:04o}, so others can read or change it: chmod 0600 "
        "(in Kubernetes, defaultMode: 0400, or 0440 with an fsGroup)"
    )


def test_group_may_read_root_s_file_but_not_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "f", A, 0o440)
    owner = path.stat().st_uid
    if owner == 0:
        assert read_secret_file(path) == bytes.fromhex(A)
    as_ours(monkeypatch, 1000)
    with pytest.raises(UserError, match="has mode 0440"):
        read_secret_file(path)
    monkeypatch.setattr(os, "geteuid", lambda: 1001)  # the file is 1000's
    with pytest.raises(UserError, match="belongs to user 1000: it must be yours or root's"):
        read_secret_file(path)


def as_ours(monkeypatch: pytest.MonkeyPatch, user: int) -> None:
    """Files, whoever's they are, look like this user's, and so do we."""
    real = os.fstat

    def fstat(descriptor: int) -> os.stat_result:
        found = list(real(descriptor))
        found[4] = user
        return os.stat_result(found)

    monkeypatch.setattr(os, "fstat", fstat)
    monkeypatch.setattr(os, "geteuid", lambda: user)


def test_a_secret_as_kubernetes_mounts_it(tmp_path: Path) -> None:
    """secret -> ..data/secret, ..data -> a folder with a time in its name."""
    folder = tmp_path / "..2026_01_01"
    folder.mkdir()
    written(folder / "secret", A, 0o400)
    (tmp_path / "..data").symlink_to("..2026_01_01")
    (tmp_path / "secret").symlink_to("..data/secret")
    assert read_secret_file(tmp_path / "secret") == bytes.fromhex(A)
    (folder / "secret").chmod(0o644)  # Kubernetes' default
    with pytest.raises(UserError, match=r"has mode 0644.*in Kubernetes, defaultMode: 0400"):
        read_secret_file(tmp_path / "secret")


def test_a_path_that_is_no_secret_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, why in [
        ("absent", "cannot be read: No such file or directory"),
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
    ]:
        with pytest.raises(UserError, match=why) as told:
            read_secret_file(tmp_path / name)
        assert str(tmp_path / name) in str(told.value)


MAKE_ONE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", f"W holds 0 hexadecimal digits, and a job secret needs at least 64: {MAKE_ONE}"),
        ("ab" * 31, "W holds 62 hexadecimal digits, and a job secret needs at least 64"),
        ("a" * 65, f"W does not hold hexadecimal digits: {MAKE_ONE}"),
        ("correct horse battery staple", "W does not hold hexadecimal digits"),
        ("ä" * 64, "W does not hold hexadecimal digits"),
    ],
)
def test_bad_secrets_are_refused_and_not_shown(text: str, why: str) -> None:
    with pytest.raises(UserError) as told:
        parse_secret(text, "W")
    assert str(told.value).startswith(why)
    assert not text or text not in str(told.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path / "f", "", 0o600)
    os.truncate(path, 1 << 40)  # a hole: it takes no space, but reading it would take all memory
    with pytest.raises(UserError, match="does not hold hexadecimal digits"):
        read_secret_file(path)


def test_a_run_directory_without_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no readable secret .*: is it a run"):
        read_run_dir(tmp_path)


def test_each_job_has_a_peer_key_of_its_own_that_tells_nothing_of_the_secret() -> None:
    secrets = [bytes.fromhex(A), bytes.fromhex(B)]
    keys = [derive_peer_key(secret, job) for secret in secrets for job in ("one", "two")]
    assert {len(key) for key in keys} == {32}
    assert len({*keys, *secrets}) == 6
    assert derive_peer_key(bytes.fromhex(A), "one") == keys[0]


def test_workers_get_the_peer_key_and_never_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "secret", A, 0o600)
    monkeypatch.setenv("HOLDFAST_SECRET", B)
    spec = make_spec(parser().parse_args([__file__]))
    template = WorkerTemplate(run_dir=RunDir(tmp_path), spec=spec, host="127.0.0.1")
    environment = template.environment(WorkerId(0), Incarnation(1), 3, 4)
    assert environment["HOLDFAST_PEER_KEY"] == derive_peer_key(bytes.fromhex(A), spec.job).hex()
    assert not any(secret in value for value in environment.values() for secret in (A, B))


def test_a_run_directory_gets_the_secret_as_a_new_file_of_its_own(tmp_path: Path) -> None:
    """The secret goes neither through an older link, nor into a file that other users can read."""
    spec = make_spec(parser().parse_args([__file__]))
    stolen = tmp_path / "stolen"
    for place in ("linked", "dangling", "open"):
        (tmp_path / place).mkdir()
    (tmp_path / "linked" / "secret").symlink_to(written(stolen, "before", 0o666))
    (tmp_path / "dangling" / "secret").symlink_to(tmp_path / "elsewhere")
    old = written(tmp_path / "open" / "secret", "a longer text than any secret" * 9, 0o666)
    with open(old) as reader:
        for place in ("linked", "dangling", "open"):
            run_dir = RunDir(tmp_path / place)
            run_dir.create(spec, bytes.fromhex(A))
            assert run_dir.secret() == bytes.fromhex(A)
            found = (run_dir.path / "secret").lstat()
            assert stat.S_ISREG(found.st_mode)
            assert stat.S_IMODE(found.st_mode) == 0o600
        assert A not in reader.read()  # a process that had it open sees the old file
    assert stolen.read_text() == "before"
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("load", [read_run_dir, lambda path: load_secret({}, run_dir=path)])
def test_a_run_directory_s_secret_must_be_closed_to_others_and_no_link(
    tmp_path: Path, load: Callable[[Path], bytes]
) -> None:
    path = written(tmp_path / "secret", A, 0o644)
    with pytest.raises(UserError, match=r"secret has mode 0644, so others can read or change it"):
        load(tmp_path)
    path.chmod(0o600)
    assert load(tmp_path) == bytes.fromhex(A)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="secret is a link: put the secret itself there"):
        load(tmp_path)
    path.unlink()
    os.mkfifo(path, 0o600)
    with pytest.raises(UserError, match="is not a regular file"):
        load(tmp_path)
