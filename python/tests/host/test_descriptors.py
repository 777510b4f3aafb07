"""A version's memory as file descriptors."""

import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, fork

READ = """
import mmap, sys
fd, nbytes, offset = map(int, sys.argv[1].split(":"))
print(list(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)[offset:offset + 4]))
"""


def fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


def held(domain: pw.Domain) -> int:
    return domain.ps()[0].leases


def test_descriptors_say_where_every_tensor_is(domain):
    values = {"a": np.arange(6, dtype="float32").reshape(2, 3), "b": np.full(5, 7, "uint8")}
    with domain.put("x", values, "host", metadata={"step": "7"}), domain.descriptors("x@1") as x:
        assert (x.name, x.version, x.kind, x.place, x.mutable, x.may_grow) == ("x", 1, "host", "host", False, False)
        assert x.metadata == {"step": "7"} and x.nbytes == sum(chunk.nbytes for chunk in x.chunks)
        assert list(x.tensors) == ["a", "b"]
        assert x.tensors["b"] == pw.TensorPlace("uint8", (5,), (1,), 0, 256, 5)
        assert x.tensors["a"].shape == (2, 3) and x.tensors["a"].strides == (3, 1)
        [chunk] = x.chunks
        assert x.fds == [chunk.fd] == [chunk.fileno()] and not os.get_inheritable(chunk.fd)
        with mmap.mmap(chunk.fd, chunk.nbytes, prot=mmap.PROT_READ) as mapped:
            for name, place in x.tensors.items():
                there = np.frombuffer(mapped[place.offset : place.offset + place.nbytes], place.dtype)
                assert (there.reshape(place.shape) == values[name]).all()
        assert repr(x) == f"<partywall.Descriptors x@1: {x.nbytes} bytes on host>"


# Holds 224.
def test_descriptors_of_frozen_memory_are_read_only(domain):
    with domain.put("x", np.zeros(4, "uint8"), "host"), domain.descriptors("x") as x:
        with pytest.raises(PermissionError):
            mmap.mmap(x.fds[0], 4)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(x.fds[0], b"1")
    with domain.put("y", np.zeros(4, "uint8"), "host", mutable=True) as segment, domain.descriptors("y") as y:
        assert y.mutable and y.may_grow
        with mmap.mmap(y.fds[0], y.chunks[0].nbytes) as mapped:
            mapped[3] = 9
        assert np.from_dlpack(segment).tolist() == [0, 0, 0, 9]


# Holds 222.
def test_a_child_process_maps_descriptors_without_partywall(domain):
    with domain.put("x", np.arange(4, dtype="uint8"), "host"), domain.descriptors("x") as x:
        [chunk] = x.chunks
        [place] = x.tensors.values()
        command = [sys.executable, "-c", READ, f"{chunk.fd}:{chunk.nbytes}:{place.offset}"]
        read = subprocess.run(command, pass_fds=x.fds, capture_output=True, text=True, timeout=WATCHDOG, check=True)
        assert read.stdout == "[0, 1, 2, 3]\n"
        closed = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
        assert closed.returncode == 1 and "Bad file descriptor" in closed.stderr


def test_descriptors_end_with_their_object(domain):
    segment = domain.put("x", np.zeros(4), "host", kept=True)
    segment.close()
    leases = held(domain)
    before = fds()
    with domain.descriptors("x") as x:
        assert len(fds()) == len(before) + 1
        assert held(domain) == leases + 1
    assert x.closed and fds() == before and held(domain) == leases
    x.close()
    for use in (lambda: x.fds, lambda: x.chunks, lambda: x.tensors, lambda: x.metadata):
        with pytest.raises(pw.Closed, match="this list of descriptors is closed"):
            use()
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Descriptors x@1"):
        domain.descriptors("x")
        gc.collect()


def test_descriptors_wait_and_refuse_as_open_does(domain, socket, child):
    with pytest.raises(pw.NameNotFound):
        domain.descriptors("later")
    with pytest.raises(pw.TimeoutError):
        domain.descriptors("later", timeout=0.01)
    committer = child(
        """
        with pw.connect(socket=sys.argv[1]) as d, d.put("later", np.full(3, 5, "uint8"), "host"):
            say("there")
            told()
        """,
        socket,
    )
    with domain.descriptors("later", timeout=WATCHDOG) as x:
        committer.kill()
        with mmap.mmap(x.fds[0], x.chunks[0].nbytes, prot=mmap.PROT_READ) as mapped:
            assert mapped[0] == 5
    refused = pytest.raises(pw.WrongKind, match="is a pool, not a segment")
    with domain.pool("pool", blocks=1, block_bytes=64, device="host"), refused:
        domain.descriptors("pool")


def test_descriptors_of_a_parent_work_in_a_forked_child(domain):
    with domain.put("x", np.full(3, 5, "uint8"), "host"), domain.descriptors("x") as x:
        pid = fork()
        if pid == 0:
            code = 1
            try:
                with mmap.mmap(x.fds[0], x.chunks[0].nbytes, prot=mmap.PROT_READ) as mapped:
                    code = 0 if mapped[0] == 5 else 2
                try:
                    domain.descriptors("x")
                    code = 3
                except pw.Forked:
                    x.close()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert x.fds and held(domain) == 2
