"""Samples on the simulated GPU: when they are complete, and when their blocks come back."""

import asyncio
import os
import signal

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG, eventually
from . import driver

pytestmark = pytest.mark.skipif(driver.DRIVER is None, reason="not simulated")

SIZE = 4096

KEPT: list[driver.DeviceBytes] = []

SENDER = (
    f"sys.path.insert(0, {os.path.dirname(driver.__file__)!r})\nimport driver\ndriver.use()\n"
    + """
with pw.connect(socket=sys.argv[1], start=False) as d, d.topic("frames") as frames, frames.publisher() as publisher:
    gate = driver.Gate()
    with publisher.loan(4096, "uint8", stream=gate.stream) as out:
        driver.fill(out.tensor.data_ptr, 7, 4096, gate.stream)
    say("published")
    told()
    gate.open()
    told()
"""
)


@pytest.fixture
def frames(domain):
    driver.use()
    with domain.topic("frames", max_bytes=SIZE, depth=8, history=1, publishers=4, held=4) as opened:
        yield opened


@pytest.fixture
def publisher(frames):
    with frames.publisher() as joined:
        yield joined


@pytest.fixture
def subscriber(frames):
    with frames.subscriber() as joined:
        yield joined


def filled(byte: int, stream: int) -> driver.DeviceBytes:
    """Returns a tensor on the device that `stream` fills."""
    address = driver.allocate(SIZE)
    driver.fill(address, byte, SIZE, stream)
    # Unlike tensors of libraries, it does not keep itself alive for its consumers.
    KEPT.append(driver.DeviceBytes(address, [SIZE]))
    return KEPT[-1]


# Holds 251.
def test_a_copy_on_the_device_is_waited_for_by_its_receiver(publisher, subscriber):
    gate = driver.Gate()
    tensor = filled(7, gate.stream)
    assert publisher.send(tensor, b"header", stream=gate.stream) == 0
    assert tensor.streams == [gate.stream]
    for timeout in (0, 0.02):
        with pytest.raises(pw.TimeoutError, match="timeline"):
            subscriber.recv(timeout)
    assert tensor.released == 0, "it is read"
    sample = subscriber.try_recv()
    assert sample is not None and not sample.ready and sample.header == b"header"
    for early in (lambda: sample.tensor, sample.check):
        with pytest.raises(pw.NotReady, match="not complete") as raised:
            early()
        assert raised.value.anchor == "not-ready"
    gate.open()
    sample.wait(WATCHDOG)
    sample.check()
    assert sample.ready and sample.tobytes() == b"\7" * SIZE
    interface = sample.__cuda_array_interface__
    assert (interface["shape"], interface["typestr"], interface["data"][1]) == ((SIZE,), "|u1", True)
    assert sample.__dlpack_device__() == (2, 0)
    with pytest.raises(pw.ReadOnly):
        sample.tensor.write(np.zeros(SIZE, np.uint8))
    eventually(lambda: tensor.released == 1)


def in_library(library: driver.Library, byte: int, stream: int, kind: type | None = None) -> driver.DeviceBytes:
    """Returns a tensor of the library that a stream fills."""
    address = driver.allocate(SIZE)
    driver.fill(address, byte, SIZE, stream)
    tensor = (kind or library.Tensor)(address, [SIZE])
    KEPT.append(tensor)
    return tensor


def test_a_tensor_of_dlpacks_c_interface_is_taken_without_a_call_of_python(publisher, subscriber):
    gate = driver.Gate()
    library = driver.Library(gate.stream)
    tensor = in_library(library, 7, gate.stream)
    publisher.send(tensor, stream=gate.stream)
    assert (library.given, tensor.streams) == (1, [])
    with pytest.raises(pw.TimeoutError):
        subscriber.recv(0.01)
    assert library.released == 0, "it is read"
    gate.open()
    assert subscriber.recv(WATCHDOG).tobytes() == b"\7" * SIZE
    eventually(lambda: library.released == 1)


@pytest.mark.parametrize("why", ["another stream", "derived", "complex", "refused", "version"])
def test_python_interface_is_used_where_the_c_interface_says_too_little(publisher, subscriber, why):
    gate, other = driver.Gate(), driver.Gate()
    for each in (gate, other):
        each.open()
    library = driver.Library(
        (other if why == "another stream" else gate).stream,
        code=5 if why == "complex" else 1,
        refuses=why == "refused",
        major=2 if why == "version" else 1,
    )
    kind = type("Derived", (library.Tensor,), {}) if why == "derived" else None
    tensor = in_library(library, 7, gate.stream, kind)
    publisher.send(tensor, stream=gate.stream)
    assert tensor.streams == [gate.stream]
    # A sample that was received nevertheless is released.
    assert library.released == (1 if why in ("another stream", "complex") else 0)
    assert subscriber.recv(WATCHDOG).tobytes() == b"\7" * SIZE
    eventually(lambda: tensor.released == 1)


# Holds 251.
def test_a_sample_that_was_not_complete_in_time_is_received_next(publisher, subscriber):
    gate = driver.Gate()
    publisher.send(filled(1, gate.stream), stream=gate.stream)
    publisher.send(filled(2, gate.stream), stream=gate.stream)
    with pytest.raises(pw.TimeoutError):
        subscriber.recv(0.01)
    with pytest.raises(pw.TimeoutError):
        asyncio.run(subscriber.recv_async(0.01))
    gate.open()
    assert [subscriber.recv(WATCHDOG).tobytes()[0], asyncio.run(subscriber.recv_async(WATCHDOG)).tobytes()[0]] == [1, 2]


def test_an_interrupted_receiver_gets_the_sample_next(publisher, subscriber):
    class Alarm(Exception):
        pass

    def ring(*_: object) -> None:
        raise Alarm

    gate = driver.Gate()
    publisher.send(filled(7, gate.stream), stream=gate.stream)
    former = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Alarm):
            subscriber.recv()
    finally:
        signal.signal(signal.SIGALRM, former)
    gate.open()
    assert subscriber.recv(WATCHDOG).tobytes() == b"\7" * SIZE


def test_a_loan_is_published_behind_its_stream(frames, publisher, subscriber):
    gate = driver.Gate()
    with publisher.loan((64, 16), "float32", stream=gate.stream) as out:
        assert out.__dlpack_device__() == (2, 0)
        assert out.__cuda_array_interface__["data"] == (out.tensor.data_ptr, False)
        driver.fill(out.tensor.data_ptr, 0, SIZE, gate.stream)
        with pytest.raises(pw.TimeoutError):
            subscriber.recv(0)
    gate.open()
    sample = subscriber.recv(WATCHDOG)
    assert (sample.shape, sample.dtype, sample.tobytes()) == ((64, 16), "float32", bytes(SIZE))
    sample.close()
    blocked = driver.Gate()
    with pytest.raises(ZeroDivisionError), publisher.loan(SIZE, "uint8", stream=blocked.stream) as out:
        driver.fill(out.tensor.data_ptr, 1, SIZE, blocked.stream)
        _ = 1 / 0
    assert frames.stats().held == 1, "its stream may still write it"
    blocked.open()
    eventually(lambda: frames.stats().held == 0)


# Holds 250.
def test_block_of_a_published_loan_waits_for_its_arrays_and_its_stream(domain):
    driver.use()
    opened = driver.Gate()
    opened.open()

    def send(publisher, byte):
        with publisher.loan(SIZE, "uint8", stream=opened.stream, timeout=WATCHDOG) as out:
            driver.fill(out.tensor.data_ptr, byte, SIZE, opened.stream)
            return out.tensor.data_ptr

    numbers = {"depth": 1, "publishers": 2, "subscribers": 1, "held": 1, "loans": 1}
    with (
        domain.topic("small", max_bytes=SIZE, **numbers) as topic,
        topic.publisher() as publisher,
        topic.publisher() as other,
        topic.subscriber() as subscriber,
    ):
        gate = driver.Gate()
        with publisher.loan(SIZE, "uint8", stream=gate.stream) as out:
            address = out.tensor.data_ptr
            driver.fill(address, 1, SIZE, gate.stream)
            array = out.__dlpack__()
        incomplete = subscriber.try_recv()
        assert incomplete is not None and not incomplete.ready
        incomplete.close()
        send(other, 0)
        assert subscriber.recv(WATCHDOG).tobytes() == bytes(SIZE)
        del array
        assert topic.stats().held == 1, "its stream still writes it"
        gate.open()
        eventually(lambda: topic.stats().held == 0)
        with publisher.loan(SIZE, "uint8", stream=opened.stream) as out:
            address = out.tensor.data_ptr
            driver.fill(address, 2, SIZE, opened.stream)
            array = out.__dlpack__()
        assert subscriber.recv(WATCHDOG).tobytes() == b"\2" * SIZE
        for byte in range(8):
            assert send(publisher, byte) != address
            assert subscriber.recv(WATCHDOG).tobytes() == bytes([byte]) * SIZE
        del array

        def is_used_again():
            found = send(publisher, 0) == address
            subscriber.recv(WATCHDOG).close()
            return found

        eventually(is_used_again)


def test_streams_are_ordered_on_request(frames, publisher):
    with frames.subscriber(order="stream") as subscriber:
        gate, reader = driver.Gate(), driver.Gate()
        reader.open()
        publisher.send(filled(7, gate.stream), stream=gate.stream)
        with pytest.raises(TypeError, match="not a CUDA stream"):
            subscriber.recv(0, stream=object())
        sample = subscriber.recv(0, stream=reader.stream)
        source = sample.tensor.data_ptr
        assert sample.__cuda_array_interface__["stream"] == reader.stream
        # A library that requests the tensor for its own stream reads it on that stream.
        other = driver.Gate()
        other.open()
        array = pw._native.Source(sample.tensor, other.stream)
        copies = {stream: driver.allocate(SIZE) for stream in (reader.stream, other.stream)}
        for stream, copy in copies.items():
            driver.copy(copy, source, SIZE, stream)
        assert not sample.ready and not any(driver.is_done(stream) for stream in copies)
        gate.open()
        sample.wait(WATCHDOG)
        sample.check()
        for stream, copy in copies.items():
            assert driver.read(copy, SIZE, stream) == b"\7" * SIZE
        assert sample.tobytes(reader.stream) == b"\7" * SIZE
        del array


def test_a_sample_comes_back_when_its_stream_is_done(frames, publisher, subscriber):
    publisher.send(np.zeros(SIZE, np.uint8))
    sample, gate = subscriber.recv(WATCHDOG), driver.Gate()
    assert sample.tobytes() == bytes(SIZE)
    driver.copy(driver.allocate(SIZE), sample.tensor.data_ptr, SIZE, gate.stream)
    sample.release_on(gate.stream)
    assert sample.closed and subscriber.stats().held == 1
    gate.open()
    eventually(lambda: subscriber.stats().held == 0)


def test_a_forgotten_sample_comes_back_when_the_gpu_is_done(publisher, subscriber):
    publisher.send(np.zeros(SIZE, np.uint8))
    gate, sample = driver.Gate(), subscriber.recv(WATCHDOG)
    array = pw._native.Source(sample.tensor, 1)
    driver.copy(driver.allocate(SIZE), sample.tensor.data_ptr, SIZE, gate.stream)
    del sample
    assert subscriber.stats().held == 1
    del array
    assert subscriber.stats().held == 1, "a kernel reads it"
    gate.open()
    eventually(lambda: subscriber.stats().held == 0)


def test_a_publisher_that_dies_before_its_stream_is_done_leaves_no_sample(frames, subscriber, child, socket):
    sender = child(SENDER, socket)
    assert sender.says() == "published"
    with pytest.raises(pw.TimeoutError):
        subscriber.recv(0)
    sender.kill()
    with pytest.raises(pw.SampleFailed, match="was never completed") as raised:
        subscriber.recv(WATCHDOG)
    assert isinstance(raised.value, ConnectionError) and raised.value.anchor == "sample-failed"
    sender = child(SENDER, socket)
    assert sender.says() == "published"
    sender.tell()
    assert subscriber.recv(WATCHDOG).tobytes() == b"\7" * SIZE


def test_samples_derived_from_a_failed_sample_are_tainted(domain, frames, subscriber, child, socket):
    sender = child(SENDER, socket)
    assert sender.says() == "published"
    with domain.topic("results", max_bytes=8) as results, results.publisher() as publisher:
        reader = results.subscriber("latest")
        sample = subscriber.try_recv()
        with publisher.loan(8, "uint8") as out:
            out.rests_on(sample)
        result = reader.recv(WATCHDOG)
        sender.kill()
        with pytest.raises(pw.Tainted, match="has failed") as raised:
            result.check()
        assert raised.value.anchor == "sample-tainted"
        reader.close()


def test_copies_between_host_and_device(domain, frames, publisher, subscriber):
    publisher.send(np.full(SIZE, 7, np.uint8))
    assert subscriber.recv(WATCHDOG).tobytes() == b"\7" * SIZE
    topic = domain.topic("host", max_bytes=SIZE, device="host")
    with topic as host, host.publisher() as other, host.subscriber() as reader:
        gate = driver.Gate()
        gate.open()
        other.send(filled(7, gate.stream), stream=gate.stream)
        sample = reader.recv(WATCHDOG)
        assert np.asarray(sample).tolist() == [7] * SIZE
        with pytest.raises(ValueError, match="waited for by hosts"):
            sample.wait_on(gate.stream)
    with pytest.raises(pw.BadSource, match="strides"):
        publisher.send(driver.DeviceBytes(driver.allocate(SIZE), [64, 2], [64, 1]))


def test_each_wrong_place_is_an_error_of_its_own(domain, frames, child):
    with pytest.raises(pw.WrongTopic, match="frames") as raised:
        domain.topic("frames", max_bytes=SIZE, device="host")
    assert raised.value.anchor == "wrong-topic"
    other = child(
        f"sys.path.insert(0, {os.path.dirname(driver.__file__)!r})\nimport driver\ndriver.use(1)\n"
        + """
with pw.connect(socket=sys.argv[1], start=False) as d:
    for use in (
        lambda: d.topic("frames", max_bytes=4096, device="cuda:1"),
        lambda: d.topic("frames", device="cuda:1"),
        lambda: d.topic("other", max_bytes=4096, device="cuda:1").publisher().send(
            driver.DeviceBytes(driver.allocate(4096), [4096], device=0)
        ),
    ):
        try:
            use()
        except pw.Error as error:
            say(type(error).__name__, error.anchor)
""",
        domain.socket,
        SIMCUDA_DEVICES="2",
    )
    assert other.says() == "WrongTopic wrong-topic"
    assert other.says() == "RemoteDevice remote-device"
    assert other.says() == "BadSource bad-source"


def test_a_publisher_changes_between_streams(publisher, subscriber):
    first, second = driver.Gate(), driver.Gate()
    first.open()
    second.open()
    for n in range(6):
        stream = (first, second)[n % 2].stream
        publisher.send(filled(n, stream), stream=stream)
        assert subscriber.recv(WATCHDOG).tobytes() == bytes([n]) * SIZE
