"""Batches of a loader: its workers put them into blocks of a pool, and the process that iterates uses them there."""

import io
import logging
import math
import os
import pickle
import secrets
import weakref
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch

from partywall import _native
from partywall._domain import Domain, connect
from partywall._errors import Error, NameNotFound, TimeoutError, WrongPool
from partywall._pool import Pool
from partywall.torch._tensors import span

Leaf: TypeAlias = tuple[int, Any, tuple[int, ...], tuple[int, ...]]
"""A tensor of a batch: the offset of its first element in the block, its dtype, shape and strides."""


class Packed:
    """A batch in a block. It is sent as the reference of the block, and what is not in it."""

    def __init__(self, leaves: list[Leaf], content: bytes | tuple[int, int]) -> None:
        self.generation = 0
        """Which pool of the loader has the block."""
        self.reference = ""
        self._leaves = leaves
        self._content = content
        """The pickled batch without its tensors, or the offset and length of that in the block."""

    def read(self, memory: memoryview) -> Any:
        """Returns the batch that lies in the memory of a block."""
        content = self._content
        if isinstance(content, tuple):
            content = bytes(memory[content[0] : sum(content)])
        reader = _Unpickler(io.BytesIO(content))
        reader.tensors = [_tensor(memory, *leaf) for leaf in self._leaves]
        return reader.load()


class Batches:
    """The pools of a loader in the process that iterates. A pool with larger blocks is a further generation."""

    def __init__(self, domain: Domain, blocks: int, pins: bool) -> None:
        self.source = Source(domain.socket, f"torch/loader-{os.getpid()}-{secrets.token_hex(4)}", blocks)
        self.process = os.getpid()
        self._domain = domain
        self.pins = pins
        self._pools: dict[int, Pool] = {}
        weakref.finalize(self, _close, self._pools)

    def open(self, packed: Packed) -> Any:
        """Takes over the block of a batch from its worker, and returns the batch. Its tensors are the memory of the
        block, which returns to the pool with the last. Raises if the block is lost, because the worker has died."""
        pool = self._pools.get(packed.generation)
        if pool is None:
            pool = self._pools[packed.generation] = self._domain.pool(self.source.pool(packed.generation))
            if self.pins:
                try:
                    pool.pin(f"cuda:{torch.cuda.current_device()}")
                except Error as error:
                    self.pins = False
                    _log.warning("batches are not pinned: %s", error)
        with pool.accept(packed.reference) as block:
            return packed.read(memoryview(block.tensor()))

    def begin(self) -> "Source":
        """Returns where the workers of a new pass put their batches: into the largest blocks that there were."""
        if self._pools:
            newest = max(self._pools)
            for generation in [generation for generation in self._pools if generation < newest]:
                self._pools.pop(generation).close()
            self.source.generation = newest
        return self.source


@dataclass
class Source:
    """The blocks that a worker fills."""

    socket: str
    name: str
    blocks: int
    generation: int = 0
    _pool: Pool | None = field(default=None, init=False)
    _former: list[Pool] = field(default_factory=list, init=False)
    _room: "_Room | None" = field(default=None, init=False)
    _waits: bool = field(default=True, init=False)
    """Whether to wait for a block. A process that keeps many batches would let each of them wait."""
    _failed: bool = field(default=False, init=False)

    def pool(self, generation: int) -> str:
        """Returns the name of a pool."""
        return f"{self.name}/{generation}"

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any | None:
        """Returns a tensor in the block of the next batch; `None` if there is none, or if it has no room."""
        if self._room is None and self._pool is not None:
            self._room = self._take(0)
        return None if self._room is None else self._room.empty(shape, dtype)

    def pack(self, data: Any) -> "tuple[Packed, _Room] | None":
        """Puts a batch into a block, which is to be offered once nothing else uses it. Returns `None` if the batch has
        no tensors in plain memory, or if there is no block for it."""
        room, self._room = self._room, None
        content = io.BytesIO()
        writer = _Pickler(content)
        writer.tensors, writer.known = [], {}
        writer.dump(data)
        if not writer.tensors:
            return None
        stream = content.getbuffer()
        extra = len(stream) if len(stream) > _INLINE else 0
        leaves, copies, end = _plan(writer.tensors, room, 0 if room is None else room.used)
        if room is None or end + extra > room.size:
            # Tensors in a block that is too small go to the other one, too.
            leaves, copies, end = _plan(writer.tensors, None, 0)
            room = self._take(end + extra)
            if room is None:
                return None
        for (offset, dtype, *_), source in copies:
            room.view(offset, source.shape, dtype).copy_(source)
        room.memory[end : end + extra] = stream[:extra]
        room.used = end + extra
        return Packed(leaves, (end, extra) if extra else bytes(stream)), room

    def offer(self, packed: Packed, room: "_Room") -> bool:
        """Offers the block of a batch to the process that iterates. Returns false if there is none.

        If other code still has a tensor of the batch, it keeps that block, and the batch goes into another one."""
        try:
            packed.reference = room.offer()
        except Error:
            other = self._take(room.used)
            if other is None:
                return False
            other.memory[: room.used] = room.memory[: room.used]
            packed.reference = other.offer()
            room = other
        packed.generation = room.generation
        return True

    def _take(self, size: int) -> "_Room | None":
        """Takes a block of at least `size` bytes. Never waits for long."""
        if self._failed:
            return None
        try:
            pool = self._pool_of(size)
            block = pool.try_alloc()
            if block is None and self._waits:
                # Blocks come back when a GPU has copied them.
                block = pool.alloc(_LONGEST_WAIT)
        except TimeoutError:
            block = None
        except Error as error:
            # Without a broker, or without memory, batches go the way that torch's go.
            self._failed = True
            _log.warning("batches go through torch's shared memory from now on: %s", error)
            return None
        self._waits = block is not None
        return None if block is None else _Room(block, self.generation)

    def _pool_of(self, size: int) -> Pool:
        """Returns the pool. If its blocks are too small, opens or creates the next generation."""
        while self._pool is None or self._pool.block_bytes < size:
            least = 0
            if self._pool is not None:
                least = 2 * self._pool.block_bytes
                self.generation += 1
                # Stays open: otherwise blocks that are offered and not accepted would return.
                self._former.append(self._pool)
            self._pool = self._open(max(size, least, 1))
        return self._pool

    def _open(self, size: int) -> Pool:
        domain, name = connection(self.socket), self.pool(self.generation)
        while True:
            try:
                return domain.pool(name)
            except NameNotFound:
                try:
                    size = -(-size // _PAGE) * _PAGE
                    return domain.pool(name, blocks=self.blocks, block_bytes=size, device="host")
                except WrongPool:
                    # Another worker has created it meanwhile, for batches of another size.
                    continue


class _Room:
    """A block that is being filled."""

    def __init__(self, block: _native.Block, generation: int) -> None:
        self._block = block
        weakref.finalize(self, block.close)
        self.generation = generation
        tensor = block.tensor()
        self.memory = memoryview(tensor)
        self.begin = tensor.data_ptr
        self.size = tensor.nbytes
        self.used = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any | None:
        end = self.used + math.prod(shape) * dtype.itemsize
        if end > self.size:
            return None
        offset, self.used = self.used, _aligned(end)
        return self.view(offset, shape, dtype)

    def view(self, offset: int, shape: Any, dtype: Any) -> Any:
        return _tensor(self.memory, offset, dtype, tuple(shape), _contiguous(tuple(shape)))

    def has(self, tensor: Any) -> bool:
        return bool(self.begin <= tensor.data_ptr() < self.begin + self.size)

    def offer(self) -> str:
        """Offers the block, unless tensors of it are in use: then raises `StillUsed`, and the block stays as it is."""
        self.memory.release()
        try:
            return str(self._block.offer())
        except Error:
            self.memory = memoryview(self._block.tensor())
            raise


class _Pickler(ForkingPickler):
    """Leaves out tensors in plain memory. What else torch can send is pickled in its way."""

    tensors: list[Any]
    known: dict[int, int]

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not torch.Tensor or not is_plain(value):
            return None
        number = self.known.setdefault(id(value), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(value)
        return number


class _Unpickler(pickle.Unpickler):
    tensors: list[Any]

    def persistent_load(self, number: int) -> Any:
        return self.tensors[number]


def is_plain(tensor: Any) -> bool:
    """Returns whether a tensor is nothing but memory of the CPU."""
    return bool(
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        # torch 2.15 has no named tensors any more.
        and not getattr(tensor, "has_names", bool)()
    )


def connection(socket: str) -> Domain:
    """Returns this process's connection to a broker that runs."""
    global _connection
    if _connection is None or _connection[0] != os.getpid():
        _connection = (os.getpid(), connect(socket=socket, start=False))
    return _connection[1]


def _plan(tensors: list[Any], room: _Room | None, end: int) -> tuple[list[Leaf], list[tuple[Leaf, Any]], int]:
    """Returns where tensors lie in a block, those that must be copied there with what to copy, and the end of all."""
    leaves: list[Leaf] = []
    copies = []
    for tensor in tensors:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if room is not None and tensor.numel() and room.has(tensor):
            leaves.append((tensor.data_ptr() - room.begin, tensor.dtype, shape, stride))
            continue
        source, elements = tensor, span(shape, stride)
        if elements <= _GAPS * tensor.numel():
            # As it is, with its strides.
            source = tensor.as_strided((elements,), (1,))
        else:
            elements, stride = tensor.numel(), _contiguous(shape)
        leaf = (end, tensor.dtype, shape, stride)
        leaves.append(leaf)
        if elements:
            copies.append((leaf, source))
            end = _aligned(end + elements * tensor.itemsize)
    return leaves, copies, end


def _tensor(memory: memoryview, offset: int, dtype: Any, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    elements = span(shape, stride)
    if elements == 0:
        return torch.empty_strided(shape, stride, dtype=dtype)
    # Each has a storage of its own, so that saving or sending one does not take the others along.
    part = memory[offset : offset + elements * dtype.itemsize]
    return torch.frombuffer(part, dtype=dtype).as_strided(shape, stride)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(torch.empty(shape, device="meta").stride())


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _close(pools: dict[int, Pool]) -> None:
    for pool in pools.values():
        pool.close()


_connection: tuple[int, Domain] | None = None
"""This process's connection as a worker, with the process that made it."""

_ALIGNMENT = 64
"""Bytes at whose multiples tensors begin, as in torch's own memory."""

_GAPS = 2
"""How many times its size a tensor with gaps may take in a block. One with larger gaps loses them."""

_PAGE = 4096

_INLINE = 8192
"""Bytes of a pickled batch without its tensors that are sent through the pipe. More could fill it."""

_LONGEST_WAIT = 0.5
"""Seconds that a worker waits for a block."""

_log = logging.getLogger("partywall.torch")
