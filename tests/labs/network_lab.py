"""Makes hosts with real, separate networks on one machine, whose cables can be cut.

    with Lab(3) as lab:
        server = lab.hosts[0].popen([sys.executable, "server.py", lab.hosts[0].address])
        client = lab.hosts[1].popen([sys.executable, "client.py", lab.hosts[0].address])
        fault = lab.cut(lab.hosts[1])       # silence: no refusal, and no connection is closed
        lab.heal(fault)
        lab.hosts[0].crash()                # every process there is killed at once

A host is a Linux network namespace with its own loopback and one interface, `eth0`, on a switch
that all hosts of the lab share and that leads nowhere else. Only the network is separate. Processes
of all hosts share the file system, /proc, the process ids and the host name, so that they can be
signalled and read as usual, and sockets in the file system (AF_UNIX with a path) connect across
hosts through every cut. Abstract AF_UNIX names are a part of the network and stay within a host.
/sys/class/net shows the machine's interfaces; /proc/net and the kernel's news are the host's.

Frames are lost inside the switch, so a cut is silent for both sides: no connection is refused, no
link goes down, and no address becomes unreachable, since every host knows all hardware addresses
from the start. Delays are not made here but by relays (relay.py), since some kernels lack netem.

The namespaces have no names. Only open file descriptors of the owner, the process that made the
lab, keep them alive, so two labs cannot clash, and the kernel removes them with their interfaces
and rules however the owner dies. Processes may be left behind; they carry the owner's identity in
their environment, and the next lab kills those whose owner is gone.

Needs root (or a user namespace: `unshare --user --map-root-user --net pytest ...`), `ip` and `nft`.
`Lab.available()` returns the parts that are missing. This module must not depend on jobs.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import fcntl
import functools
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from holdfast.engine.core.errors import UserError, WorldError

INTERFACE = "eth0"  # in every host
HOSTS_MAX = 200
OWNER = "HOLDFAST_LAB"  # environment variable of every process started in a host
TOOL_S = 30.0  # bounds `ip` and `nft`, which need milliseconds
KILL_S = 10.0  # bounds the death of killed processes
CARRIER_S = 10.0  # bounds the wait for a cable, which works after milliseconds
POLL_S = 0.002
DICE = 100_000  # sides: a loss is rounded to a thousandth of a percent
CLONE_NEWNET = 0x40000000
SIOCGIFFLAGS, RUNNING = 0x8913, 0x40  # netdevice(7)
THREAD_NAMESPACE = "/proc/thread-self/ns/net"
TOOL_PACKAGES = {"ip": "iproute2", "bridge": "iproute2", "nft": "nftables"}


class Direction(enum.Enum):
    """Names a direction as seen from the host: IN is the traffic sent to it."""

    BOTH = "both"
    IN = "in"
    OUT = "out"


class Host:
    """Represents one machine of a lab, which made it; `address` is its IPv4 address there."""

    def __init__(self, index: int, namespace_fd: int) -> None:
        self.index = index
        self.address = f"10.73.0.{index + 1}"
        self.children: list[subprocess.Popen[Any]] = []  # started here and not known to have ended
        self.fd = namespace_fd

    def __repr__(self) -> str:
        return f"host {self.index}"

    @property
    def namespace(self) -> str:
        """Return a path that other processes can open, as in `nsenter --net=PATH COMMAND`."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move the calling thread alone into this host; sockets it makes there stay in the host.

        Processes started in this time run here, too. It changes only the network; do not `await`
        inside.
        """
        with _entered(self.fd):
            yield

    def socket(self, kind: socket.SocketKind = socket.SOCK_STREAM) -> socket.socket:
        """Open an IPv4 socket of this host for the calling process, which stays where it is."""
        with self.entered():
            return socket.socket(socket.AF_INET, kind)

    def popen(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, **kw: Any
    ) -> subprocess.Popen[Any]:
        """Call subprocess.Popen inside this host. The pid is the process's own."""
        # Not a helper thread: a process that wants to die with its parent dies with the *thread*
        # that started it. Not preexec_fn: unsafe where threads run.
        with self.entered():
            child: subprocess.Popen[Any] = subprocess.Popen(args, env=_marked(env), **kw)
        self.children = [c for c in self.children if c.poll() is None]
        self.children.append(child)
        return child

    def run(
        self, args: Sequence[str], env: Mapping[str, str] | None = None, **kw: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Call subprocess.run inside this host, where the calling thread is until it returns."""
        with self.entered():
            return subprocess.run(args, env=_marked(env), check=kw.pop("check", False), **kw)

    def pids(self) -> list[int]:
        """List every process in this host, whoever started it, except the calling process."""
        return [pid for pid in _processes() if self._holds(pid)]

    def crash(self) -> int:
        """Kill every process in this host with SIGKILL; return how many, once none of them lives.

        The kernel survives, so peers see connections close. To take the power away, cut first.
        """
        return _kill_all(self._holds)

    def _holds(self, pid: int) -> bool:
        with contextlib.suppress(OSError):  # gone, or a zombie, which is nowhere
            return os.stat(f"/proc/{pid}/ns/net").st_ino == os.fstat(self.fd).st_ino
        return False


class Fault:
    """Represents a fault of a lab's network until it is healed; the lab makes it.

    In a with statement it is healed at the end. `final`: how many frames it dropped, once healed.
    """

    def __init__(self, lab: Lab, number: int, text: str) -> None:
        self.text = text
        self.table = f"fault{number}"  # each fault is one nftables table in the switch
        self.final: int | None = None
        self._lab = lab

    def __repr__(self) -> str:
        return self.text

    def __enter__(self) -> Fault:
        return self

    def __exit__(self, *exc: object) -> None:
        self.heal()

    def heal(self) -> None:
        """Heal this fault; a fault that has been healed already stays healed."""
        self._lab.heal(self)

    def dropped(self) -> int:
        """Count the frames lost to it so far. A large TCP segment still whole counts as one."""
        return self._lab.dropped(self)


class Lab:
    """Connects `size` hosts with one switch, and removes everything when its context ends.

    Faults add up: a frame arrives if none of them drops it. A fault is in force when the method
    that made it returns. For use by one thread at a time.
    """

    def __init__(self, size: int) -> None:
        if not 1 <= size <= HOSTS_MAX:
            raise UserError(f"a lab of {size} hosts: choose 1 to {HOSTS_MAX}")
        self.size = size
        self.hosts: tuple[Host, ...] = ()
        self.faults: tuple[Fault, ...] = ()  # in force now
        self._switch_fd = -1
        self._made = 0
        self._open = contextlib.ExitStack()

    @staticmethod
    @functools.cache
    def available() -> str:
        """Return the reason why labs do not work here, after a first try; empty if they do."""
        if sys.platform != "linux":
            return f"network namespaces need Linux, and this is {sys.platform}"
        try:
            with Lab(1) as lab, lab.cut(lab.hosts[0]), lab.drop(lab.hosts[0], 50.0):
                return ""
        except (WorldError, OSError, subprocess.SubprocessError) as error:
            return str(error)

    def __enter__(self) -> Lab:
        clean_leftovers()
        with contextlib.ExitStack() as stack:
            stack.callback(self._forget)
            self._switch_fd = _new_namespace(stack)
            self.hosts = tuple(Host(i, _new_namespace(stack)) for i in range(self.size))
            stack.callback(self._empty)
            self._connect()
            self._open = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.close()

    def cut(self, host: Host, direction: Direction | str = Direction.BOTH) -> Fault:
        """Cut `host` off from the other hosts; "in" loses frames sent to it, "out" its own."""
        self._know(host)
        names = [known.value for known in Direction]
        if direction not in (*Direction, *names):
            raise UserError(f"{direction!r} is no direction: choose one of {', '.join(names)}")
        match Direction(direction):
            case Direction.IN:
                return self._add(f"{host} hears nobody", [_to(host)])
            case Direction.OUT:
                return self._add(f"{host} is heard by nobody", [_from(host)])
        return self._add(f"{host} is cut off", [_from(host), _to(host)])

    def cut_pair(self, a: Host, b: Host, one_way: bool = False) -> Fault:
        """Separate `a` and `b` from each other only; `one_way` loses just what `a` sends to `b`."""
        self._know(a, b)
        if one_way:
            return self._add(f"{b} does not hear {a}", [_from(a) + _to(b)])
        return self._add(f"{a} and {b} are separated", [_from(a) + _to(b), _from(b) + _to(a)])

    def drop(self, where: Host | tuple[Host, Host], percent: float) -> Fault:
        """Lose that share of the frames, at random: all of a host's, or those between a pair.

        Each frame is decided once. What TCP sends in one burst passes as one large frame (up to 64
        KiB), so bulk transfers lose whole bursts rather than single packets.
        """
        if not 0 < percent <= 100:
            raise UserError(f"a loss of {percent} percent: choose more than 0 and at most 100")
        if isinstance(where, Host):
            self._know(where)
            rules, name = [_from(where), _to(where)], f"{where} loses"
        else:
            a, b = where
            self._know(a, b)
            rules, name = [_from(a) + _to(b), _from(b) + _to(a)], f"{a} and {b} lose"
        highest = max(1, round(percent * DICE / 100)) - 1
        dice = f"numgen random mod {DICE} <= {highest} "
        return self._add(f"{name} {percent:g} %", [rule + dice for rule in rules])

    def heal(self, *faults: Fault) -> None:
        """End these faults at the same instant; a fault that has been healed already is skipped."""
        ending = [fault for fault in self.faults if fault in faults]
        if ending:
            counts = self._counts()
            self._nft("-f", "-", text="".join(f"delete table bridge {f.table}\n" for f in ending))
            for fault in ending:
                fault.final = counts[fault.table]
            self.faults = tuple(fault for fault in self.faults if fault not in ending)

    def heal_all(self) -> None:
        """End every fault at the same instant."""
        self.heal(*self.faults)

    def dropped(self, fault: Fault) -> int:
        """Count the frames that a fault has dropped so far, or until it was healed."""
        return self._counts()[fault.table] if fault.final is None else fault.final

    def crash_all(self) -> int:
        """Call `Host.crash` for all hosts."""
        return sum(host.crash() for host in self.hosts)

    def _know(self, *hosts: Host) -> None:
        for host in hosts:
            if host not in self.hosts:
                raise UserError(f"{host} is not a host of this lab: take one of `lab.hosts`")
        if len(set(hosts)) < len(hosts):
            raise UserError(f"{hosts[0]} is no pair with itself: its loopback cannot be cut")

    def _add(self, text: str, rules: Sequence[str]) -> Fault:
        fault = Fault(self, self._made, text)
        lines = "\n".join(f"{rule} counter drop" for rule in rules)
        hook = "type filter hook forward priority 0; policy accept;"
        chain = f"chain drops {{\n{hook}\n{lines}\n}}"
        self._nft("-f", "-", text=f"table bridge {fault.table} {{\n{chain}\n}}\n")
        self._made += 1
        self.faults = (*self.faults, fault)
        return fault

    def _counts(self) -> dict[str, int]:
        """Count the frames dropped, by table."""
        counts = {fault.table: 0 for fault in self.faults}
        for item in json.loads(self._nft("-j", "list", "ruleset"))["nftables"]:
            rule = item.get("rule", {"expr": []})
            for part in rule["expr"]:
                if "counter" in part:
                    counts[rule["table"]] += part["counter"]["packets"]
        return counts

    def _connect(self) -> None:
        """Make the switch and plug every host in."""
        # Without this every interface would announce its own IPv6 address.
        quiet = "addrgenmode none" if os.path.exists("/proc/sys/net/ipv6") else ""
        lines = [
            "link add name switch type bridge stp_state 0 forward_delay 0",
            f"link set dev switch {quiet} up",
        ]
        for host in self.hosts:
            port, far = _port(host), f"name {INTERFACE} netns {host.namespace}"
            lines += [
                f"link add name {port} type veth peer {far} address {_hardware(host)}",
                f"link set dev {port} master switch {quiet} up",
            ]
        _batch(self._switch_fd, "ip", lines)
        for host in self.hosts:
            up = ["link set dev lo up", f"link set dev {INTERFACE} {quiet} up"]
            _batch(host.fd, "ip", up)
            _await_carrier(host.fd, INTERFACE)
        for host in self.hosts:
            _await_carrier(self._switch_fd, _port(host))
        # A switch that does not know yet where a host is sends a frame to every port, and the frame
        # would be counted once for every host.
        places = [f"fdb add {_hardware(h)} dev {_port(h)} master static" for h in self.hosts]
        _batch(self._switch_fd, "bridge", places)
        for host in self.hosts:
            lines = [f"address add {host.address}/24 dev {INTERFACE}"]
            for other in self.hosts:
                if other is not host:
                    where = f"{other.address} lladdr {_hardware(other)} dev {INTERFACE}"
                    lines.append(f"neighbour add {where} nud permanent")
            _batch(host.fd, "ip", lines)

    def _empty(self) -> None:
        """Kill all processes, then remove the switch's ports: the cables go with them."""
        # The faults are healed first: the other hosts then get the last packets of the dead, and no
        # half-closed connection is left for the kernel to time out.
        with contextlib.suppress(WorldError):  # the steps below matter more
            self.heal_all()
        self.crash_all()
        for child in (child for host in self.hosts for child in host.children):
            child.kill()  # it may have left its host
            child.wait(KILL_S)
        with contextlib.suppress(WorldError):  # the kernel will do it, only later
            names = [_port(host) for host in self.hosts] + ["switch"]
            _batch(self._switch_fd, "ip", [f"link delete dev {name}" for name in names])

    def _forget(self) -> None:
        """Forget the file descriptors, which are closed and whose numbers will be used again."""
        for host in self.hosts:
            host.fd = -1
        self._switch_fd = -1
        self.faults = ()

    def _nft(self, *arguments: str, text: str = "") -> str:
        with _entered(self._switch_fd):
            return run_tool("nft", arguments, text)


def clean_leftovers() -> int:
    """Kill what runs in labs whose owner is dead; return how many processes. Every lab does it."""
    return _kill_all(_is_leftover)


def _identity(pid: int) -> str:
    """Return a name that no other process ever has; "" if this one does not live."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        if fields[0] not in "ZX":
            # Containers number their processes on their own, and may see each other's.
            return f"{os.stat('/proc/self/ns/pid').st_ino}:{pid}:{fields[19]}"
    return ""


def _is_leftover(pid: int) -> bool:
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/environ", "rb") as file:
        for entry in file.read().split(b"\0"):
            name, _, value = entry.decode(errors="replace").partition("=")
            if name == OWNER and value.count(":") == 2:
                container, owner, _ = value.split(":")
                ours = _identity(os.getpid()).startswith(f"{container}:")
                return ours and _identity(int(owner)) != value
    return False


def _marked(env: Mapping[str, str] | None) -> dict[str, str]:
    return {**(os.environ if env is None else env), OWNER: _identity(os.getpid())}


def _processes() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _kill_all(doomed: Callable[[int], bool]) -> int:
    """Kill until no doomed process lives; they may still start new ones in this time."""
    killed: set[int] = set()
    deadline = time.monotonic() + KILL_S
    while found := [pid for pid in _processes() if doomed(pid)]:
        if time.monotonic() > deadline:
            raise WorldError(f"processes {found} do not die from SIGKILL within {KILL_S} s")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if doomed(pid):  # still doomed, or another process has got its number by now
                        signal.pidfd_send_signal(handle, signal.SIGKILL)
                        killed.add(pid)
                finally:
                    os.close(handle)
        time.sleep(POLL_S)
    return len(killed)


def _await_carrier(namespace_fd: int, device: str) -> None:
    """Wait until a device sends its frames: until then the kernel drops them silently.

    It has noticed the carrier some time after both ends are up, later on a busy machine.
    """
    name = struct.pack("256s", device.encode())
    deadline = time.monotonic() + CARRIER_S
    with _entered(namespace_fd), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        while not struct.unpack_from("H", fcntl.ioctl(asking, SIOCGIFFLAGS, name), 16)[0] & RUNNING:
            if time.monotonic() > deadline:
                raise WorldError(f"{device} has no carrier after {CARRIER_S:g} s")
            time.sleep(POLL_S)


def _port(host: Host) -> str:
    """Name the switch's end of the host's cable."""
    return f"port{host.index}"


def _hardware(host: Host) -> str:
    return f"02:00:00:00:00:{host.index + 1:02x}"


def _from(host: Host) -> str:
    return f'iifname "{_port(host)}" '


def _to(host: Host) -> str:
    return f'oifname "{_port(host)}" '


def _call(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Bring the calling thread back to its network namespace, whatever network it enters here."""
    home = os.open(THREAD_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", home, CLONE_NEWNET)  # the way back, tried first: some may leave for ever
        try:
            yield
        finally:
            _call("setns", home, CLONE_NEWNET)
    finally:
        os.close(home)


@contextlib.contextmanager
def _entered(namespace_fd: int) -> Iterator[None]:
    if namespace_fd < 0:
        raise UserError("this lab is not open: use it, and its hosts, in a with statement")
    with _returning():
        _call("setns", namespace_fd, CLONE_NEWNET)
        yield


def _new_namespace(stack: contextlib.ExitStack) -> int:
    """Return a file descriptor, closed by `stack`, that keeps a new network namespace."""
    try:
        with _returning():
            _call("unshare", CLONE_NEWNET)
            found = os.open(THREAD_NAMESPACE, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WorldError(
            f"no network namespace can be made ({error}): run as root, or under "
            "`unshare --user --map-root-user --net`"
        ) from error
    stack.callback(os.close, found)
    return found


def run_tool(name: str, arguments: Sequence[str], text: str) -> str:
    """Run a tool of TOOL_PACKAGES where the calling thread is; return its output."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])
    program = shutil.which(name, path=path)
    if program is None:
        raise WorldError(f"`{name}` is not installed (package {TOOL_PACKAGES[name]})")
    done = subprocess.run(
        [program, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=TOOL_S,
        check=False,
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split()) or f"exit status {done.returncode}"
        raise WorldError(f"`{name}` was refused: {said}")
    return done.stdout


def _batch(namespace_fd: int, tool: str, lines: Sequence[str]) -> None:
    with _entered(namespace_fd):
        run_tool(tool, ["-batch", "-"], "".join(f"{line}\n" for line in lines))
