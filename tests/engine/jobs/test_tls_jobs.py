"""Whole jobs with --tls: messages of workers cannot be read on the path; the rest is equal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from certificates import make_certificates
from conftest import RUN_S, SCRIPTS, finish
from holdfast.engine.runtime.local_run import LocalRun

pytestmark = pytest.mark.slow
HOST = "127.0.0.1"
SCALES = [2.0**power for power in range(-4, 5)]  # scales of gradients, by the number of tasks

# Sends all of a worker's connections through a relay, which records their bytes. The gradient, and
# so everything exchanged of it, is a pattern that a reader recognises.
TAPPED_SCRIPT = """
import hashlib, itertools, os, socket, sys, threading
import torch
import holdfast

numbers, connect_ex = itertools.count(), socket.socket.connect_ex

def carry(near, far, file):
    try:
        while data := near.recv(1 << 16):
            file.write(data)
            file.flush()
            far.sendall(data)
    except OSError:
        pass
    for each in (near, far):
        try:
            each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

def through_relay(self, address):
    listener = socket.create_server(("127.0.0.1", 0))
    def serve():
        near, _ = listener.accept()
        far = socket.create_connection(address)
        for pair in ((near, far), (far, near)):
            name = f"{sys.argv[1]}/{os.getpid()}-{next(numbers)}"
            threading.Thread(target=carry, args=(*pair, open(name, "wb")), daemon=True).start()
    threading.Thread(target=serve, daemon=True).start()
    return connect_ex(self, listener.getsockname())

socket.socket.connect_ex = through_relay
job = holdfast.join()
pattern = torch.frombuffer(bytearray(b"recognisable    " * 4096), dtype=torch.float32)
model = torch.nn.Module()
model.weight = torch.nn.Parameter(torch.zeros(pattern.numel()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.ones(64, 1)), batch_size=4)
for step in job.steps(data, until=8):
    for (x,) in step:
        step.backward((model.weight * pattern).sum() * x.mean())
    optimizer.step()
    optimizer.zero_grad()
print(hashlib.sha256(model.weight.detach().numpy().tobytes()).hexdigest())
"""


def test_gradients_that_workers_exchange_cannot_be_read_on_the_path(tmp_path: Path) -> None:
    script = tmp_path / "tapped.py"
    script.write_text(TAPPED_SCRIPT)
    word = torch.frombuffer(bytearray(b"recognisable    "), dtype=torch.float32)
    patterns = [(word * scale).numpy().tobytes() * 4 for scale in SCALES]
    digests, readable = [], []
    for name, tls in (("plain", None), ("tls", make_certificates(tmp_path, HOST))):
        heard = tmp_path / f"heard-{name}"
        heard.mkdir()
        options = ["--nproc", "2", "--virtual", "4"]
        words = [str(script), str(heard)]
        with LocalRun(tmp_path / name, options, words, tls=tls) as run:
            digests.append(finish(run))
        all_heard = [path.read_bytes() for path in heard.iterdir()]
        assert sum(map(len, all_heard)) > 8 * 65536  # it was on the path
        readable.append(any(p in data for p in patterns for data in all_heard))
    assert digests[0] == digests[1]
    assert readable == [True, False]


@pytest.mark.parametrize("fault", ["SIGKILL:spread:5:1", "SIGKILL:vote:5:0", "SIGSTOP:gather:5:1"])
def test_faults_change_nothing(fault: str, tmp_path: Path, reference: Callable[[int], str]) -> None:
    tls = make_certificates(tmp_path, HOST)
    flags = ["--nproc", "2", "--virtual", "4"]
    words = [str(SCRIPTS / "trainer.py"), "--steps", "40", "--fault", fault, "--rejoin", "9"]
    with LocalRun(tmp_path / "run", flags, words, tls=tls) as run:
        assert run.wait(RUN_S) == 0, run.log()
    assert run.out[-1] == reference(40)
    assert len(run.events("view")) > 1


def test_a_job_says_what_is_not_encrypted(tmp_path: Path) -> None:
    tls = make_certificates(tmp_path, HOST)
    flags = ["--nproc", "1", "--virtual", "2", "--procs-per-worker", "2"]
    with LocalRun(tmp_path / "run", flags, [str(SCRIPTS / "sharded.py")], tls=tls) as run:
        (told,) = run.until(lambda: run.events("tls"), RUN_S, "the line about TLS")
    assert "--tls does not encrypt what processes exchange by torch.distributed" in told["text"]
