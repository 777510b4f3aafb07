# Holds 250.
"""Arrays of a loan that outlive it keep its block: they write into no later sample or loan."""

import gc

import numpy as np
import pytest

import partywall as pw

from ..conftest import WATCHDOG

SIZE = 64


def topic_of(domain, **numbers):
    numbers = {"depth": 1, "publishers": 1, "subscribers": 1, "held": 1, "loans": 1} | numbers
    return domain.topic("small", max_bytes=SIZE, device="host", **numbers)


@pytest.fixture
def small(domain):
    """A topic with as few blocks as possible."""
    with topic_of(domain) as topic:
        yield topic


def view(loan, how):
    """Returns an array that keeps nothing but what the protocol keeps."""
    if how == "buffer":
        return np.frombuffer(memoryview(loan.tensor), dtype=np.uint8)
    return np.from_dlpack(loan) if how == "dlpack" else np.asarray(loan)


def send(publisher, number):
    with publisher.loan(SIZE, "uint8", timeout=WATCHDOG) as loan:
        np.asarray(loan)[:] = number


def number_of(subscriber):
    with subscriber.recv(WATCHDOG) as sample:
        data = sample.tobytes()
    assert data == data[:1] * SIZE, data
    return data[0]


def later_samples_are_whole(publisher, subscriber, stale):
    for number in range(16):
        with publisher.loan(SIZE, "uint8", timeout=WATCHDOG) as loan:
            np.asarray(loan)[:] = number
            stale[:] = 99
        stale[:] = 99
        assert number_of(subscriber) == number


@pytest.mark.parametrize("how", ["buffer", "dlpack", "array"])
def test_array_of_a_published_loan_writes_into_no_later_sample(small, how):
    with small.publisher() as publisher, small.subscriber() as subscriber:
        with publisher.loan(SIZE, "uint8") as loan:
            stale = view(loan, how)
            stale[:] = 1
        assert number_of(subscriber) == 1
        later_samples_are_whole(publisher, subscriber, stale)


def test_array_of_a_sample_that_was_not_delivered_writes_into_no_later_sample(small):
    with small.publisher() as publisher, small.subscriber() as subscriber:
        send(publisher, 1)
        with pytest.raises(pw.TopicFull), publisher.loan(SIZE, "uint8", timeout=0.01) as loan:
            stale = np.asarray(loan)
        assert number_of(subscriber) == 1
        later_samples_are_whole(publisher, subscriber, stale)


@pytest.mark.parametrize("end", ["close", "raise"])
def test_array_of_a_discarded_loan_writes_into_no_later_sample(small, end):
    with small.publisher() as publisher, small.subscriber() as subscriber:
        if end == "close":
            loan = publisher.loan(SIZE, "uint8")
            stale = np.asarray(loan)
            loan.close()
        else:
            with pytest.raises(ZeroDivisionError), publisher.loan(SIZE, "uint8") as loan:
                stale = np.asarray(loan)
                raise ZeroDivisionError
        later_samples_are_whole(publisher, subscriber, stale)


def test_array_that_outlives_its_publisher_writes_into_no_later_sample(domain):
    with topic_of(domain, publishers=2) as topic:
        with topic.subscriber(until="idle") as subscriber:
            with topic.publisher() as publisher, publisher.loan(SIZE, "uint8") as loan:
                stale = np.asarray(loan)
                stale[:] = 1
            assert number_of(subscriber) == 1
            # The array does not keep the publisher.
            with pytest.raises(pw.TopicIdle):
                subscriber.recv(WATCHDOG)
        with topic.publisher() as publisher, topic.subscriber() as subscriber:
            later_samples_are_whole(publisher, subscriber, stale)


def test_array_of_a_published_loan_outlives_its_topic(domain):
    with topic_of(domain) as topic, topic.publisher() as publisher, publisher.loan(SIZE, "uint8") as loan:
        stale = np.asarray(loan)
    stale[:] = 7
    assert stale.tolist() == [7] * SIZE
    with pytest.raises(pw.Closed):
        loan.tensor  # noqa: B018


def test_block_is_free_when_the_arrays_are_gone(small):
    with small.publisher() as publisher, small.subscriber() as subscriber:
        for number in range(16):
            # The array of the last turn lives until it is replaced here.
            with publisher.loan(SIZE, "uint8", timeout=WATCHDOG) as loan:
                array = np.asarray(loan)
                array[:] = number
            assert number_of(subscriber) == number
        del array, loan
        gc.collect()
        send(publisher, 1)
        assert number_of(subscriber) == 1
        assert small.stats().held <= 1, "the reserve alone"


def test_publisher_with_arrays_of_too_many_loans_says_so(domain):
    with topic_of(domain, depth=2, loans=2) as topic, topic.publisher() as publisher:
        arrays = []
        with pytest.raises(pw.TooManyLoans, match="arrays of former loans") as raised:
            for _ in range(10):
                with publisher.loan(SIZE, "uint8", timeout=WATCHDOG) as loan:
                    arrays.append(np.asarray(loan))
        assert len(arrays) == topic.depth + topic.loans
        assert "drop arrays" in str(raised.value)
        arrays.pop()
        send(publisher, 1)
