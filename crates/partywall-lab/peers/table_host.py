"""Ways to share host memory, for `table.py`: Partywall, `multiprocessing.shared_memory`, and a memfd by hand."""

import mmap
import os
from multiprocessing import reduction, shared_memory
from typing import Any

import numpy as np


class Partywall:
    """A segment: committed, opened by its name."""

    device = "host"

    def __init__(self, _pipe: Any, _first: bool, socket: str) -> None:
        import partywall as pw

        self._domain = pw.connect(socket=socket, start=False)

    def make(self, size: int, value: int) -> Any:
        build = self._domain.create("table", size, "uint8", device=self.device)
        self.fill(build, value)
        return build

    def fill(self, build: Any, value: int) -> None:
        np.asarray(build)[:] = value

    def send(self, memory: Any, pipe: Any) -> Any:
        segment = memory.commit()
        pipe.send_bytes(segment.name.encode())
        return segment

    def drop(self, sent: Any) -> None:
        self._domain.rm(sent.name)
        sent.close()

    def receive(self, pipe: Any) -> Any:
        return pipe.recv_bytes().decode()

    def open(self, handle: Any) -> Any:
        return self._domain.open(handle)

    def first(self, opened: Any) -> int:
        return memoryview(opened.tensor)[0]

    def whole(self, opened: Any) -> Any:
        return np.asarray(opened)

    def close(self, opened: Any) -> None:
        opened.close()

    def forget(self, handle: Any) -> None:
        pass


class SharedMemory:
    """`multiprocessing.shared_memory`."""

    def __init__(self, _pipe: Any, _first: bool) -> None:
        pass

    def make(self, size: int, value: int) -> Any:
        # A page for which there is no room would end the process by a signal.
        room = os.statvfs("/dev/shm")
        free = room.f_bavail * room.f_frsize
        if free < size:
            raise MemoryError(f"/dev/shm has {free} bytes free, and {size} are needed")
        memory = shared_memory.SharedMemory(create=True, size=size)
        np.ndarray(size, np.uint8, memory.buf)[:] = value
        return memory

    def send(self, memory: Any, pipe: Any) -> Any:
        pipe.send_bytes(memory.name.encode())
        return memory

    def drop(self, sent: Any) -> None:
        sent.close()
        sent.unlink()

    def receive(self, pipe: Any) -> Any:
        return pipe.recv_bytes().decode()

    def open(self, handle: Any) -> Any:
        return shared_memory.SharedMemory(handle)

    def first(self, opened: Any) -> int:
        return int(opened.buf[0])

    def whole(self, opened: Any) -> Any:
        return np.ndarray(opened.size, np.uint8, opened.buf)

    def close(self, opened: Any) -> None:
        opened.close()

    def forget(self, handle: Any) -> None:
        pass


class Memfd:
    """The floor: a file in memory, sent as a descriptor, and mapped. It has no name, and nothing keeps it."""

    def __init__(self, _pipe: Any, _first: bool) -> None:
        pass

    def make(self, size: int, value: int) -> Any:
        fd = os.memfd_create("table")
        os.ftruncate(fd, size)
        with mmap.mmap(fd, size) as mapped:
            np.frombuffer(mapped, np.uint8)[:] = value
        return fd

    def send(self, memory: Any, pipe: Any) -> Any:
        reduction.send_handle(pipe, memory, None)
        return memory

    def drop(self, sent: Any) -> None:
        os.close(sent)

    def receive(self, pipe: Any) -> Any:
        return reduction.recv_handle(pipe)

    def open(self, handle: Any) -> Any:
        return mmap.mmap(handle, 0, prot=mmap.PROT_READ)

    def first(self, opened: Any) -> int:
        return int(opened[0])

    def whole(self, opened: Any) -> Any:
        return np.frombuffer(opened, np.uint8)

    def close(self, opened: Any) -> None:
        opened.close()

    def forget(self, handle: Any) -> None:
        os.close(handle)
