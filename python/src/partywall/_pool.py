"""Pools: equal blocks of memory that processes take and give back."""

import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from partywall import _native, _streams
from partywall._arrays import Shape, device_name, dimensions, dtype_name
from partywall._errors import BadTensor
from partywall._exchange import Exported
from partywall._handle import Connected, Handle


@dataclass(frozen=True)
class BlockRef:
    """A reference to a block that its holder has offered to another process. It can be pickled and sent in any way.

    The reference is stale for ever once the block is accepted, is taken back, or returns after its holder's death.
    """

    pool: str
    """The pool's name."""
    version: int
    """The pool's version. A pool that is removed and created again has another one."""
    index: int
    """Which block of the pool it is."""
    generation: int
    """A number that changes each time a block of the pool is taken."""

    def __str__(self) -> str:
        return f"{self.pool}@{self.version}#{self.index}.{self.generation}"


@dataclass(frozen=True)
class PoolStats:
    """The states of a pool's blocks at one moment."""

    blocks: int
    """The number of blocks."""
    free: int
    """The number of free blocks."""
    held: int
    """The number of blocks that are held or being taken."""
    offered: int
    """The number of blocks that are offered to other processes."""
    waiting: int
    """The number of threads, in all processes, that wait for a block."""


class Pool(Connected, _native.Pool):
    """A named set of equal blocks of memory, which any process can take and give back. `Domain.pool` returns one.

        with pool.alloc() as block:             # waits for a block, and gives it back
            np.asarray(block)[:] = frame

    A process that has taken a block is the only one to use it until it gives the block back, or offers it and another
    process accepts it. Waiters are served in the order of their arrival. The blocks of a process that dies return to
    the pool. Threads may share a handle.
    """

    def alloc(self, timeout: float | None = None) -> "Block":
        """Takes a block. Waits for one up to `timeout` seconds, or for ever. A block of a zeroed pool is all zero."""
        return Block(self._alloc(timeout))

    def try_alloc(self) -> "Block | None":
        """Takes a block if one is free and no thread waits for it; else returns `None`."""
        block = self._try_alloc()
        return None if block is None else Block(block)

    def accept(self, block: "BlockRef | str") -> "Block":
        """Accepts a block that its holder has offered, with its content. Raises `StaleBlock` if it is no longer
        offered.

        The caller is not ordered after work that the former holder's GPU still does on the block: use a `Timeline` for
        that.
        """
        return Block(self._accept(str(block)))

    def pin(self, device: Any = "cuda") -> None:
        """Page-locks the blocks of a pool in host memory and registers them with CUDA, for as long as this process has
        the pool open.

        GPUs of this process then copy from and to arrays of blocks asynchronously. Such a block returns to the pool
        once all work of this process on its GPUs is done. Other processes need no driver to use the pool. It takes 0.4
        ms per MiB; calling it again does nothing.
        """
        self._pin(device_name(device))

    def close(self) -> None:
        """Closes the handle, and ends the waits of this process that use it. Blocks stay.

        Blocks that are offered and not accepted return when the last handle and block of this process are released.
        Calling `close` again does nothing.
        """
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a pool is shared by name: send the name")

    def __repr__(self) -> str:
        what = f"{self.blocks} blocks of {self.block_bytes} bytes on {self.place}"
        state = "closed" if self.closed else f"{what}, {self.stats().free} free"
        return f"<partywall.Pool {self.name}: {state}>"


@dataclass(frozen=True)
class BlockPart:
    """A tensor in a block of a queue's `inputs`, as the input of a task; `Block.part` returns one."""

    block: "Block"
    """The block, which belongs to the task once that is submitted."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    dtype: str
    """The type of the elements."""
    offset: int
    """Bytes before the first one."""


class Block(Handle[_native.Block], Exported):
    """A block of a pool. Give it back with `release`, `release_on` or the end of its `with`, or `offer` it.

    `from_dlpack`, `np.asarray` and similar functions take its bytes; `tensor` gives them another shape and type. Arrays
    of a block hold it: the block returns to the pool when the last of them is dropped. On a GPU it returns once all
    work of this process on that GPU is done.
    """

    @property
    def pool(self) -> str:
        """The pool's name."""
        return self._native.pool

    @property
    def index(self) -> int:
        """Which block of the pool it is."""
        return self._native.index

    @property
    def generation(self) -> int:
        """A number that changes each time a block of the pool is taken."""
        return self._native.generation

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self._native.nbytes

    def tensor(self, shape: Shape | None = None, dtype: Any = None) -> _native.Tensor:
        """Returns the beginning of the block as a tensor, of bytes unless a dtype is given. Without a shape, the tensor
        has as many elements as fit. The block of a task's result has the type and shape of the result by default."""
        return self._native.tensor(shape, dtype)

    def part(self, shape: Shape, dtype: Any = "uint8", *, offset: SupportsIndex = 0) -> "BlockPart":
        """Names a tensor in the block, `offset` bytes from its beginning, as the input of a task: `Queue.submit` takes
        it. The worker gets exactly that, with this type and shape. The offset is a multiple of an element's bytes.
        """
        name, begin = dtype_name(dtype), operator.index(offset)
        alignment = self._native.alignment(name)
        if begin % alignment != 0:
            message = f"no {name} can begin at byte {begin} of a block of {self.pool!r}"
            raise BadTensor(message, f"give an offset that is a multiple of {alignment}", "bad-range")
        return BlockPart(self, tuple(dimensions(shape)), name, begin)

    def zero(self, stream: Any = None) -> None:
        """Sets all bytes to zero: immediately in host memory, on a GPU after the work on `stream`.

        In pinned memory the CPU does it if no `stream` is given.
        """
        if not self._native.has_streams or (stream is None and self._native.on_host):
            self._native.zero()
        else:
            self._native.zero_on(*_streams.place(stream, None))

    def offer(self) -> BlockRef:
        """Offers the block. It stays with this process until another one accepts it with the returned reference.

        Drop all arrays of the block first; otherwise raises `StillUsed`. The block of a task's result cannot be offered
        (`WrongKind`): send the task, or a copy.
        """
        return self._native.offer()

    @property
    def held(self) -> bool:
        """Whether the block must still be given back."""
        return not self._native.closed

    def release(self) -> None:
        """Gives the block back; on a GPU, once all work of this process on it is done. Raises `NotHeld` if it is not
        held.

        If arrays of the block are still in use, the last of them gives it back.
        """
        self._native.release()

    @property
    def closed(self) -> bool:
        """Whether the block was given back, accepted by another process, or left to a stream."""
        return self._native.closed

    def close(self) -> None:
        """As `release`, but does nothing if the block was already given back, offered or left to a stream."""
        self._native.close()

    def release_on(self, stream: Any = None, *, device: Any = None) -> None:
        """Gives the block back once all work that is now on the stream is done. Returns immediately.

        `stream` and `device` are as for a `Timeline`. If arrays of the block are still in use, the last of them gives
        it back, as with `release`.
        """
        self._native.release_on(stream, device)

    def _exported(self) -> _native.Tensor:
        return self.tensor()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a block is this process's own: offer it, and send the returned reference")

    def __repr__(self) -> str:
        state = "held" if self.held else "given back"
        return f"<partywall.Block {self.index} of {self.pool}: {self.nbytes} bytes, {state}>"
