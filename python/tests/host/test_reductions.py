"""The reductions of `torch.multiprocessing` through Partywall, with tensors of the CPU in place of those of a GPU."""

import gc
import inspect
import os
import pickle
import subprocess
import sys
import threading
import time
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace

import pytest

import partywall as pw

from ..conftest import NO_PTRACE, WATCHDOG
from .test_errors import assert_quoted

torch = pytest.importorskip("torch")
pytest.importorskip("partywall.torch")
import torch.multiprocessing  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402

from partywall import _native  # noqa: E402
from partywall.torch import (  # noqa: E402
    Expired,
    ReductionsPatched,
    UnsupportedTensor,
    _payloads,
    _reductions,
    install_reductions,
    uninstall_reductions,
)

ON_HOST = """
from multiprocessing.reduction import ForkingPickler
import torch, torch.multiprocessing
import partywall.torch
from partywall._build import fill
from partywall.torch import _payloads, _reductions
def publish(domain, name, flat):
    # What `publish` does on a GPU, but with a copy: nothing shares memory of another library in main memory.
    build = domain._native.create(
        name, "host", None, [("data", "uint8", [flat.numel()], None, None)], [], mutable=True, reserve=None,
        kept=False, shared=False, if_absent=True, chunk_bytes=None, owner=None, until_unused=True,
    )
    return fill(domain, build, {"data": flat}, None)._native
"""
"""Lets processes send tensors of the CPU as those of a GPU."""

CHILD = ON_HOST + """
_payloads.publish, _reductions._DEVICE = publish, "cpu"
def load():
    return ForkingPickler.loads(bytes.fromhex(told()))
def dump(tensor):
    return bytes(ForkingPickler.dumps(tensor)).hex()
"""


@pytest.fixture(autouse=True)
def on_host(monkeypatch):
    """Carries tensors of the CPU, and restores torch's functions."""
    names = {}
    exec(ON_HOST, names)
    monkeypatch.setattr(_payloads, "publish", names["publish"])
    monkeypatch.setattr(_reductions, "_DEVICE", "cpu")
    monkeypatch.setattr(_payloads, "payloads", _payloads.Payloads())
    yield
    uninstall_reductions()


def eventually(what, is_so):
    """Waits until something is so. How long that takes is not tested."""
    end = time.monotonic() + WATCHDOG
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def dump(tensor):
    return bytes(ForkingPickler.dumps(tensor))


def names(domain):
    return [row.name for row in domain.ls()]


def reader(child):
    """Starts a process that loads payloads, keeps the last, and says its sum."""
    started = child(
        CHILD
        + """
say("ready")
while line := told():
    tensor = ForkingPickler.loads(bytes.fromhex(line))
    say(tensor.sum().item())
"""
    )
    assert started.says() == "ready"
    return started


def reads(started, payload):
    started.tell(payload.hex())
    return started.says()


# Holds 279.
def test_payload_is_received_in_place_by_any_process_and_several_times(domain, child):
    install_reductions(domain=domain)
    tensor = torch.arange(12.0).reshape(3, 4).t()
    payload = dump(tensor)
    first, second = reader(child), reader(child)
    assert [reads(started, payload) for started in (first, first, second)] == ["66.0"] * 3
    writer = child(CHILD + "tensor = load(); assert tensor.stride() == (1, 4); tensor[0, 0] = 100; say('written')")
    writer.tell(payload.hex())
    assert writer.says() == "written" and writer.end() == 0
    assert reads(second, payload) == "166.0"


# Holds 279.
def test_payload_is_the_tensor_itself_in_its_own_process(domain):
    install_reductions(domain=domain)
    tensor = torch.ones(8)
    received = ForkingPickler.loads(dump(tensor[2:]))
    assert received.data_ptr() == tensor.data_ptr() + 8 and received.shape == (6,)
    received.zero_()
    assert tensor.sum() == 2
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(tensor)
    assert queue.get().data_ptr() == tensor.data_ptr()


PEER_WITHOUT_PTRACE = (
    NO_PTRACE
    + "give_up_ptrace()"
    + CHILD
    + """
domain = pw.connect(socket=sys.argv[1])
partywall.torch.install_reductions(domain=domain)
if len(sys.argv) == 2:
    tensor = torch.arange(12.0)
else:
    say(may_take_descriptors(int(sys.argv[2])))
    tensor = load()
    tensor += 1
say(dump(tensor), tensor.sum().item())
told()
say(tensor.sum().item())
"""
)


# Holds 284.
def test_sent_and_received_tensors_need_no_ptrace_rights(domain, child):
    peers = [child(PEER_WITHOUT_PTRACE, domain.socket)]
    payload, total = peers[0].says().split()
    assert total == "66.0"
    for expected in "78.0", "90.0":
        peers.append(child(PEER_WITHOUT_PTRACE, domain.socket, str(peers[-1].process.pid)))
        assert peers[-1].says() == "False"
        peers[-1].tell(payload)
        payload, total = peers[-1].says().split()
        assert total == expected
    # Both receivers have the same memory. The sender's is a copy on the host.
    peers[1].tell()
    assert peers[1].says() == "90.0"


def test_pending_conjugation_is_refused(domain):
    install_reductions(domain=domain)
    number = torch.tensor([1 + 2j])
    for pending in (number.conj(), number.conj().imag):
        with pytest.raises(UnsupportedTensor, match="conjugation or negation is pending") as refused:
            dump(pending)
        assert_quoted(refused.value)
        received = ForkingPickler.loads(dump(pending.resolve_conj().resolve_neg()))
        assert torch.equal(received, pending)


# Holds 33.
def test_unread_payload_expires(domain):
    install_reductions(domain=domain, expires=0.2)
    payload = dump(torch.ones(8))
    assert len(names(domain)) == 1
    eventually("it expires", lambda: names(domain) == [])
    with pytest.raises(Expired, match=r"torch/.* has expired: its time of 0.2 s") as raised:
        ForkingPickler.loads(payload)
    assert isinstance(raised.value, LookupError) and raised.value.anchor == "expired-payload"
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


# Holds 33.
def test_payload_of_a_living_tensor_does_not_expire(domain):
    install_reductions(domain=domain, expires=0)
    tensor = torch.ones(8)
    view = tensor[4:]
    payload = dump(tensor)
    dump(view)
    # The reaper has seen that the time has passed.
    assert _native.flush(WATCHDOG)
    assert ForkingPickler.loads(payload).sum() == 8
    domain.open(names(domain)[0]).close()
    del tensor
    assert _native.flush(WATCHDOG) and len(names(domain)) == 1, "the view was sent, too"
    del view
    eventually("no tensor is left", lambda: names(domain) == [])


def test_each_send_gives_a_payload_its_time_again(domain):
    install_reductions(domain=domain, expires=0)
    tensor = torch.ones(8)
    dump(tensor)
    assert _native.flush(WATCHDOG)
    install_reductions(domain=domain, expires=WATCHDOG)
    payload = dump(tensor)
    del tensor
    assert _native.flush(WATCHDOG) and len(names(domain)) == 1
    assert ForkingPickler.loads(payload).sum() == 8


# Holds 33.
def test_memory_stays_until_a_receiver_is_killed(domain, child):
    install_reductions(domain=domain, expires=0)
    tensor = torch.ones(8)
    started = reader(child)
    payload = dump(tensor)
    assert reads(started, payload) == "8.0"
    del tensor
    assert _native.flush(WATCHDOG) and len(names(domain)) == 1
    domain.open(names(domain)[0]).close()
    started.kill()
    eventually("no receiver is left", lambda: names(domain) == [])


# Holds 33.
def test_receiver_killed_before_it_reads_leaves_nothing(domain, child):
    install_reductions(domain=domain, expires=0.2)
    started = child(CHILD + "load(); say('never')")
    dump(torch.ones(8))
    started.kill()
    eventually("it expires", lambda: names(domain) == [])


# Holds 279.
def test_received_tensor_is_sent_on(domain, child):
    install_reductions(domain=domain, expires=0)
    tensor = torch.arange(4.0)
    between = child(
        CHILD
        + """
partywall.torch.install_reductions()
tensor = load()
say(dump(tensor))
del tensor
told()
"""
    )
    between.tell(dump(tensor).hex())
    passed_on = bytes.fromhex(between.says())
    del tensor
    gc.collect()
    # The process in between has no tensor any more, only the payload that it has sent.
    last = reader(child)
    assert [reads(last, passed_on) for _ in range(2)] == ["6.0", "6.0"]
    between.kill()
    last.kill()
    eventually("no process is left that has it", lambda: names(domain) == [])
    with pytest.raises(Expired):
        ForkingPickler.loads(passed_on)


# Holds 33.
def test_killed_sender_leaves_nothing_and_its_payload_says_so(domain, child):
    sender = child(
        CHILD
        + """
partywall.torch.install_reductions(domain=pw.connect(socket=sys.argv[1]))
tensor = torch.ones(8)
say(dump(tensor))
told()
""",
        domain.socket,
    )
    payload = bytes.fromhex(sender.says())
    assert len(names(domain)) == 1
    sender.kill()
    eventually("its death is proved", lambda: names(domain) == [])
    with pytest.raises(Expired, match="its sender has ended"):
        ForkingPickler.loads(payload)


# Holds 280.
def test_ten_thousand_sends_of_a_tensor_are_one_name(domain):
    install_reductions(domain=domain, expires=WATCHDOG)
    before = set(os.listdir("/dev/shm"))
    tensor = torch.ones(8)
    payloads = {dump(tensor) for _ in range(10_000)}
    payloads |= {dump(tensor[i:]) for i in range(8)}
    assert len(payloads) == 8 and len(names(domain)) == 1
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith(f"torch_{os.getpid()}")]


def test_threads_that_send_one_tensor_share_its_end(domain):
    install_reductions(domain=domain, expires=0)
    tensor = torch.ones(8)
    dump(tensor)

    def send():
        for _ in range(200):
            dump(tensor)

    threads = [threading.Thread(target=send) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(names(domain)) == 1
    del tensor, send, threads, thread
    gc.collect()
    eventually("no tensor is left", lambda: names(domain) == [])


def test_many_storages_leave_no_records(domain):
    install_reductions(domain=domain, expires=0)
    for _ in range(1000):
        dump(torch.ones(1))
    eventually("all expire", lambda: names(domain) == [])
    kept = torch.ones(1)
    for _ in range(200):
        dump(torch.ones(1))
    dump(kept)
    assert len(_payloads.payloads._by_name) <= 256 and len(_payloads.payloads._by_storage) <= 256


def test_resized_storage_is_sent_anew(domain):
    install_reductions(domain=domain)
    tensor = torch.ones(8)
    before = dump(tensor)
    tensor.resize_(64).fill_(2)
    assert ForkingPickler.loads(dump(tensor)).sum() == 128
    assert len(names(domain)) == 2 and before != dump(tensor)


def test_closed_connection_is_not_used_again(domain, socket):
    tensor = torch.ones(8)
    with pw.connect(socket=socket) as other:
        install_reductions(domain=other)
        before = dump(tensor)
    install_reductions(domain=domain)
    payload = dump(tensor)
    assert payload != before and ForkingPickler.loads(payload).sum() == 8


def test_sends_go_on_with_the_next_broker(domain, socket, child):
    install_reductions(domain=domain)
    tensor = torch.ones(8)
    before = dump(tensor)
    received = ForkingPickler.loads(before)
    subprocess.run([pw._program.PROGRAM, "--socket", socket, "stop", "--force"], timeout=WATCHDOG, check=True)
    eventually("the end of the broker is known", lambda: domain._native.ended)
    with pw.connect(socket=socket) as other:
        install_reductions(domain=other)
        started = reader(child)
        assert reads(started, dump(tensor)) == reads(started, dump(received)) == "8.0"
        assert len(names(other)) == 1
        # This process has a connection to the former broker, too.
        with other.put("x", torch.ones(2)) as put, pickle.loads(pickle.dumps(put)) as again:
            assert again.version == put.version
        # As in a process that has not received it before.
        _payloads.payloads._by_name.clear()
        with pytest.raises(Expired):
            ForkingPickler.loads(before)


def test_each_broker_has_timelines_of_its_own(socket, monkeypatch):
    """Members of two brokers may have the same number, at one socket one after the other, too."""
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=1))
    monkeypatch.setattr(_payloads._Line, "signal", lambda line, device, stream: 1)
    order, tokens, lines = _payloads.Order(), set(), []
    for path in (socket, f"{socket}.other", socket):
        with pw.connect(socket=path) as domain:
            tokens.add(domain.token)
            lines += [order.signal(domain, 0)[0] for _ in range(2)]
        subprocess.run([pw._program.PROGRAM, "--socket", path, "stop", "--force"], timeout=WATCHDOG, check=True)
    assert len(tokens) == 1
    assert lines[::2] == lines[1::2] and len(set(lines)) == 3


# Holds 282.
def test_arguments_bear_what_callers_do(domain, child):
    install_reductions(domain=domain)
    tensor = torch.arange(4.0)
    function, arguments = reductions.reduce_tensor(tensor)
    assert function is _reductions.rebuild_cuda_tensor and len(arguments) == 15
    assert hash(arguments) == hash(tuple(arguments)) and arguments[6] == tensor.untyped_storage().device.index
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    assert names == list(inspect.signature(_reductions.rebuild_cuda_tensor.__wrapped__).parameters)
    for device in (None, 0, 7, "GPU-8e3ff0d4-0000-0000-0000-000000000000", torch.device("cuda", 3), object()):
        changed = (*arguments[:6], device, *arguments[7:])
        assert torch.equal(reductions.rebuild_cuda_tensor(*changed), tensor)
        assert torch.equal(reductions.rebuild_cuda_tensor(**dict(zip(names, changed, strict=True))), tensor)
    other = child(
        CHILD
        + """
import pickle
arguments = pickle.loads(bytes.fromhex(told()))
say(_reductions.rebuild_cuda_tensor(*arguments).sum().item())
"""
    )
    other.tell(pickle.dumps(arguments).hex())
    assert other.says() == "6.0"


@pytest.mark.parametrize("device", [None, 3, "GPU-8e3ff0d4-0000-0000-0000-000000000000"])
def test_empty_tensors_need_no_memory(domain, device):
    install_reductions(domain=domain)
    for tensor in (torch.empty(0), torch.empty(0, 5, dtype=torch.int32)):
        function, arguments = reductions.reduce_tensor(tensor)
        received = function(*arguments[:6], device, *arguments[7:])
        assert (received.shape, received.dtype) == (tensor.shape, tensor.dtype)
    assert names(domain) == []


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64])
def test_dtypes_and_strides_arrive(domain, dtype):
    install_reductions(domain=domain)
    tensor = torch.ones(6, 4).to(dtype)[1:, ::2]
    received = ForkingPickler.loads(dump(tensor))
    assert (received.dtype, received.shape, received.stride()) == (dtype, (5, 2), (4, 2))
    assert torch.equal(received.to(torch.complex64), torch.ones(5, 2, dtype=torch.complex64))


def test_parameters_and_leaves_arrive_as_such(domain):
    install_reductions(domain=domain)
    parameter = ForkingPickler.loads(dump(torch.nn.Parameter(torch.ones(2), requires_grad=True)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    integers = ForkingPickler.loads(dump(torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False)))
    assert isinstance(integers, torch.nn.Parameter) and not integers.requires_grad
    leaf = ForkingPickler.loads(dump(torch.ones(2, requires_grad=True)))
    assert leaf.requires_grad and leaf.is_leaf
    with pytest.raises(RuntimeError, match="requires_grad"):
        dump(torch.ones(2, requires_grad=True) * 2)
    assert len(names(domain)) == 3


# Holds 282.
def test_functions_are_replaced_and_restored(domain):
    torch_functions = reductions.reduce_tensor, reductions.rebuild_cuda_tensor
    reducers = dict(ForkingPickler._extra_reducers)
    install_reductions(domain=domain)
    install_reductions(domain=domain, expires=5)
    ours = reductions.reduce_tensor, reductions.rebuild_cuda_tensor
    assert ours == (_reductions.reduce_tensor, _reductions.rebuild_cuda_tensor)
    assert tuple(inspect.unwrap(function) for function in ours) == torch_functions
    assert ForkingPickler._extra_reducers[torch.Tensor] is ours[0]
    assert ForkingPickler._extra_reducers[torch.nn.Parameter] is ours[0]
    payload = dump(torch.ones(3))
    uninstall_reductions()
    uninstall_reductions()
    assert (reductions.reduce_tensor, reductions.rebuild_cuda_tensor) == torch_functions
    assert ForkingPickler._extra_reducers == reducers
    assert ForkingPickler.loads(payload).sum() == 3, "what was sent can be received"


def test_other_tensors_are_torchs_own(domain, monkeypatch):
    monkeypatch.setattr(_reductions, "_DEVICE", "cuda")
    install_reductions(domain=domain)
    tensor = torch.ones(3)
    function, _ = reductions.reduce_tensor(tensor)
    assert function is reductions.rebuild_tensor and names(domain) == []
    of_torch = (torch.Tensor, (1,), (1,), 0, torch.storage.TypedStorage, torch.float32, 0, b"handle", 4, 0, False)
    with monkeypatch.context() as patch:
        patch.setattr(_reductions.rebuild_cuda_tensor, "__wrapped__", lambda *arguments: arguments)
        rebuilt = _reductions.rebuild_cuda_tensor(*of_torch, b"", 0, b"event", True)
    assert rebuilt == (*of_torch, b"", 0, b"event", True)


def patched(reduce_tensor):
    """Returns what SGLang puts in the place of `reduce_tensor`: the GPU is named by its UUID."""

    def modified(tensor):
        function, arguments = reduce_tensor(tensor)
        return function, (*arguments[:6], "GPU-8e3ff0d4-0000-0000-0000-000000000000", *arguments[7:])

    modified.__module__ = "sglang.srt.utils.patch_torch"
    return modified


# Holds 282.
def test_functions_of_another_library_are_named(domain, monkeypatch):
    before = reductions.rebuild_cuda_tensor
    with monkeypatch.context() as patch:
        patch.setattr(reductions, "reduce_tensor", patched(reductions.reduce_tensor))
        with pytest.raises(ReductionsPatched, match="reduce_tensor: sglang.srt.utils.patch_torch has replaced it"):
            install_reductions(domain=domain)
    assert reductions.rebuild_cuda_tensor is before


# Holds 282.
def test_library_that_patches_later_calls_ours(domain, monkeypatch):
    install_reductions(domain=domain)
    with monkeypatch.context() as patch:
        patch.setattr(reductions, "reduce_tensor", patched(reductions.reduce_tensor))
        function, arguments = reductions.reduce_tensor(torch.ones(3))
        assert function(*arguments).sum() == 3
        for call in (lambda: install_reductions(domain=domain), uninstall_reductions):
            with pytest.raises(ReductionsPatched, match="sglang"):
                call()
        assert reductions.rebuild_cuda_tensor is _reductions.rebuild_cuda_tensor


def test_functions_patched_before_the_first_import_are_named(socket):
    code = """
from torch.multiprocessing import reductions
original = reductions.reduce_tensor
def reduce_tensor(*arguments):
    return original(*arguments)
reductions.reduce_tensor = reduce_tensor
import partywall.torch
try:
    partywall.torch.install_reductions()
except partywall.torch.ReductionsPatched as error:
    print(error)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=True)
    assert "__main__ has replaced it" in done.stdout


@pytest.mark.parametrize("expires", [-1, 1e300, float("inf"), float("nan"), "5", None])
def test_bad_time_is_refused(domain, expires):
    with pytest.raises(ValueError, match="number of seconds"):
        install_reductions(domain=domain, expires=expires)
    assert reductions.reduce_tensor is not _reductions.reduce_tensor


def test_bad_domain_is_refused():
    with pytest.raises(TypeError, match="connect"):
        install_reductions(domain="default")
    assert reductions.reduce_tensor is not _reductions.reduce_tensor


def test_forked_child_sends_for_itself(domain, child):
    forked = child(
        CHILD
        + """
import os
partywall.torch.install_reductions(domain=pw.connect(socket=sys.argv[1]))
tensor = torch.ones(8)
dump(tensor)
if (pid := os.fork()) == 0:
    partywall.torch.install_reductions(domain=pw.connect(socket=sys.argv[1]))
    say(dump(tensor))
    told()
    os._exit(0)
os.waitpid(pid, 0)
say("alone")
told()
""",
        domain.socket,
    )
    payload = bytes.fromhex(forked.says())
    assert len(names(domain)) == 2
    assert ForkingPickler.loads(payload).sum() == 8
    forked.tell()
    assert forked.says() == "alone"
    eventually("the child's death is proved", lambda: len(names(domain)) == 1)
