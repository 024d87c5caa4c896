"""Plays a GPU on a machine without one: tensors that are not the host's, and streams that lag.

A FakeGpuTensor reports the device `cuda:0`, refuses everything that a real one refuses (`numpy()`,
work on tensors of both kinds), and counts as computed at once. Backward passes run in a thread of
their own. Copies in a stream other than the default one are carried out only when a reader waits
for them: a reader that has not waited for a copy reads the older bytes, which happens on a real GPU
only now and then.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

GPU = torch.device("cuda", 0)
aten = torch.ops.aten
MIXED = {aten.copy_.default, aten._foreach_copy_.default}  # take tensors of both kinds


class FakeStream:
    """Keeps copies that are still under way."""

    def __init__(self, device: Any = None, *, eager: bool = False) -> None:
        self.eager = eager
        self._queued: collections.deque[Callable[[], object]] = collections.deque()
        self.queued = 0  # number of copies queued so far
        self.done = 0
        self._lock = threading.RLock()

    def put(self, work: Callable[[], object]) -> None:
        if self.eager:
            work()
            return
        with self._lock:
            self._queued.append(work)
            self.queued += 1

    def run_until(self, count: int) -> None:
        with self._lock:
            while self.done < count:
                self._queued.popleft()()
                self.done += 1

    def wait_event(self, event: FakeEvent) -> None:
        self.put(event.synchronize)

    def wait_stream(self, other: FakeStream) -> None:
        self.put(lambda count=other.queued: other.run_until(count))

    def synchronize(self) -> None:
        self.run_until(self.queued)


class FakeEvent:
    """Marks a place in a stream."""

    device = GPU

    def __init__(self, enable_timing: bool = False) -> None:
        self._place: tuple[FakeStream, int] | None = None

    def record(self, stream: FakeStream | None = None) -> None:
        stream = stream or _present()
        self._place = stream, stream.queued

    def query(self) -> bool:
        return self._place is None or self._place[0].done >= self._place[1] or self._place[0].eager

    def synchronize(self) -> None:
        if self._place is not None and not self._place[0].eager:
            self._place[0].run_until(self._place[1])

    def elapsed_time(self, other: FakeEvent) -> float:
        if self._place is None or other._place is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return 1.0


DEFAULT = FakeStream(eager=True)
RECORDED: collections.deque[tuple[int, FakeStream]] = collections.deque(maxlen=100)  # addresses
_LOCAL = threading.local()


def _present() -> FakeStream:
    return getattr(_LOCAL, "stream", DEFAULT)


@contextlib.contextmanager
def in_stream(stream: FakeStream) -> Iterator[None]:
    before = _present()
    _LOCAL.stream = stream
    try:
        yield
    finally:
        _LOCAL.stream = before


class FakeGpuTensor(torch.Tensor):
    """Wraps a tensor of the host, `held`."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> FakeGpuTensor:
        found = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="cpu",
        )
        found.held = held
        return found

    device = property(lambda self: GPU)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"FakeGpuTensor({self.held!r})"

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.held.tolist()

    def cpu(self, *options: Any) -> torch.Tensor:
        return self.held.detach().clone()

    def cuda(self, *options: Any) -> FakeGpuTensor:
        return self

    def pin_memory(self) -> Any:
        raise RuntimeError("only dense CPU tensors can be pinned")

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    def record_stream(self, stream: FakeStream) -> None:
        RECORDED.append((self.data_ptr(), stream))

    def to(self, *where: Any, **options: Any) -> Any:
        target = options.pop("device", None)
        rest = []
        for each in where:
            if isinstance(each, str | torch.device):
                target = each
            else:
                rest.append(each)
        if target is not None and torch.device(target).type == "cpu":
            return self.cpu().to(*rest, **options)
        return super().to(*rest, **options)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        flat = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        hosts = [x for x in flat if not isinstance(x, cls) and x.dim() > 0]
        if hosts and func not in MIXED:
            raise RuntimeError(f"{func}: tensors on cuda:0 and on cpu, {list(hosts[0].shape)}")
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
        inner = pytree.tree_map(_unwrapped, (args, kwargs))
        if func in MIXED and not _present().eager:
            to, from_ = inner[0][:2]
            _present().put(lambda: func(to, from_))
            return args[0] if func is aten.copy_.default else None
        found = func(*inner[0], **inner[1])
        known = {id(_unwrapped(x)): x for x in flat}
        return pytree.tree_map(lambda x: _wrapped(x, known), found)


def _unwrapped(value: Any) -> Any:
    return value.held if isinstance(value, FakeGpuTensor) else value


def _wrapped(value: Any, known: dict[int, torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return known[id(value)] if id(value) in known else FakeGpuTensor(value)


def on_gpu(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the fake."""
    return FakeGpuTensor(tensor.detach().clone())


def move(module: torch.nn.Module) -> torch.nn.Module:
    """Move a module to the fake, as `module.cuda()` does."""
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is not None:
                moved = torch.nn.Parameter(on_gpu(param), requires_grad=param.requires_grad)
                each._parameters[name] = moved
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = on_gpu(buffer)
    return module


def _creating(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, **options: Any) -> torch.Tensor:
        device = options.get("device")
        if device is not None and torch.device(device).type == "cuda":
            return FakeGpuTensor(make(*args, **{**options, "device": "cpu"}))
        options.pop("pin_memory", None)
        return make(*args, **options)

    return made


_TO = torch.Tensor.to


def _to(tensor: torch.Tensor, *where: Any, **options: Any) -> torch.Tensor:
    """Move a tensor of the host, perhaps to the fake."""
    targets = [each for each in (*where, options.get("device")) if _is_gpu(each)]
    if not targets:
        return _TO(tensor, *where, **options)
    options.pop("device", None)
    options.pop("non_blocking", None)
    rest = [each for each in where if not _is_gpu(each)]
    return FakeGpuTensor(_TO(tensor, *rest, **{**options, "copy": True}))


def _is_gpu(where: Any) -> bool:
    return isinstance(where, str | torch.device) and torch.device(where).type == "cuda"


_BACKWARD = torch.Tensor.backward


def _backward(tensor: torch.Tensor, *args: Any, **options: Any) -> None:
    """Run in another thread, as autograd does for a GPU: no lock of the caller's is held there."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            _BACKWARD(tensor, *args, **options)
        except BaseException as error:  # noqa: BLE001 - raised where it was called
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


class FakeCudart:
    """Pins no memory, but admits it only if `code` is not 0."""

    def __init__(self, code: int = 0) -> None:
        self._code = code

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        return self._code

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        return 0


def install(patch: pytest.MonkeyPatch) -> torch.device:
    """Put the fake where torch looks for a GPU when Holdfast asks for one."""
    for name in ("zeros", "empty", "ones", "arange", "full", "tensor"):
        patch.setattr(torch, name, _creating(getattr(torch, name)))
    patch.setattr(torch.Tensor, "to", _to)
    patch.setattr(torch.Tensor, "backward", _backward)
    for name, fake in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": in_stream,
        "current_stream": lambda device=None: _present(),
        "default_stream": lambda device=None: DEFAULT,
        "device": lambda device: contextlib.nullcontext(),
        "cudart": FakeCudart,
        # A build of PyTorch for CUDA would ask the driver, which is not there.
        "get_device_properties": lambda device=None: types.SimpleNamespace(uuid="fake"),
    }.items():
        patch.setattr(torch.cuda, name, fake)
    return GPU


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Run a test with the fake."""
    return install(monkeypatch)
