"""Threads that receive the first messages of a kind at once do not end the process."""

from __future__ import annotations

import subprocess
import sys

from conftest import RUN_S

# Each round has a kind of its own, since the first messages of a kind are the dangerous ones.
CODE = """
import socket, sys, threading, types
import msgspec
from holdfast.engine.net.peer_stream import receive_message, send_message

SOURCE = '''
class Inner(msgspec.Struct):
    numbers: "tuple[int, ...]"
class Middle(msgspec.Struct):
    inner: "tuple[Inner, ...]"
    named: "dict[str, Inner]"
class Message(msgspec.Struct, tag=True):
    middle: "tuple[Middle, ...]"
class Other(msgspec.Struct, tag=True):
    text: "str"
'''

def receive(pair, start, module):
    start.wait()
    receive_message(pair[1], module.Message | module.Other)

sys.setswitchinterval(1e-6)
for number in range(100):
    module = types.ModuleType(f"kinds{number}")
    module.msgspec = msgspec
    sys.modules[module.__name__] = module
    exec(SOURCE, module.__dict__)
    inner = module.Inner((1, 2))
    pairs = [socket.socketpair() for _ in range(4)]
    for near, _ in pairs:
        send_message(near, module.Message((module.Middle((inner,), {"a": inner}),)))
    start = threading.Barrier(len(pairs))
    threads = [threading.Thread(target=receive, args=(p, start, module)) for p in pairs]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    for each in (end for pair in pairs for end in pair):
        each.close()
print("all received")
"""


def test_the_first_messages_of_a_kind_may_come_to_several_threads_at_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert (done.returncode, done.stdout) == (0, "all received\n"), done.stderr[-2000:]
