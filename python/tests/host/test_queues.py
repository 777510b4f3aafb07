"""Tasks that processes submit and others claim."""

import asyncio
import gc
import os
import signal
import subprocess
import threading

import numpy as np
import pytest

import partywall as pw
from partywall._program import PROGRAM

from ..conftest import fork

WORKER = """
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    if sys.argv[2:] == ["hang"]:
        task = queue.claim()
        np.asarray(task.output)[:2] = 1
        say("claimed", task.attempt)
        told()
    for task in queue.claims():
        if task.kind == "last":
            break
        numbers = np.asarray(task.inputs[0].tensor(dtype="float32"))
        np.sqrt(numbers, out=np.asarray(task.output.tensor(dtype="float32")))
        del numbers  # otherwise it keeps the input
    task.complete()
    say("completed")
"""

NUMBERS = np.array([1, 4, 9, 16], dtype=np.float32)
ROOTS = [1, 2, 3, 4]


@pytest.fixture
def queue(domain):
    with domain.queue("work", tasks=3, inputs=(4, 16), outputs=(2, 16), device="host") as opened:
        yield opened


def submit(queue, **options):
    return queue.submit("sqrt", [NUMBERS], output=16, **options)


def roots(result):
    with result:
        return np.asarray(result.tensor(dtype="float32")).tolist()


def assert_idle(queue, **counts):
    stats = queue.stats()
    assert (stats.pending, stats.claimed, stats.done, stats.dead) == tuple(
        counts.get(name, 0) for name in ("pending", "claimed", "done", "dead")
    )
    assert (stats.free_inputs, stats.free_outputs) == (4, 2)


def test_result_of_another_process_is_taken_once(queue, child, socket):
    block = queue.inputs.alloc(0)
    block.tensor((4,), "float32").write(NUMBERS)
    ticket = queue.submit("sqrt", [block], output=16)
    assert not block.held, "it is the task's"
    queue.submit("last")
    assert (ticket.status, ticket.done()) == ("pending", False)
    assert child(WORKER, socket).says() == "completed"
    result = queue.ticket(ticket.task).result()
    assert (result.nbytes, result.attempt) == (16, 1)
    assert roots(result) == ROOTS
    with pytest.raises(pw.TaskGone):
        ticket.result()
    assert_idle(queue, done=1)


def test_task_of_killed_worker_goes_to_another(queue, child, socket):
    ticket = submit(queue)
    hanging = child(WORKER, socket, "hang")
    assert hanging.says() == "claimed 1"
    hanging.kill()
    worker = child(WORKER, socket)
    result = ticket.result(60)
    assert (result.attempt, roots(result)) == (2, ROOTS)
    queue.submit("last")
    assert worker.says() == "completed"
    assert queue.stats().completed == 2


def test_inputs_and_output_are_taken_by_dlpack_in_place(queue):
    ticket = submit(queue)
    with queue.claim(0) as task:
        (numbers,) = task.inputs
        assert (numbers.nbytes, task.output.nbytes) == (16, 16)
        view = np.from_dlpack(numbers.tensor((2, 2), "float32"))
        assert view.tolist() == [[1, 4], [9, 16]]
        assert np.from_dlpack(numbers).tolist() == [1, 4, 9, 16]
        with pytest.raises((ValueError, pw.Error)):
            np.asarray(numbers)[0] = 7
        with pytest.raises(pw.Error):
            numbers.tensor().write(np.zeros(16, dtype=np.uint8))
        with pytest.raises(pw.BlockTooSmall, match="16"):
            numbers.tensor((5,), "float32")
        output = np.asarray(task.output.tensor(dtype="float32"))
        np.sqrt(view.reshape(4), out=output)
        kept = task.output.tensor()
    with pytest.raises(pw.Error):
        kept.write(np.zeros(16, dtype=np.uint8))
    with pytest.raises(pw.ClaimLost):
        task.output.tensor()
    assert roots(ticket.result()) == ROOTS


def test_end_of_the_body_completes_the_task(queue):
    tickets = queue.submit_all([pw.Task("a", output=4), pw.Task("b", args=b"x"), pw.Task("c")])
    kinds = [(task.kind, task.args) for task in queue.claims(timeout=0)]
    assert kinds == [("a", b""), ("b", b"x"), ("c", b"")]
    assert [ticket.status for ticket in tickets] == ["done"] * 3
    first, *others = [ticket.result() for ticket in tickets]
    assert first.nbytes == 4
    first.release()
    with pytest.raises(TypeError, match="without room for an output"):
        others[0].tensor()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
def test_exception_in_the_body_of_a_loop_fails_the_task(queue, error):
    ticket = submit(queue, max_attempts=1)
    tasks = queue.claims(0)
    del tasks
    with pytest.raises(error):
        for task in queue.claims(0):
            assert task.claimed
            raise error("bad luck")
    assert ticket.status == "dead"
    with pytest.raises(pw.TaskFailed, match=f"{error.__name__}: bad luck"):
        ticket.result()
    (dead,) = queue.tasks("dead")
    assert (dead.text, dead.attempts, dead.failures[0][0]) == (f"{error.__name__}: bad luck", 1, 1)


def test_exception_that_the_worker_handles_fails_the_task_only(queue):
    tickets = [submit(queue, max_attempts=1), submit(queue)]
    done = []
    while len(done) < 1:
        try:
            for task in queue.claims(0):
                if task.task == tickets[0].task:
                    raise ValueError("no")
                done.append(task.task)
        except ValueError:
            continue
    assert (tickets[0].status, tickets[1].status, done) == ("dead", "done", [tickets[1].task])


def test_task_is_the_callers_after_break(queue):
    ticket = submit(queue)
    for task in queue.claims(0):
        break
    assert (task.claimed, ticket.status) == (True, "claimed")
    task.complete()
    assert ticket.status == "done"
    taken = next(queue.claims(0), None)
    assert taken is None
    ticket.result().release()
    assert_idle(queue)


def test_exception_in_the_body_of_with_fails_the_task(queue):
    ticket = submit(queue, max_attempts=1)
    with pytest.raises(ZeroDivisionError), queue.claim(0):
        1 / 0  # noqa: B018
    with pytest.raises(pw.TaskFailed, match="ZeroDivisionError: division by zero"):
        ticket.result()
    queue.retry(ticket.task)
    with queue.claim(0) as task:
        np.asarray(task.output)[:] = 1
    with pytest.raises(pw.ClaimLost):
        task.complete()
    with pytest.raises(pw.ClaimLost):
        task.extend(1)
    ticket.result().release()


def test_dropped_task_goes_to_another_worker(queue):
    ticket = submit(queue)
    with pytest.warns(ResourceWarning):
        del [queue.claim(0)][0]
    with queue.claim(10) as task:
        assert (task.attempt, task.max_attempts) == (2, 3)
    ticket.result().release()


def test_dropped_result_gives_its_block_back(queue):
    tickets = [submit(queue), submit(queue)]
    for task in queue.claims(0):
        np.asarray(task.output.tensor(dtype="float32"))[:] = ROOTS
    with pytest.warns(ResourceWarning, match="TaskResult: 16 bytes"):
        del [tickets[0].result(0)][0]
    result = tickets[1].result(0)
    assert result.output.held
    kept = np.asarray(result.tensor(dtype="float32"))
    result.release()
    result.release()
    assert kept.tolist() == ROOTS
    with pytest.raises(pw.NotHeld):
        result.tobytes()


def test_released_result_has_no_output(queue):
    ticket = submit(queue)
    queue.claim(0).complete()
    result = ticket.result(0)
    with result:
        assert len(result.tobytes()) == 16
    for use in (result.tobytes, result.tensor, lambda: result.output):
        with pytest.raises(pw.Closed):
            use()
    assert_idle(queue)


def test_worker_whose_lease_has_ended_completes_nothing(domain):
    with domain.queue("leased", tasks=1, outputs=(2, 4), lease=0.05, device="host") as queue:
        ticket = queue.submit("slow", output=4)
        slow = queue.claim(0)
        again = queue.claim(10)
        assert (slow.claimed, again.attempt) == (False, 2)
        np.asarray(slow.output)[:] = 7
        with pytest.raises(pw.ClaimLost):
            slow.complete()
        np.asarray(again.output)[:] = 8
        again.complete()
        with ticket.result() as result:
            assert bytes(result.tobytes()) == bytes([8] * 4)


def test_several_tasks_are_claimed_and_submitted_at_once(queue):
    tickets = queue.submit_all([pw.Task("a"), pw.Task("b"), pw.Task("c")])
    with pytest.raises(pw.QueueFull) as full:
        queue.submit_all([pw.Task("d")], timeout=0)
    assert full.value.submitted == []
    tasks = queue.claim_all(2, 0)
    assert [task.kind for task in tasks] == ["a", "b"]
    for task in tasks:
        task.complete()
        tickets[len(task.kind) - 1].done()
    with pytest.raises(ValueError, match="at least 1"):
        queue.claim_all(0)
    tickets[0].result()
    with pytest.raises(pw.QueueFull) as full:
        queue.submit_all([pw.Task("d"), pw.Task("e")], timeout=0)
    assert [ticket.status for ticket in full.value.submitted] == ["pending"]


def test_unread_results_are_named_by_both_sides(domain):
    with domain.queue("narrow", tasks=3, outputs=(1, 4), device="host") as queue:
        tickets = [queue.submit("fill", output=4, timeout=0)]
        queue.claim(0).complete()
        tickets += [queue.submit("fill", output=4, timeout=0) for _ in range(2)]
        with pytest.raises(pw.QueueFull, match="1 slot holds a result that was not taken; no output block is free"):
            queue.submit("fill", output=4, timeout=0)
        with pytest.raises(pw.OutputsFull, match="1 of 1 hold"):
            queue.claim(0)
        with pytest.raises(pw.TimeoutError, match="pending, because no output block is free"):
            tickets[1].result(timeout=0)
        tickets[0].result().release()
        queue.claim(0).complete()
        tickets[1].result().release()


def test_pending_task_is_cancelled_and_full_queue_refuses(queue):
    tickets = [submit(queue), submit(queue), queue.submit("third")]
    block = queue.inputs.alloc(0)
    with pytest.raises(pw.QueueFull):
        queue.submit("sqrt", [block], timeout=0)
    assert block.held
    block.release()
    with pytest.raises(pw.QueueFull):
        queue.submit("sqrt", [NUMBERS], timeout=0)
    assert queue.stats().free_inputs == 2, "what was taken for the array is back"
    task = queue.claim(0)
    with pytest.raises(pw.TaskRunning):
        tickets[0].cancel()
    task.complete()
    tickets[1].cancel()
    with pytest.raises(pw.TaskGone):
        tickets[1].result()
    tickets[0].result().release()


def test_bad_tasks_are_refused_with_a_reason(queue, domain):
    with domain.pool("other", blocks=1, block_bytes=16, device="host") as pool, pool.alloc(0) as foreign:
        with pytest.raises(pw.WrongQueue, match="take inputs from inputs"):
            queue.submit("sqrt", [foreign])
        assert foreign.held
    for options, error, reason in [
        ({"kind": "k" * 33}, pw.BadTask, "at most 32 bytes"),
        ({"args": b"x" * 513}, pw.BadTask, "at most 512 bytes"),
        ({"inputs": [NUMBERS] * 9}, pw.BadTask, "at most 8 inputs, not 9"),
        ({"inputs": [NUMBERS] * 5}, pw.BadTask, r"input blocks \(4\), not 5"),
        ({"inputs": NUMBERS}, TypeError, r"are a list, not ndarray: for one input write \[input\]"),
        ({"inputs": b"text"}, TypeError, "are a list, not bytes"),
        ({"inputs": 5}, TypeError, "are a list, not int"),
        ({"max_attempts": 0}, ValueError, "1 to 255 times"),
        ({"max_attempts": 256}, ValueError, "1 to 255 times"),
        ({"on_death": "forget"}, ValueError, "'keep' or 'cancel'"),
        ({"output": 17}, pw.BlockTooSmall, "17"),
        ({"output": -1}, ValueError, "-1"),
        ({"inputs": [np.zeros(17, dtype=np.uint8)]}, ValueError, "17"),
        ({"inputs": ["text"]}, TypeError, "str"),
    ]:
        with pytest.raises(error, match=reason):
            queue.submit(**{"kind": "sqrt", "timeout": 0, **options})
        with pytest.raises(error, match=reason) as refused:
            queue.submit_all([pw.Task("first"), pw.Task(**{"kind": "sqrt", **options})], timeout=0)
        for ticket in refused.value.submitted:
            ticket.cancel()
    with queue.inputs.alloc(0) as one, queue.inputs.alloc(0) as other:
        for timeout in (0, None):
            with pytest.raises(pw.BadTask, match=r"blocks and arrays as .* \(4\), not 5"):
                queue.submit("sqrt", [one, other, NUMBERS, NUMBERS, NUMBERS], timeout=timeout)
        assert one.held and other.held
    with pytest.raises(TypeError, match=r"objects of partywall\.Task, not str"):
        queue.submit_all([pw.Task("sqrt", [NUMBERS]), "sqrt"])
    assert queue.stats().free_inputs == 4, "what was taken for the array is back"

    def interrupted():
        yield pw.Task("sqrt", [NUMBERS])
        raise KeyError

    with pytest.raises(KeyError):
        queue.submit_all(interrupted())
    assert queue.stats().free_inputs == 4
    with pytest.raises(TypeError, match=r"a partywall\.Segment or a name, not int"):
        queue.attach(5)
    with pytest.raises(ValueError, match="timeout"):
        queue.submit_all([pw.Task("sqrt")], timeout=-1)
    assert_idle(queue)
    for options in [{"tasks": 0}, {"lease": 0.0001}, {"inputs": (1, 0)}]:
        with pytest.raises(pw.WrongQueue, match="give numbers within that range"):
            domain.queue("bad", **{"tasks": 1, "device": "host", **options})
    with pytest.raises(pw.WrongQueue):
        domain.queue("work", tasks=9)
    with pytest.raises(ValueError, match="pending"):
        queue.tasks("lost")


@pytest.mark.parametrize("number", [-1, 1 << 32, 1 << 70])
def test_numbers_that_no_queue_has_are_named_as_those_of_a_queue(domain, number):
    tasks = f"a queue has room for 1 to 131072 tasks, not {number}"
    blocks = f"a queue has 1 to 65,536 blocks of inputs or outputs, not {number}"
    for options, why in (({"tasks": number}, tasks), ({"inputs": (number, 8)}, blocks), ({"outputs": (number, 8)}, blocks)):
        with pytest.raises(ValueError, match=why):
            domain.queue("x", device="host", **options)
    with pytest.raises(TypeError):
        domain.queue("x", device="host", tasks="8")


def test_queue_with_fewer_tasks_than_are_asked_for_gives_all(queue):
    queue.submit_all([pw.Task("a"), pw.Task("b")])
    for most in (3, 1 << 70):
        assert [task.kind for task in queue.tasks(most=most)] == ["a", "b"]
    assert queue.tasks(most=0) == []
    for most in (-1, -(1 << 70)):
        with pytest.raises(ValueError, match=f"number of tasks to list must be at least 0, not {most}"):
            queue.tasks(most=most)
        with pytest.raises(ValueError, match=f"number of tasks to claim must be at least 1, not {most}"):
            queue.claim_all(most)
    for task in queue.claim_all(1 << 70, 0):
        task.complete()


def test_task_that_ends_with_its_submitter_goes_with_it(queue, child, socket):
    other = child(
        """
with pw.connect(socket=sys.argv[1], start=False) as d, d.queue("work") as queue:
    tickets = [queue.submit("a", on_death="keep"), queue.submit("b", on_death="cancel")]
    say(tickets[0].task, tickets[1].task)
    told()
""",
        socket,
    )
    kept, cancelled = (queue.ticket(task) for task in other.says().split())
    other.kill()
    with pytest.raises(pw.TaskGone):
        cancelled.result(60)
    assert kept.status == "pending"


def test_tickets_are_awaited(queue):
    async def main():
        loop = asyncio.get_running_loop()
        tickets = [submit(queue), submit(queue, max_attempts=1)]

        def work():
            for number, task in enumerate(queue.claims(1)):
                if number == 1:
                    task.fail("no luck")
                    break
                np.asarray(task.output.tensor(dtype="float32"))[:] = ROOTS

        worker = loop.run_in_executor(None, work)
        assert roots(await tickets[0]) == ROOTS
        with pytest.raises(pw.TaskFailed, match="no luck"):
            await tickets[1]
        await worker
        late = submit(queue)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(late, 0.05)
        assert late.status == "pending", "a wait that was given up has taken nothing"
        late.cancel()

    asyncio.run(main())


def test_awaited_tickets_of_a_queue_share_a_descriptor(domain):
    def descriptors():
        # Of this kind alone, and without the garbage of earlier tests: others in this process close theirs at any time.
        gc.collect()
        return sum("eventfd" in os.readlink(entry) for entry in os.scandir("/proc/self/fd") if os.path.lexists(entry))

    async def main(queue):
        tickets = queue.submit_all(pw.Task("echo", args=bytes([number])) for number in range(200))
        before = descriptors()
        waiting = [asyncio.ensure_future(taken(ticket)) for ticket in tickets]
        while len(asyncio.all_tasks()) < 201 or any(task.get_coro().cr_await is None for task in waiting):
            await asyncio.sleep(0)
        assert descriptors() == before + 1
        waiting[0].cancel()
        for task in queue.claims(0):
            pass
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(results.pop(0), asyncio.CancelledError)
        assert [result.attempt for result in results] == [1] * 199
        assert descriptors() == before
        assert tickets[0].status == "done"

    async def taken(ticket):
        return await ticket

    with domain.queue("many", tasks=200, device="host") as queue:
        asyncio.run(main(queue))


def test_await_ends_with_the_broker(queue, socket):
    async def main():
        ticket = queue.submit("never")
        with pytest.raises(pw.BrokerGone):
            await asyncio.gather(asyncio.wait_for(ticket, 60), asyncio.to_thread(stop))

    def stop():
        subprocess.run([PROGRAM, "--socket", socket, "stop", "--force"], check=True, capture_output=True)

    asyncio.run(main())


def test_exception_of_a_task_is_none_or_why_it_failed(queue):
    done, dead = tickets = [submit(queue), submit(queue, max_attempts=1)]
    with pytest.raises(pw.TimeoutError):
        done.exception(0)
    queue.claim(0).complete()
    queue.claim(0).fail("no luck")
    for _ in range(2):
        assert done.exception() is None
        assert isinstance(dead.exception(), pw.TaskFailed)
    assert "no luck" in str(dead.exception())
    assert [ticket.status for ticket in tickets] == ["done", "dead"], "both stay"
    done.result(0).release()
    assert done.exception(0) is None, "it has succeeded"
    with pytest.raises(pw.TaskGone):
        queue.ticket(done.task).exception(0)
    cancelled = queue.submit("never")
    cancelled.cancel()
    with pytest.raises(pw.TaskGone):
        cancelled.exception(0)


def test_exception_waits_for_the_task(queue):
    ticket = queue.submit("late", max_attempts=1)
    worker = threading.Timer(0.1, lambda: queue.claim(0).fail("at last"))
    worker.start()
    assert "at last" in str(ticket.exception(60))
    worker.join()


def test_awaiting_submitter_acts_on_the_end_of_a_lease(domain):
    async def main(queue):
        ticket = queue.submit("slow", max_attempts=1)
        slow = queue.claim(0)
        with pytest.raises(pw.TaskFailed):
            await asyncio.wait_for(ticket, 10)
        assert not slow.claimed
        slow.close()

    with domain.queue("leased", tasks=1, lease=0.05, device="host") as queue:
        asyncio.run(main(queue))


def test_ctrl_c_ends_waits_and_loses_nothing(queue):
    def interrupt():
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        return timer

    ticket = queue.submit("a")
    for wait in (ticket.result, lambda: queue.submit_all([pw.Task("b")] * 4)):
        timer = interrupt()
        with pytest.raises(KeyboardInterrupt):
            wait()
        timer.join()
    for task in queue.claims(0):
        assert task.attempt == 1
    timer = interrupt()
    with pytest.raises(KeyboardInterrupt):
        queue.claim()
    timer.join()
    assert (ticket.status, queue.stats().claimed) == ("done", 0)


def test_ctrl_c_leaves_the_tickets_of_submitted_tasks(queue):
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt) as interrupted:
        queue.submit_all([pw.Task("a")] * 5)
    timer.join()
    assert [ticket.status for ticket in interrupted.value.submitted] == ["pending"] * 3


def test_tasks_with_more_arrays_than_blocks_are_submitted_in_batches(domain):
    with domain.queue("work", tasks=20, inputs=(3, 16), outputs=(1, 16), device="host") as queue:
        work = threading.Thread(target=lambda: [queue.claim(60).complete() for _ in range(10)])
        work.start()
        numbers = [np.full(4, number, dtype=np.float32) for number in range(10)]
        tickets = queue.submit_all([pw.Task("any", [number, number]) for number in numbers], timeout=60)
        work.join()
        assert [ticket.status for ticket in tickets] == ["done"] * 10
        # Without a worker: the first three tasks have all blocks.
        with pytest.raises(pw.TimeoutError) as ended:
            queue.submit_all([pw.Task("any", [number]) for number in numbers], timeout=0.1)
        assert [ticket.status for ticket in ended.value.submitted] == ["pending"] * 3
        assert queue.stats().free_inputs == 0
        for ticket in ended.value.submitted:
            ticket.cancel()
        assert queue.stats().free_inputs == 3


def test_end_of_a_task_is_not_blamed_on_its_lease(queue):
    submit(queue)
    task = queue.claim(0)
    for call in (task.complete_on, task.wait_inputs_on):
        with pytest.raises(ValueError, match="host memory: name a stream, or call"):
            call()
    task.complete()
    for call in (task.complete, lambda: task.fail("late"), lambda: task.extend(1)):
        with pytest.raises(pw.ClaimLost, match="this process completed, failed or closed it"):
            call()


def test_attempt_before_a_retry_completes_nothing(domain):
    with domain.queue("work", tasks=3, lease=0.05, device="host") as queue:
        ticket = queue.submit("any", max_attempts=1)

        def hang():
            task = queue.claim()
            assert isinstance(ticket.exception(timeout=60), pw.TaskFailed)
            queue.retry(ticket.task)
            return task

        hang().close()
        stale = hang()
        live = queue.claim()
        live.extend(60)
        with pytest.raises(pw.ClaimLost):
            stale.complete()
        live.complete()
        assert ticket.result(0).attempt == 3


def test_cancelled_await_takes_no_result(queue):
    ticket = submit(queue)

    async def main():
        async def result():
            return await ticket

        waiting = asyncio.ensure_future(result())
        await asyncio.sleep(0)
        waiting.cancel()
        with queue.claim(0) as task:
            np.asarray(task.output.tensor(dtype="float32"))[:] = ROOTS
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(main())
    assert ticket.status == "done"
    assert roots(ticket.result(0)) == ROOTS


def test_loop_raises_if_the_lease_has_ended_in_its_body(domain):
    with domain.queue("leased", tasks=1, lease=0.05, device="host") as queue:
        ticket = queue.submit("slow")
        with pytest.raises(pw.ClaimLost):
            for _ in queue.claims(0):
                again = queue.claim(10)
        assert again.attempt == 2
        again.complete()
        assert ticket.result(0).attempt == 2


@pytest.mark.parametrize("in_a_loop", [True, False])
def test_any_text_of_an_exception_is_a_reason(queue, in_a_loop):
    ticket = submit(queue, max_attempts=1)
    error = OSError("no file \udcff" + "ä" * 200)
    with pytest.raises(OSError) as raised:
        if in_a_loop:
            for _ in queue.claims(0):
                raise error
        else:
            with queue.claim(0):
                raise error
    assert raised.value is error
    with pytest.raises(pw.TaskFailed, match="OSError: no file "):
        ticket.result(0)


def test_task_in_another_state_is_neither_retried_nor_purged(queue):
    ticket = submit(queue)
    with pytest.raises(pw.WrongTaskState):
        queue.retry(ticket.task)
    with pytest.raises(pw.WrongTaskState):
        queue.purge(ticket.task)
    queue.claim(0).complete()
    with pytest.raises(pw.WrongTaskState):
        queue.retry(ticket.task)
    queue.purge(ticket.task)
    with pytest.raises(pw.TaskGone):
        queue.purge(ticket.task)
    assert_idle(queue)


def test_exception_of_a_forked_child_fails_no_task_of_its_parent(queue):
    ticket = submit(queue, max_attempts=1)
    parent = os.getpid()
    codes = []
    try:
        for task in queue.claims(0):
            pid = fork()
            if pid == 0:
                raise ZeroDivisionError
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            assert task.claimed
            np.asarray(task.output.tensor(dtype="float32"))[:] = ROOTS
    except BaseException as error:
        if os.getpid() == parent:
            raise
        os._exit(7 if isinstance(error, ZeroDivisionError) else 1)
    assert codes == [7]
    assert roots(ticket.result(0)) == ROOTS


def test_threads_do_not_share_an_iteration(queue):
    tasks = queue.claims()
    claimed = []
    thread = threading.Thread(target=lambda: claimed.append(next(tasks)))
    ticket = submit(queue)
    thread.start()
    thread.join()
    with pytest.raises(RuntimeError, match=r"another thread .* call claims\(\) in each thread"):
        next(tasks)
    assert ticket.status == "claimed", "the thread still has it"
    claimed[0].complete()
    second = submit(queue)
    with next(tasks) as task:
        assert task.task == second.task, "no variable has a task of the iteration any more"


def test_threads_do_not_wait_in_one_iteration(queue):
    tasks = queue.claims()
    outcomes = []

    def ask():
        try:
            with next(tasks) as task:
                outcomes.append(task.kind)
        except RuntimeError as error:
            outcomes.append(str(error))
            queue.submit("first")

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    refused, kind = outcomes
    assert "call claims() in each thread" in refused
    assert kind == "first"


def test_claim_is_the_parents_in_a_forked_child(queue):
    ticket = submit(queue)
    task = queue.claim(0)
    pid = fork()
    if pid == 0:
        refused = 0
        of_task = (task.complete, lambda: task.fail("no"), lambda: task.extend(1))
        for use in (*of_task, lambda: queue.claim(0), ticket.cancel):
            try:
                use()
            except pw.Error:
                refused += 1
            except BaseException:
                break
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 5
    assert task.claimed
    task.complete()
    ticket.result().release()


def test_waits_end_when_the_handle_is_closed(domain):
    queue = domain.queue("closing", tasks=1, device="host")
    threading.Timer(0.1, queue.close).start()
    with pytest.raises(pw.Error):
        queue.claim()
    assert repr(queue) == "<partywall.Queue closing: closed>"
