"""Random numbers of workers.

A fork has the generators of its parent, in the same state: without this, all workers would draw the same numbers.
"""

import hashlib
import importlib
import os
import random
import sys


def begin_streams(seed: int | None, worker: int, start: int) -> None:
    """Gives this process streams of random numbers of its own: those of `random`, and of `numpy.random` and `torch` if
    they are loaded. With a seed they depend on it, on the number of the worker, and on how many starts of this worker
    went before, and on nothing else."""
    entropy = os.urandom(32) if seed is None else hashlib.sha256(f"{seed} {worker} {start}".encode()).digest()
    random.seed(entropy)
    # A module that is loaded later begins with entropy of its own.
    if "numpy" in sys.modules:
        # NumPy loads it when it is first used, and the program could not tell which worker began with entropy.
        numpy_random = importlib.import_module("numpy.random")

        words = [int.from_bytes(entropy[at : at + 4], "little") for at in range(0, len(entropy), 4)]
        try:
            numpy_random.seed(words)
        except TypeError:
            # The program has put another bit generator than the usual one in its place.
            numpy_random.set_bit_generator(type(numpy_random.get_bit_generator())(words))
    if (torch := sys.modules.get("torch")) is not None:
        # Also those of GPUs, which torch seeds when it first uses them.
        torch.manual_seed(int.from_bytes(entropy[:8], "little"))
