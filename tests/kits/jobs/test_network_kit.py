"""The network laboratory: real sockets of real processes in real namespaces."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.net.descriptors import wait_readable
from labs import network_lab as network
from labs.network_lab import OWNER, Direction, Host, Lab, clean_leftovers
from labs.relay import Relay
from network_peers import PATIENCE_S, PYTHON, SILENCE_S, call, connected, receive, serve, until
from places import TESTS

pytestmark = pytest.mark.skipif(bool(Lab.available()), reason=Lab.available())

PIDS = os.stat("/proc/self/ns/pid").st_ino
EVERYONE = {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1)}  # from, to


def mailbox(host: Host) -> socket.socket:
    found = host.socket(socket.SOCK_DGRAM)
    found.bind((host.address, 0))
    found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    found.settimeout(SILENCE_S)
    return found


def paths(lab: Lab) -> set[tuple[int, int]]:
    """Return the pairs of hosts between which datagrams arrive."""
    found: set[tuple[int, int]] = set()
    with contextlib.ExitStack() as stack:
        boxes = [stack.enter_context(mailbox(host)) for host in lab.hosts]
        for sender, receiver in EVERYONE:
            boxes[sender].sendto(bytes([sender]), boxes[receiver].getsockname())
        while len(found) < len(EVERYONE):
            ready = wait_readable(boxes, SILENCE_S)
            if not ready:
                break
            found |= {(box.recv(10)[0], boxes.index(box)) for box in ready}
    return found


def namespaces_held() -> list[int]:
    """File descriptors of this process that keep a network namespace."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("net:"):
                found.append(int(name))
    return found


def tool_in(namespace_fd: int, *command: str) -> str:
    return subprocess.check_output(
        ["nsenter", f"--net=/proc/self/fd/{namespace_fd}", *command],
        pass_fds=[namespace_fd],
        text=True,
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(3) as lab:
        yield lab


@pytest.fixture
def lab(shared: Lab) -> Iterator[Lab]:
    """Three hosts without faults or processes."""
    yield shared
    shared.heal_all()
    shared.crash_all()


# ---------------------------------------------------------------- what is separate, what is shared


def test_processes_of_two_hosts_talk_over_tcp(lab):
    a, b, _ = lab.hosts
    _, port = serve(b)
    assert call(a, b.address, port) == "over the wire"
    assert paths(lab) == EVERYONE


def test_each_host_has_its_own_loopback_and_ports(lab):
    a, b, c = lab.hosts
    with socket.socket() as reserved:  # outside, where no other process may listen in this time
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        serve(a, address="127.0.0.1", port=port)
        serve(b, address="127.0.0.1", port=port)
        assert call(a, "127.0.0.1", port) == call(b, "127.0.0.1", port) == "over the wire"
        assert call(c, "127.0.0.1", port) == "ConnectionRefusedError"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))


def test_a_host_reaches_nothing_outside_the_lab(lab):
    a = lab.hosts[0]
    with Lab(1) as other:  # the same addresses, another lab
        _, port = serve(other.hosts[0])
        assert call(a, a.address, port) == "ConnectionRefusedError"
        assert call(other.hosts[0], a.address, port) == "over the wire"
    with a.socket() as out, pytest.raises(OSError, match="unreachable"):
        out.connect(("192.0.2.1", 80))


def test_file_system_processes_and_sockets_in_files_are_shared(lab, tmp_path):
    a, b, _ = lab.hosts
    lab.cut(a)
    path = str(tmp_path / "socket")
    program = (
        "import socket, sys\n"
        "server = socket.socket(socket.AF_UNIX)\n"
        "server.bind(sys.argv[1])\n"
        "server.listen()\n"
        "print(flush=True)\n"
        "server.accept()[0].sendall(b'across')\n"
    )
    server = a.popen([*PYTHON, program, path], stdout=subprocess.PIPE)
    with server.stdout:
        server.stdout.readline()
    ask = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
    ask += "print(s.recv(9))"
    there = b.run([*PYTHON, ask, path], capture_output=True, text=True)
    assert there.stdout == "b'across'\n", there.stderr
    look = b.run(["cat", f"/proc/{server.pid}/comm"], capture_output=True, text=True)
    assert look.stdout.startswith("python")
    assert b.run(["sh", "-c", f"kill -0 {os.getpid()}"]).returncode == 0


def test_abstract_unix_sockets_stay_in_their_host(lab):
    a, b, _ = lab.hosts
    name = f"\0holdfast-test-{os.getpid()}"
    with a.entered(), socket.socket(socket.AF_UNIX) as server:
        server.bind(name)
        server.listen()
        with socket.socket(socket.AF_UNIX) as near:
            near.connect(name)
        with b.entered(), socket.socket(socket.AF_UNIX) as far:
            assert far.connect_ex(name) == errno.ECONNREFUSED


def test_popen_starts_the_process_itself(lab):
    a, b, _ = lab.hosts
    program = "import os; print(os.getpid(), os.environ['COLOUR'], flush=True); input()"
    environment = {**os.environ, "COLOUR": "green"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with a.popen([*PYTHON, program], env=environment, **pipes) as child:
        assert child.stdout.readline().split() == [str(child.pid).encode(), b"green"]
        assert a.pids() == [child.pid]
        assert b.pids() == []
        child.send_signal(signal.SIGTERM)
        assert child.wait(PATIENCE_S) == -signal.SIGTERM


def test_the_calling_thread_always_comes_home(lab):
    home = os.stat("/proc/thread-self/ns/net").st_ino
    with pytest.raises(FileNotFoundError):
        lab.hosts[0].popen(["/nowhere/to/be/found"])

    def fail() -> None:
        with lab.hosts[0].entered():
            assert os.stat("/proc/thread-self/ns/net").st_ino != home
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert os.stat("/proc/thread-self/ns/net").st_ino == home


def test_other_programs_can_enter_by_path(lab):
    command = ["nsenter", f"--net={lab.hosts[1].namespace}", "ip", "-br", "address"]
    assert lab.hosts[1].address in subprocess.check_output(command, text=True)


# ---------------------------------------------------------------- cuts


@pytest.mark.parametrize(
    ("direction", "lost"),
    [
        (Direction.BOTH, {(0, 1), (0, 2), (1, 0), (2, 0)}),
        ("both", {(0, 1), (0, 2), (1, 0), (2, 0)}),
        ("in", {(1, 0), (2, 0)}),
        ("out", {(0, 1), (0, 2)}),
    ],
)
def test_a_cut_host_is_silent_in_that_direction_only(lab, direction, lost):
    fault = lab.cut(lab.hosts[0], direction)
    assert paths(lab) == EVERYONE - lost
    assert fault.dropped() == len(lost)
    lab.heal(fault)
    assert paths(lab) == EVERYONE
    assert fault.dropped() == len(lost)


def test_the_first_frames_of_a_lab_go_only_where_they_are_sent():
    with Lab(3) as lab:
        fault = lab.cut(lab.hosts[0])
        assert paths(lab) == {(1, 2), (2, 1)}
        assert fault.dropped() == 4


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_a_connect_to_a_cut_host_times_out_and_is_not_refused(lab, direction):
    a, b, c = lab.hosts
    _, port = serve(b)
    _, local = serve(b, address="127.0.0.1")
    fault = lab.cut(b, direction)
    assert call(a, b.address, port, SILENCE_S) == "TimeoutError"
    assert fault.dropped() > 0
    assert call(b, "127.0.0.1", local) == call(b, b.address, port) == "over the wire"
    _, other = serve(c)
    assert call(a, c.address, other) == "over the wire"
    fault.heal()
    assert call(a, b.address, port) == "over the wire"


def test_silence_outlasts_the_kernels_memory_of_neighbours():
    """Forgotten hardware addresses would turn a cut's silence into `No route to host`."""
    with Lab(2) as lab:
        a, b = lab.hosts
        _, port = serve(b)
        with a.entered():  # a kernel that asks for them would give up after 3 times 10 ms
            path = Path(f"/proc/sys/net/ipv4/neigh/{network.INTERFACE}/retrans_time_ms")
            path.write_text("10")
        a.run(["ip", "neighbour", "flush", "dev", network.INTERFACE])
        lab.cut(b)
        assert call(a, b.address, port, SILENCE_S) == "TimeoutError"


@pytest.mark.parametrize("direction", ["both", "in", "out"])
def test_an_established_connection_goes_silent_and_resumes(lab, direction):
    a, b, _ = lab.hosts
    _, port = serve(b)
    with connected(a, b.address, port) as connection:
        connection.sendall(b"before")
        assert connection.recv(100) == b"before"
        fault = lab.cut(b, direction)
        connection.sendall(b"during")
        poll = select.poll()
        poll.register(connection, select.POLLIN | select.POLLRDHUP)
        assert poll.poll(SILENCE_S * 1000) == []  # no data, no end, no error
        assert fault.dropped() > 0
        fault.heal()
        assert connection.recv(100) == b"during"


def test_a_killed_process_behind_a_cut_is_not_heard_to_die(lab):
    a, b, _ = lab.hosts
    _, port = serve(b)
    with connected(a, b.address, port) as connection:
        with lab.cut(b):
            assert b.crash() == 1
            connection.settimeout(SILENCE_S)
            with pytest.raises(TimeoutError):
                connection.recv(1)
        connection.settimeout(PATIENCE_S)
        connection.sendall(b"now it must answer")
        with contextlib.suppress(ConnectionResetError):
            assert connection.recv(1) == b""


def test_a_cut_pair_leaves_all_others_alone(lab):
    a, b, _ = lab.hosts
    fault = lab.cut_pair(a, b)
    assert paths(lab) == EVERYONE - {(0, 1), (1, 0)}
    assert fault.dropped() == 2
    fault.heal()
    one_way = lab.cut_pair(a, b, one_way=True)
    assert paths(lab) == EVERYONE - {(0, 1)}
    assert one_way.dropped() == 1


def test_faults_add_up_and_are_healed_one_by_one(lab):
    a, b, c = lab.hosts
    first, second = lab.cut(a, "out"), lab.cut_pair(b, c)
    third = lab.cut(a, "out")  # the same again is another fault
    assert lab.faults == (first, second, third)
    assert paths(lab) == {(1, 0), (2, 0)}
    lab.heal(first)
    lab.heal(first)
    assert paths(lab) == {(1, 0), (2, 0)}
    lab.heal(third)
    assert paths(lab) == EVERYONE - {(1, 2), (2, 1)}
    lab.heal_all()
    assert lab.faults == ()
    assert paths(lab) == EVERYONE
    assert [str(f) for f in (first, second)] == [
        "host 0 is heard by nobody",
        "host 1 and host 2 are separated",
    ]


# ---------------------------------------------------------------- loss


@pytest.mark.parametrize(("percent", "pair"), [(5.0, False), (30.0, True), (100.0, False)])
def test_the_share_that_is_lost_is_the_one_asked_for(lab, percent, pair):
    a, b, _ = lab.hosts
    fault = lab.drop((a, b) if pair else a, percent)
    sent, batch, got = 4000, 50, 0
    with mailbox(b) as box, a.socket(socket.SOCK_DGRAM) as out:
        for _ in range(sent // batch):  # few at once, so that the receiver loses none by itself
            for _ in range(batch):
                out.sendto(b"x", box.getsockname())
            box.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while box.recv(10):
                    got += 1
        box.settimeout(SILENCE_S)
        while got + fault.dropped() < sent:
            box.recv(10)
            got += 1
    assert got + fault.dropped() == sent
    share = percent / 100
    deviation = (sent * share * (1 - share)) ** 0.5
    assert abs(fault.dropped() - sent * share) <= 6 * deviation  # by chance: once in 10 ** 8 runs
    fault.heal()
    assert paths(lab) == EVERYONE


def test_loss_between_a_pair_spares_the_rest_and_tcp_gets_through(lab):
    a, b, c = lab.hosts
    fault = lab.drop((a, b), 10.0)
    text = bytes(100_000)

    def echoed(server: Host) -> bool:
        with connected(a, server.address, serve(server)[1]) as connection:
            connection.sendall(text)
            return receive(connection, len(text)) == text

    assert echoed(c)
    assert fault.dropped() == 0
    while not fault.dropped():
        assert echoed(b)


# ---------------------------------------------------------------- crashes and cleaning up

STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.environ.clear()
        os.execve(sys.executable, ["python", "-S", "-c", "import time; time.sleep(1000)"], {})
while os.wait():
    print("one", flush=True)
"""


def test_a_crash_ends_every_process_of_the_host_and_no_other(lab):
    a, b, _ = lab.hosts
    other, _ = serve(b)
    child = a.popen([*PYTHON, STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    with child.stdout:
        for _ in range(3):
            child.stdout.readline()
    pids = until(lambda: len(a.pids()) == 3 and a.pids())  # the parent has ended with an error
    assert a.crash() == 3
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}/ns/net") and pid in a.pids()]
    assert a.pids() == []
    assert b.pids() == [other]
    _, port = serve(a)  # a crashed host can be used again
    assert call(b, a.address, port) == "over the wire"


def test_peers_of_a_crashed_host_see_connections_close(lab):
    a, b, _ = lab.hosts
    _, port = serve(b)
    with connected(a, b.address, port) as connection:
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"  # it is accepted: a refused one would be reset
        b.crash()
        assert connection.recv(1) == b""


def links(namespace_fd: int) -> list[str]:
    lines = tool_in(namespace_fd, "ip", "-br", "link").splitlines()
    return [line.split()[0].partition("@")[0] for line in lines]


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_nothing_is_left_when_a_lab_ends(error):
    before = namespaces_held()
    outside = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, outside)
        with pytest.raises(error) if error else contextlib.nullcontext(), Lab(3) as lab:
            child = lab.hosts[0].popen(["sh", "-c", "setsid sleep 1000 & wait"])
            family = until(lambda: len(lab.hosts[0].pids()) == 2 and lab.hosts[0].pids())
            kept = []  # the kernel would remove these namespaces if they were not kept
            for number in namespaces_held():
                if number not in (outside, *before):
                    kept.append(os.dup(number))
                    stack.callback(os.close, kept[-1])
            lab.cut(lab.hosts[0])
            lab.drop(lab.hosts[1], 1.0)
            of_host, of_switch = (
                ["lo", network.INTERFACE],
                ["lo", "switch", "port0", "port1", "port2"],
            )
            assert sorted(map(links, kept)) == [of_host, of_host, of_host, of_switch]
            assert not {"switch", "port0"} & set(links(outside))
            if error:
                raise error
        assert child.returncode == -signal.SIGKILL
        assert not any(map(network._identity, family))
        assert [links(number) for number in kept] == [["lo"]] * 4
        assert [tool_in(number, "nft", "list", "ruleset") for number in kept] == [""] * 4
    assert namespaces_held() == before
    assert lab.faults == ()
    with pytest.raises(UserError, match="this lab is not open"):
        lab.hosts[0].popen(["true"])


def test_a_lab_that_cannot_be_made_leaves_nothing(monkeypatch):
    before = namespaces_held()
    monkeypatch.setattr(network, "_hardware", lambda host: "nonsense")
    with pytest.raises(WorldError, match=r"`ip` was refused: .*nonsense"):
        Lab(2).__enter__()
    assert namespaces_held() == before


OWNER_PROGRAM = """
import os, signal, subprocess, sys
from labs.network_lab import Lab
with Lab(2) as lab:
    lab.cut(lab.hosts[0])
    child = lab.hosts[0].popen(["sleep", "1000"])
    print(child.pid, flush=True)
    input()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_leftovers_of_a_killed_owner_are_cleaned_and_no_others():
    command = [sys.executable, "-c", OWNER_PROGRAM]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=TESTS, **pipes) as owner:
        pid = int(owner.stdout.readline())
        clean_leftovers()
        os.kill(pid, 0)  # it lives, since its owner does
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert owner.wait(PATIENCE_S) == -signal.SIGKILL
        with Lab(1):  # whichever lab is made next
            assert not network._identity(pid)


@pytest.mark.parametrize("mark", ["", "nonsense", "1:2:3", "a:b:c", f"{PIDS}:x:1"])
def test_marks_that_are_not_ours_are_left_alone(mark):
    """The marks may come from other containers, whose processes have other numbers than here."""
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, OWNER: mark}) as child:
        try:
            clean_leftovers()
            assert child.poll() is None
        finally:
            child.kill()


# ---------------------------------------------------------------- what is refused


def test_bad_input_is_named(lab):
    a, b, _ = lab.hosts
    stranger = Host(7, -1)
    for bad, words in [
        (lambda: Lab(0), "a lab of 0 hosts: choose 1 to 200"),
        (lambda: Lab(201), "a lab of 201 hosts"),
        (lambda: lab.cut(a, "up"), "'up' is no direction: choose one of both, in, out"),
        (lambda: lab.cut(stranger), "host 7 is not a host of this lab"),
        (lambda: lab.cut_pair(a, a), "host 0 is no pair with itself"),
        (lambda: lab.drop(a, 0), "a loss of 0 percent"),
        (lambda: lab.drop((a, b), 100.5), "a loss of 100.5 percent"),
        (lambda: Relay(a, ("x", 1), delay_s=-1.0), "delay_s is -1.0: choose 0 or more"),
        (lambda: Relay(a, ("x", 1)).pause(), "has not been started"),
    ]:
        with pytest.raises(UserError, match=words):
            bad()
    assert lab.faults == ()


def test_the_reason_is_given_where_labs_do_not_work(monkeypatch, tmp_path):
    ask = Lab.available.__wrapped__  # without the memory of the first answer
    with monkeypatch.context() as patch:
        patch.setattr(network.shutil, "which", lambda name, path: None)
        assert ask() == "`ip` is not installed (package iproute2)"
    with monkeypatch.context() as patch:

        def refuse(name: str, *arguments: int) -> None:
            if name == "unshare":
                raise OSError(errno.EPERM, "Operation not permitted")
            call_kernel(name, *arguments)

        call_kernel = network._call
        patch.setattr(network, "_call", refuse)
        assert "Operation not permitted" in ask()
        assert "run as root" in ask()
    assert ask() == ""
