"""Direct calls of the simulated driver, as another library of the process makes them: memory, streams, and tensors."""

import ctypes
import os
from typing import Any

DRIVER = ctypes.CDLL(os.environ["PARTYWALL_LIBCUDA"]) if "simcuda" in os.environ.get("PARTYWALL_LIBCUDA", "") else None


def call(name: str, *arguments: Any) -> None:
    """Calls an entry point of the driver."""
    assert DRIVER is not None
    code = getattr(DRIVER, name)(*arguments)
    assert code == 0, f"{name}: {code}"


def use(device: int = 0) -> None:
    """Makes a device's primary context current on this thread."""
    context = ctypes.c_void_p()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)


def allocate(size: int) -> int:
    """Allocates memory of the device."""
    address = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
    return address.value


def fill(address: int, byte: int, size: int, stream: int) -> None:
    """Enqueues a fill."""
    what = (ctypes.c_uint64(address), ctypes.c_ubyte(byte), ctypes.c_size_t(size))
    call("cuMemsetD8Async", *what, ctypes.c_void_p(stream))


def copy(to: int, source: int, size: int, stream: int) -> None:
    """Enqueues a copy."""
    what = (ctypes.c_uint64(to), ctypes.c_uint64(source), ctypes.c_size_t(size))
    call("cuMemcpyDtoDAsync_v2", *what, ctypes.c_void_p(stream))


def read(address: int, size: int, stream: int) -> bytes:
    """Returns bytes of the device after the work on a stream is done."""
    found = (ctypes.c_ubyte * size)()
    call("cuStreamSynchronize", ctypes.c_void_p(stream))
    call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address), ctypes.c_size_t(size))
    return bytes(found)


def wait(stream: int) -> None:
    """Waits until all work on a stream is done."""
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


def is_done(stream: int) -> bool:
    """Returns whether all work on a stream is done."""
    assert DRIVER is not None
    code = DRIVER.cuStreamQuery(ctypes.c_void_p(stream))
    assert code in (0, 600), code
    return bool(code == 0)


GATES: "list[Gate]" = []
"""Those of the present test."""


class Gate:
    """A stream whose work waits until the gate is opened."""

    def __init__(self) -> None:
        stream, word = ctypes.c_void_p(), ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(word), ctypes.c_size_t(8), 0)
        # Non-blocking, so that it is not ordered with the default stream.
        call("cuStreamCreate", ctypes.byref(stream), 1)
        assert stream.value is not None and word.value is not None
        self.stream, self._word = stream.value, ctypes.c_uint64.from_address(word.value)
        self._word.value = 0
        GATES.append(self)
        call("cuStreamWaitValue64_v2", stream, word, ctypes.c_uint64(1), 0)

    def open(self) -> None:
        """Lets the stream continue."""
        self._word.value = 1


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))


_LENT: "list[DeviceBytes]" = []
"""Tensors that were given to a consumer, which stay."""


class DeviceBytes:
    """A tensor of bytes on the device, which records its releases."""

    def __init__(self, address: int, shape: list[int], strides: list[int] | None = None, device: int = 0) -> None:
        self.released = 0
        self.streams: list[int] = []
        self._device = device
        numbers = ctypes.c_int64 * len(shape)
        self._shape, self._strides = numbers(*shape), None if strides is None else numbers(*strides)
        cast = ctypes.POINTER(ctypes.c_int64)
        tensor = _Tensor(
            address, 2, device, len(shape), 1, 8, 1, ctypes.cast(self._shape, cast), ctypes.cast(self._strides, cast), 0
        )
        self._managed = _Managed(tensor, None, _Deleter(self._release))

    def _release(self, _: int) -> None:
        self.released += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self._device

    def __dlpack__(self, *, stream: int, **_: object) -> object:
        self.streams.append(stream)
        # The consumer calls the deleter in it at some time, also after the last other reference to this is gone.
        _LENT.append(self)
        return _capsule(self._managed, _NAME)

    @property
    def inner(self) -> _Tensor:
        """The DLPack description of the tensor."""
        tensor: _Tensor = self._managed.tensor
        return tensor


class _Version(ctypes.Structure):
    _fields_ = (("major", ctypes.c_uint32), ("minor", ctypes.c_uint32))


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("version", _Version),
        ("context", ctypes.c_void_p),
        ("deleter", _Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def on_host(capsule: object, address: int) -> object:
    """Has a versioned capsule say that its tensor is in main memory. The consumer still ends the export."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.argtypes, get.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    managed = _Versioned.from_address(get(capsule, _VERSIONED))
    managed.tensor.data, managed.tensor.device_type, managed.tensor.device_id = address, 1, 0
    return capsule


_Given = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(ctypes.c_void_p))
_WorkStream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))


class _Table(ctypes.Structure):
    _fields_ = (
        ("version", _Version),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("from_object", _Given),
        ("to_object", ctypes.c_void_p),
        ("borrow", ctypes.c_void_p),
        ("work_stream", _WorkStream),
    )


class Library:
    """A library that exports its tensors by DLPack's C interface, and enqueues its work on `stream`."""

    def __init__(self, stream: int, *, major: int = 1, code: int = 1, refuses: bool = False) -> None:
        self.stream, self.given, self.released = stream, 0, 0
        self._keep: list[object] = []
        self._code, self._refuses = code, refuses
        self._table = _Table(_Version(major, 3), None, None, _Given(self._give), None, None, _WorkStream(self._current))
        self.Tensor = type("Tensor", (DeviceBytes,), {"__dlpack_c_exchange_api__": _capsule(self._table, _TABLE)})
        """The type of its tensors."""

    def _give(self, tensor: DeviceBytes, out: Any) -> int:
        self.given += 1
        if self._refuses:
            return -1
        inner = _Tensor.from_buffer_copy(tensor.inner)
        if self._code == 5:
            inner.code, inner.bits = 5, 64
        managed = _Versioned(_Version(1, 3), None, _Deleter(self._release), 0, inner)
        self._keep += [managed, tensor]
        out[0] = ctypes.addressof(managed)
        return 0

    def _release(self, _: int) -> None:
        self.released += 1

    def _current(self, kind: int, _device: int, out: Any) -> int:
        assert kind == 2
        out[0] = self.stream
        return 0


def _capsule(content: ctypes.Structure, name: bytes) -> object:
    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes, new.restype = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p], ctypes.py_object
    capsule: object = new(ctypes.addressof(content), name, None)
    return capsule


_NAME = b"dltensor"
_VERSIONED = b"dltensor_versioned"
_TABLE = b"dlpack_exchange_api"


class Graph:
    """A graph with the methods of `torch.cuda.CUDAGraph(keep_graph=True)`. It captures a stream while it is entered."""

    def __init__(self, stream: int) -> None:
        self._stream = ctypes.c_void_p(stream)
        self._graph, self._exec = ctypes.c_void_p(), ctypes.c_void_p()

    def __enter__(self) -> "Graph":
        call("cuStreamBeginCapture_v2", self._stream, 0)
        return self

    def __exit__(self, *_: object) -> None:
        call("cuStreamEndCapture", self._stream, ctypes.byref(self._graph))
        call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), self._graph, ctypes.c_uint64(0))

    def raw_cuda_graph(self) -> int:
        """Returns the graph."""
        return self._graph.value or 0

    def raw_cuda_graph_exec(self) -> int:
        """Returns its instantiation."""
        return self._exec.value or 0

    def replay(self) -> None:
        """Launches it on the captured stream."""
        call("cuGraphLaunch", self._exec, self._stream)
