"""Pools: equal blocks of memory that processes take and give back."""

from dataclasses import dataclass
from typing import Any

from partywall import _native
from partywall._handle import Connected
from partywall._native import Block


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

    block: Block
    """The block, which belongs to the task once that is submitted."""
    shape: tuple[int, ...]
    """Elements along each dimension."""
    dtype: str
    """The type of the elements."""
    offset: int
    """Bytes before the first one."""
