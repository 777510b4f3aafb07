"""Pools: equal blocks of memory that go round between processes."""

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsIndex

from partywall import _arrays, _native, _streams
from partywall._arrays import Shape
from partywall._exchange import array
from partywall._handle import Connected, Held

if TYPE_CHECKING:
    from partywall._domain import Domain


@dataclass(frozen=True)
class BlockRef:
    """Names a block that its holder has offered, for whoever is to accept it. Send it in any way: it can be pickled.

    Once the block was taken over, taken back, or came back with its holder's death, it is stale, for ever.
    """

    pool: str
    """The pool's name."""
    version: int
    """The pool's version: of a name that was removed and made again there is another."""
    index: int
    """Which block of the pool it is."""
    generation: int
    """Another number each time that a block of the pool is taken."""

    def __str__(self) -> str:
        return f"{self.pool}@{self.version}#{self.index}.{self.generation}"


@dataclass(frozen=True)
class PoolStats:
    """What a pool's blocks are at a moment."""

    blocks: int
    """How many there are."""
    free: int
    """How many anybody may take."""
    held: int
    """How many somebody has, or is just getting."""
    offered: int
    """How many their holders have offered to others."""
    waiting: int
    """How many threads wait for one, of whatever processes."""


class Pool(Connected[_native.Pool]):
    """A named number of equal blocks of memory, which any process takes and gives back; made by `Domain.pool`.

        with pool.alloc() as block:             # waits for a block, and gives it back
            np.asarray(block)[:] = frame

    Who has taken a block is the only one who uses it, until it is given back, or offered and taken over. Who waits is
    served in the order in which he came. The blocks of a process that dies come back. Threads may share a handle.
    """

    def __init__(self, domain: "Domain", native: _native.Pool) -> None:
        super().__init__(domain, native)

    @property
    def name(self) -> str:
        """The name."""
        return self._native.name

    @property
    def version(self) -> int:
        """Which pool of that name it is: of one that was removed and made again there is another."""
        return self._native.version

    @property
    def blocks(self) -> int:
        """How many blocks there are."""
        return self._native.blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of each block."""
        return self._native.block_bytes

    @property
    def zeroed(self) -> bool:
        """Whether whoever takes a block finds it all zero."""
        return self._native.zeroed

    @property
    def place(self) -> str:
        """`host`, or the UUID of the GPU that has the blocks."""
        return self._native.place

    def alloc(self, timeout: float | None = None) -> "Block":
        """Takes a block, and waits for one up to `timeout` seconds, or for ever. If it is to be zeroed, it is by then."""
        return Block(self._native.alloc(timeout))

    def try_alloc(self) -> "Block | None":
        """Takes a block if one is free and nobody waits for it."""
        block = self._native.try_alloc()
        return None if block is None else Block(block)

    def accept(self, block: "BlockRef | str") -> "Block":
        """Takes over a block that its holder has offered, as it is; `StaleBlock` if it is not offered any more.

        Nothing orders the caller after work that a GPU still does in it for its giver: a `Timeline` does.
        """
        return Block(self._native.accept(str(block)))

    def stats(self) -> PoolStats:
        """What its blocks are at the moment."""
        return PoolStats(*self._native.stats())

    def close(self) -> None:
        """Gives the handle back, and ends the waits of this process that are made with it. Blocks stay.

        What was offered and not yet taken over comes back with the last handle and block.
        Calling it again does nothing.
        """
        super().close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a pool is shared by its name: send that")

    def __repr__(self) -> str:
        what = f"{self.blocks} blocks of {self.block_bytes} bytes on {self.place}"
        state = "closed" if self.closed else f"{what}, {self.stats().free} free"
        return f"<partywall.Pool {self.name}: {state}>"


def count(number: SupportsIndex) -> int:
    """A number of blocks."""
    number = operator.index(number)
    if not 0 <= number < 1 << 32:
        raise ValueError(f"a pool has 1 to 65,536 blocks, not {number}")
    return number


class Block(Held[_native.Block]):
    """A block of a pool, to be given back: by `release`, `release_on`, or at the end of its `with`; or to be offered.

    Its bytes can be given to `from_dlpack`, `np.asarray` and the like; `tensor` gives them another shape and type.
    Whatever is made of it keeps it: a block comes back with the last array of it, and then, on a GPU, when everything is
    over that this process does there.
    """

    def __init__(self, native: _native.Block) -> None:
        super().__init__(native)

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
        """Another number each time that a block of the pool is taken."""
        return self._native.generation

    @property
    def nbytes(self) -> int:
        """How many bytes it has."""
        return self._native.nbytes

    def tensor(self, shape: Shape | None = None, dtype: Any = "uint8") -> _native.Tensor:
        """Its beginning as a tensor; without a shape, as many elements as there is room for."""
        return self._native.tensor(_arrays.dtype_name(dtype), None if shape is None else _arrays.dimensions(shape))

    def zero(self, stream: Any = None) -> None:
        """Sets all its bytes to zero: in host memory at once, on a GPU behind what is on `stream`."""
        if self._native.on_host:
            self._native.zero()
        else:
            self._native.zero_on(*_streams.place(stream, None))

    def offer(self) -> BlockRef:
        """Offers it to whoever gets the reference and accepts it. It stays this process's until then.

        Arrays of it are to be dropped before: `StillUsed` if there are any.
        """
        return BlockRef(*self._native.offer())

    @property
    def held(self) -> bool:
        """Whether it is to be given back still."""
        return not self._native.closed

    def release(self) -> None:
        """Gives it back, on a GPU when everything is over that this process does there. `NotHeld` if it was before.

        If arrays of it are still used, the last of them gives it back.
        """
        self._native.release()

    @property
    def closed(self) -> bool:
        """Whether it was given back, or to another, or to a stream."""
        return self._native.closed

    def close(self) -> None:
        """As `release`. Calling it again does nothing, nor after the block was offered or left to a stream."""
        self._native.close()

    def release_on(self, stream: Any = None, *, device: Any = None) -> None:
        """Gives it back when everything that is on a stream now is done. Returns at once.

        `stream` and `device` as for a `Timeline`. If arrays of it are still used, the last of them gives it back, as
        `release` does.
        """
        self._native.release_on(*_streams.place(stream, device))

    def tobytes(self, stream: Any = None) -> bytes:
        """A copy of its bytes, made after what is on `stream`."""
        return self.tensor().tobytes(stream)

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.tensor().__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.tensor().__dlpack_device__()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return array(self.tensor(), dtype, copy)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.tensor().__cuda_array_interface__

    def __enter__(self) -> "Block":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a block is this process's own: offer it, and send what that returns")

    def __repr__(self) -> str:
        state = "held" if self.held else "given back"
        return f"<partywall.Block {self.index} of {self.pool}: {self.nbytes} bytes, {state}>"
