"""Ways to share memory of the first GPU, for `table.py`: Partywall, torch.multiprocessing, cuda.core, CuPy's handles,
and the driver's two by ctypes. The other process uses it on its own GPU, which may be another one.

All use the primary context of the process's GPU, and fill, read and check memory by the same calls of the driver.
`PARTYWALL_LIBCUDA` names another driver than `libcuda.so.1`, as it does for Partywall.
"""

import ctypes
import os
import pickle
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import numpy as np
import table_host

FILE_DESCRIPTOR = 1
"""CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"""


class Driver:
    """Calls of the driver, in the primary context of a GPU."""

    def __init__(self, gpu: int) -> None:
        self._library = ctypes.CDLL(os.environ.get("PARTYWALL_LIBCUDA") or "libcuda.so.1")
        self._found = np.empty(0, np.uint8)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), gpu)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name}: error {code}")

    def number(self, name: str, *arguments: Any) -> int:
        """What a call writes through its first argument."""
        result = ctypes.c_uint64()
        self.call(name, ctypes.byref(result), *arguments)
        return result.value

    def fill(self, address: int, value: int, size: int) -> None:
        self.call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(size))
        self.call("cuCtxSynchronize")

    def read(self, address: int, size: int) -> Any:
        """A copy, until the next."""
        if self._found.size < size:
            self._found = np.empty(size, np.uint8)
        found = ctypes.c_void_p(self._found.ctypes.data)
        self.call("cuMemcpyDtoH_v2", found, ctypes.c_uint64(address), ctypes.c_size_t(size))
        return self._found[:size]


class OnGpu:
    """What the ways have in common. What they open has an `address` and a `size`, unless they say otherwise."""

    def __init__(self, _pipe: Any, first: bool, reader: str = "0") -> None:
        self.gpu = 0 if first else int(reader)
        self.driver = Driver(self.gpu)
        self._byte = ctypes.c_ubyte()
        self._own = (0, 0)

    def address(self, opened: Any) -> tuple[int, int]:
        """Where the memory is, and how large."""
        address, size = opened
        return address, size

    def first(self, opened: Any) -> int:
        address, _ = self.address(opened)
        self.driver.call("cuMemcpyDtoH_v2", ctypes.byref(self._byte), ctypes.c_uint64(address), ctypes.c_size_t(1))
        return self._byte.value

    def whole(self, opened: Any) -> Any:
        return self.driver.read(*self.address(opened))

    def copy(self, opened: Any) -> None:
        address, size = self.address(opened)
        own, room = self._own
        if room != size:
            if own:
                self.driver.call("cuMemFree_v2", ctypes.c_uint64(own))
            own = self.driver.number("cuMemAlloc_v2", ctypes.c_size_t(size))
            self._own = own, size
        self.driver.call("cuMemcpyDtoD_v2", ctypes.c_uint64(own), ctypes.c_uint64(address), ctypes.c_size_t(size))
        self.driver.call("cuCtxSynchronize")

    def copied(self) -> Any:
        return self.driver.read(*self._own)

    def forget(self, handle: Any) -> None:
        pass


class Partywall(OnGpu, table_host.Partywall):
    """A segment of kind `vmm`: committed, opened by its name."""

    device = "cuda:0"

    def __init__(self, pipe: Any, first: bool, socket: str, reader: str = "0") -> None:
        OnGpu.__init__(self, pipe, first, reader)
        table_host.Partywall.__init__(self, pipe, first, socket)
        self._where: dict[str, Any] = {"device": f"cuda:{self.gpu}", "allow_peer": True} if self.gpu else {}

    def open(self, handle: Any) -> Any:
        return self._domain.open(handle, **self._where)

    def fill(self, build: Any, value: int) -> None:
        self.driver.fill(build.tensor.data_ptr, value, build.tensor.nbytes)

    def address(self, opened: Any) -> tuple[int, int]:
        return opened.tensor.data_ptr, opened.tensor.nbytes


class Torch(OnGpu):
    """torch.multiprocessing: the pickle that its queues send. A tensor that is opened again and again is unpickled each
    time. It is of the first GPU in the other process, too, which copies it as torch does."""

    def __init__(self, pipe: Any, first: bool, reader: str = "0") -> None:
        import torch
        import torch.multiprocessing  # has pickles name its memory

        super().__init__(pipe, first, reader)
        self._torch = torch
        self._torch.cuda.set_device(self.gpu)
        self._copy = self._torch.zeros(1, dtype=self._torch.uint8, device=f"cuda:{self.gpu}")
        self._copy.cpu()

    def make(self, size: int, value: int) -> Any:
        tensor = self._torch.full((size,), value, dtype=self._torch.uint8, device="cuda:0")
        self._torch.cuda.synchronize()
        return tensor

    def send(self, memory: Any, pipe: Any) -> Any:
        pipe.send_bytes(reduction.ForkingPickler.dumps(memory))
        # Kept until it is read, as torch has its users do.
        return [memory]

    def drop(self, sent: Any) -> None:
        sent.clear()
        self._torch.cuda.ipc_collect()

    def receive(self, pipe: Any) -> Any:
        return pipe.recv_bytes()

    def open(self, handle: Any) -> Any:
        return [reduction.ForkingPickler.loads(handle)]

    def address(self, opened: Any) -> tuple[int, int]:
        [tensor] = opened
        return tensor.data_ptr(), tensor.nbytes

    def copy(self, opened: Any) -> None:
        [tensor] = opened
        if self._copy.shape != tensor.shape:
            self._copy = self._torch.empty_like(tensor, device=f"cuda:{self.gpu}")
        self._copy.copy_(tensor)
        self._torch.cuda.synchronize()

    def copied(self) -> Any:
        return self._copy.cpu().numpy()

    def close(self, opened: Any) -> None:
        opened.clear()


class CudaCore(OnGpu):
    """cuda.core 1: buffers of a memory pool, which the other process has got before, by their descriptors."""

    def __init__(self, pipe: Any, first: bool, reader: str = "0") -> None:
        super().__init__(pipe, first, reader)
        from cuda.core import Buffer, Device, DeviceMemoryResource, DeviceMemoryResourceOptions

        own = Device(self.gpu)
        own.set_current()
        self._stream = own.create_stream()
        device = Device(0)
        self._import: Callable[..., Any] = Buffer.from_ipc_descriptor
        if first:
            self._pool = DeviceMemoryResource(device, DeviceMemoryResourceOptions(ipc_enabled=True))
            reduction.send_handle(pipe, int(self._pool.allocation_handle), None)
        else:
            fd = reduction.recv_handle(pipe)
            self._pool = DeviceMemoryResource.from_allocation_handle(device, fd)
            os.close(fd)
            if self.gpu:
                # An imported pool does not have the accesses that its creator has set.
                self._pool.peer_accessible_by = [self.gpu]

    def make(self, size: int, value: int) -> Any:
        buffer = self._pool.allocate(size, stream=self._stream)
        self._stream.sync()
        self.driver.fill(int(buffer.handle), value, size)
        return buffer

    def send(self, memory: Any, pipe: Any) -> Any:
        pipe.send_bytes(pickle.dumps(memory.ipc_descriptor))
        return memory

    def drop(self, sent: Any) -> None:
        sent.close(self._stream)
        self._stream.sync()

    def receive(self, pipe: Any) -> Any:
        return pickle.loads(pipe.recv_bytes())

    def open(self, handle: Any) -> Any:
        return self._import(self._pool, handle, stream=self._stream)

    def address(self, opened: Any) -> tuple[int, int]:
        return int(opened.handle), opened.size

    def close(self, opened: Any) -> None:
        opened.close(self._stream)
        self._stream.sync()


class Sized(OnGpu):
    """Ways whose handle does not say how large the memory is: its size goes before it."""

    def make(self, size: int, value: int) -> Any:
        memory = self.allocate(size)
        self.driver.fill(memory[0], value, size)
        return memory

    def allocate(self, size: int) -> Any:
        """A tuple of the address, the size, and what else there is."""
        raise NotImplementedError


class Cupy(Sized):
    """CuPy's `ipcGetMemHandle` and `ipcOpenMemHandle`, of memory of `cudaMalloc`."""

    def __init__(self, pipe: Any, first: bool, reader: str = "0") -> None:
        from cupy.cuda import runtime

        super().__init__(pipe, first, reader)
        runtime.setDevice(self.gpu)
        # Makes the primary context current, without a kernel that CuPy would have to compile.
        runtime.free(0)
        self._runtime = runtime

    def allocate(self, size: int) -> Any:
        return self._runtime.malloc(size), size

    def send(self, memory: Any, pipe: Any) -> Any:
        address, size = memory
        pipe.send_bytes(size.to_bytes(8) + self._runtime.ipcGetMemHandle(address))
        return memory

    def drop(self, sent: Any) -> None:
        self._runtime.free(sent[0])

    def receive(self, pipe: Any) -> Any:
        received = pipe.recv_bytes()
        return int.from_bytes(received[:8]), received[8:]

    def open(self, handle: Any) -> Any:
        size, name = handle
        return self._runtime.ipcOpenMemHandle(name), size

    def close(self, opened: Any) -> None:
        self._runtime.ipcCloseMemHandle(opened[0])


class IpcMemHandle(ctypes.Structure):
    """CUipcMemHandle"""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Legacy(Sized):
    """The driver's `cuIpcGetMemHandle` and `cuIpcOpenMemHandle`, of memory of `cuMemAlloc`."""

    def allocate(self, size: int) -> Any:
        return self.driver.number("cuMemAlloc_v2", ctypes.c_size_t(size)), size

    def send(self, memory: Any, pipe: Any) -> Any:
        address, size = memory
        handle = IpcMemHandle()
        self.driver.call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        pipe.send_bytes(size.to_bytes(8) + bytes(handle))
        return memory

    def drop(self, sent: Any) -> None:
        self.driver.call("cuMemFree_v2", ctypes.c_uint64(sent[0]))

    def receive(self, pipe: Any) -> Any:
        received = pipe.recv_bytes()
        return int.from_bytes(received[:8]), IpcMemHandle.from_buffer_copy(received[8:])

    def open(self, handle: Any) -> Any:
        size, name = handle
        lazy_enable_peer_access = 1
        return self.driver.number("cuIpcOpenMemHandle_v2", name, lazy_enable_peer_access), size

    def close(self, opened: Any) -> None:
        self.driver.call("cuIpcCloseMemHandle", ctypes.c_uint64(opened[0]))


class Location(ctypes.Structure):
    """CUmemLocation"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class AccessDescriptor(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


DEVICE = 1
READ, READ_WRITE = 1, 3


class FileDescriptors(Sized):
    """The floor: the driver's `cuMemCreate`, exported as a file descriptor, imported and mapped. It has no name, and
    nothing keeps it."""

    def __init__(self, pipe: Any, first: bool, reader: str = "0") -> None:
        super().__init__(pipe, first, reader)
        pinned = 1
        self._properties = AllocationProperties(pinned, FILE_DESCRIPTOR, Location(DEVICE, 0))
        self._granularity = self.driver.number("cuMemGetAllocationGranularity", ctypes.byref(self._properties), 0)

    def allocate(self, size: int) -> Any:
        mapped = -(-size // self._granularity) * self._granularity
        memory = self.driver.number("cuMemCreate", ctypes.c_size_t(mapped), ctypes.byref(self._properties), ctypes.c_uint64(0))
        return self._map(memory, mapped, READ_WRITE), size, mapped, memory

    def send(self, memory: Any, pipe: Any) -> Any:
        _, size, mapped, handle = memory
        fd = ctypes.c_int(-1)
        self.driver.call(
            "cuMemExportToShareableHandle", ctypes.byref(fd), ctypes.c_uint64(handle), FILE_DESCRIPTOR, ctypes.c_uint64(0)
        )
        pipe.send_bytes(size.to_bytes(8) + mapped.to_bytes(8))
        reduction.send_handle(pipe, fd.value, None)
        os.close(fd.value)
        return memory

    def drop(self, sent: Any) -> None:
        self.close(sent)

    def receive(self, pipe: Any) -> Any:
        received = pipe.recv_bytes()
        return int.from_bytes(received[:8]), int.from_bytes(received[8:]), reduction.recv_handle(pipe)

    def open(self, handle: Any) -> Any:
        size, mapped, fd = handle
        memory = self.driver.number("cuMemImportFromShareableHandle", ctypes.c_void_p(fd), FILE_DESCRIPTOR)
        return self._map(memory, mapped, READ), size, mapped, memory

    def address(self, opened: Any) -> tuple[int, int]:
        address, size, *_ = opened
        return address, size

    def close(self, opened: Any) -> None:
        address, _, mapped, memory = opened
        self.driver.call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(mapped))
        self.driver.call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(mapped))
        self.driver.call("cuMemRelease", ctypes.c_uint64(memory))

    def forget(self, handle: Any) -> None:
        os.close(handle[2])

    def _map(self, memory: int, size: int, flags: int) -> int:
        length, zero = ctypes.c_size_t(size), ctypes.c_uint64(0)
        address = self.driver.number("cuMemAddressReserve", length, ctypes.c_size_t(0), zero, zero)
        self.driver.call("cuMemMap", ctypes.c_uint64(address), length, ctypes.c_size_t(0), ctypes.c_uint64(memory), zero)
        access = AccessDescriptor(Location(DEVICE, self.gpu), flags)
        self.driver.call("cuMemSetAccess", ctypes.c_uint64(address), length, ctypes.byref(access), ctypes.c_size_t(1))
        return address
