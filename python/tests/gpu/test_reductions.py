# Holds 33, 279, 283.
"""The reductions of `torch.multiprocessing` through Partywall on a real GPU.

Tests that say `upstream` express a case of torch's own test/test_multiprocessing.py in this project's words.
"""

import gc
import inspect
import os
import time
from multiprocessing.reduction import ForkingPickler

import pytest

import partywall as pw

from ..conftest import NO_PTRACE, WATCHDOG

torch = pytest.importorskip("torch")
if not torch.cuda.is_available() or "PARTYWALL_LIBCUDA" in os.environ:
    pytest.skip("no GPU", allow_module_level=True)
import torch.multiprocessing as mp  # noqa: E402
from torch.multiprocessing import reductions  # noqa: E402

from partywall import _native  # noqa: E402
from partywall.torch import Expired, _reductions, install_reductions, uninstall_reductions  # noqa: E402

MIB = 1 << 20

CHILD = """
from multiprocessing.reduction import ForkingPickler
import torch
def load():
    return ForkingPickler.loads(bytes.fromhex(told()))
"""

READER = (
    CHILD
    + """
torch.ones(1, device="cuda")
say("ready")
while line := told():
    tensor = ForkingPickler.loads(bytes.fromhex(line))
    say(tensor.sum().item())
"""
)


@pytest.fixture(autouse=True)
def installed(domain):
    """Has this process send through the test's broker. A payload expires after a minute unless a test changes that."""
    torch.ones(1, device="cuda")
    install_reductions(domain=domain, expires=60)
    yield
    uninstall_reductions()


@pytest.fixture(params=["spawn", "forkserver"])
def context(request):
    """A way to start processes that may use CUDA."""
    return mp.get_context(request.param)


@pytest.fixture
def processes(context):
    """Starts functions of this module in processes, which are killed at the end of the test."""
    started = []

    def start(function, *arguments):
        started.append(context.Process(target=function, args=arguments, daemon=True))
        started[-1].start()
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.join()


def dump(tensor):
    return bytes(ForkingPickler.dumps(tensor))


def names(domain):
    return [row.name for row in domain.ls()]


def eventually(what, is_so):
    """Waits until something is so. How long that takes is not tested."""
    end = time.monotonic() + WATCHDOG
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def holds(before):
    """Returns whether torch has allocated a tensor of 64 MiB since it had `before` bytes. Payloads of earlier tests,
    which are all small, may be freed meanwhile."""
    return torch.cuda.memory_allocated() >= before + 32 * MIB


def reads(started, payload):
    started.tell(payload.hex())
    return float(started.says())


def reader(child):
    started = child(READER)
    assert started.says() == "ready"
    return started


def install(socket):
    """Has a process that a test started send through the test's broker."""
    install_reductions(domain=pw.connect(socket=socket), expires=60)


# Cases of torch's own tests.


def fill(received, answers, value):
    tensors = received.get()
    for tensor in tensors:
        tensor.fill_(value)
    torch.cuda.synchronize()
    answers.put([(tuple(tensor.shape), tensor.stride(), str(tensor.dtype)) for tensor in tensors])
    received.get()


def test_upstream_cuda_simple(context, processes):
    sent, answers = context.Queue(), context.Queue()
    processes(fill, sent, answers, 4)
    tensors = [torch.zeros(5, 5, device="cuda"), torch.zeros(2, 3, device="cuda").t()[1:]]
    sent.put(tensors)
    assert answers.get(timeout=WATCHDOG) == [(tuple(t.shape), t.stride(), str(t.dtype)) for t in tensors]
    assert all((tensor == 4).all() for tensor in tensors), "the receiver writes in place"
    sent.put(None)


def make(socket, sent, ends, count, size):
    install(socket)
    for value in range(count):
        sent.put(torch.full((size,), float(value), device="cuda"))
    ends.get()


def test_upstream_cuda_memory_allocation(context, processes, domain):
    sent, ends = context.Queue(), context.Queue()
    processes(make, domain.socket, sent, ends, 2, 5)
    received = [sent.get(timeout=WATCHDOG) for _ in range(2)]
    assert [tensor.tolist() for tensor in received] == [[0.0] * 5, [1.0] * 5]
    ends.put(None)


def test_upstream_cuda_ipc_deadlock(context, processes, domain):
    sent, ends = context.Queue(1), context.Queue()
    for _ in range(2):
        processes(make, domain.socket, sent, ends, 200, 3)
    for _ in range(400):
        # Each one is freed while its sender sends the next.
        assert sent.get(timeout=WATCHDOG).numel() == 3
    for _ in range(2):
        ends.put(None)


def relay(socket, received, sent):
    install(socket)
    while (tensor := received.get()) is not None:
        sent.put(tensor)
        del tensor


@pytest.mark.parametrize("fresh", [False, True])
def test_upstream_cuda_send_many(context, processes, domain, fresh):
    first, second = context.Queue(8), context.Queue(8)
    processes(relay, domain.socket, first, second)
    tensor = torch.zeros(5, device="cuda")
    for value in range(2000):
        if fresh:
            tensor = torch.zeros(5, device="cuda")
        tensor.fill_(value)
        first.put(tensor)
        assert second.get(timeout=WATCHDOG).tolist() == [value] * 5
    first.put(None)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_upstream_cuda_small_tensors(context, processes, domain):
    sent, ends = context.Queue(), context.Queue()
    tensors = [torch.arange(i * 5.0, (i + 1) * 5.0, device=f"cuda:{i % 2}") for i in range(5)]
    processes(relay, domain.socket, ends, sent)
    for tensor in tensors:
        ends.put(tensor)
        received = sent.get(timeout=WATCHDOG)
        assert received.device == tensor.device and torch.equal(received, tensor)
    ends.put(None)


def test_upstream_wrong_cuda_fork_and_bad_call(child):
    payload = dump(torch.ones(3, device="cuda"))
    forked = child(
        CHILD
        + """
import os
torch.ones(1, device="cuda")
if (pid := os.fork()) == 0:
    try:
        load()
    except RuntimeError as error:
        say(error)
    os._exit(0)
os.waitpid(pid, 0)
"""
    )
    forked.tell(payload.hex())
    assert "Cannot re-initialize CUDA in forked subprocess" in forked.says()


def test_upstream_rebuild_cuda_tensor():
    tensor = torch.arange(4.0, device="cuda")
    # What torch's own function makes, with arguments by keyword. torch finds the storage in its cache: the driver opens
    # no handle of this process.
    _, arguments = inspect.unwrap(reductions.reduce_tensor)(tensor)
    parameters = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    keywords = dict(zip(parameters, arguments, strict=True))
    reductions.shared_cache[keywords["storage_handle"], keywords["storage_offset_bytes"]] = reductions.StorageWeakRef(
        tensor.untyped_storage()
    )
    assert torch.equal(reductions.rebuild_cuda_tensor(**keywords), tensor)


def test_upstream_empty_tensor_sharing_cuda(child):
    tensor = torch.empty(0, 4, device="cuda")
    other = child(CHILD + "tensor = load(); say(tuple(tensor.shape), tensor.device.type)")
    other.tell(dump(tensor).hex())
    assert other.says() == "(0, 4) cuda"


@pytest.mark.parametrize("requires_grad", [True, False])
def test_upstream_leaf_variable_and_cuda_variable_sharing(child, requires_grad):
    tensor = torch.ones(5, 5, device="cuda", requires_grad=requires_grad)
    other = child(CHILD + "tensor = load(); say(tensor.requires_grad, tensor.is_leaf, tensor.sum().item())")
    other.tell(dump(tensor).hex())
    assert other.says() == f"{requires_grad} True 25.0"


def test_upstream_non_leaf_variable_sharing():
    with pytest.raises(RuntimeError, match="requires_grad"):
        dump(torch.ones(2, device="cuda", requires_grad=True) * 2)


def test_upstream_mixed_types_cuda_sharing(context, processes):
    sent, answers = context.Queue(), context.Queue()
    processes(fill, sent, answers, 1)
    tensors = [torch.zeros(2, 2, device="cuda"), torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.int8, device="cuda")]
    tensors[1].share_memory_()
    sent.put(tensors)
    assert len(answers.get(timeout=WATCHDOG)) == 3
    assert all((tensor == 1).all() for tensor in tensors)
    sent.put(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_upstream_cuda_parameter_and_integer_parameter_sharing(child, dtype):
    parameter = torch.nn.Parameter(torch.ones(4, 4, device="cuda").to(dtype), requires_grad=dtype.is_floating_point)
    other = child(CHILD + "p = load(); say(type(p) is torch.nn.Parameter, p.requires_grad, p.dtype, p.sum().item())")
    other.tell(dump(parameter).hex())
    assert other.says() == f"True {parameter.requires_grad} {dtype} {parameter.sum().item()}"


def test_upstream_is_shared_cuda():
    tensor = torch.ones(5, 5, device="cuda")
    assert tensor.is_shared() and ForkingPickler.loads(dump(tensor)).is_shared()


def test_upstream_events_are_torchs_own():
    assert ForkingPickler._extra_reducers[torch.cuda.Event] is reductions.reduce_event


# What torch does not do.


def test_received_tensor_is_sent_on(child):
    tensor = torch.arange(4.0, device="cuda")
    between = child(
        CHILD
        + """
import partywall.torch
partywall.torch.install_reductions()
tensor = load()
say(bytes(ForkingPickler.dumps(tensor)).hex())
del tensor
told()
"""
    )
    between.tell(dump(tensor).hex())
    passed_on = bytes.fromhex(between.says())
    last = child(CHILD + "tensor = load(); tensor += 1; torch.cuda.synchronize(); say(tensor.sum().item())")
    last.tell(passed_on.hex())
    assert last.says() == "10.0"
    assert tensor.tolist() == [1, 2, 3, 4]


def test_one_payload_is_read_again_and_again_also_here(child, domain):
    tensor = torch.ones(1000, device="cuda")
    payload = dump(tensor)
    first, second = reader(child), reader(child)
    assert {reads(started, payload) for started in (first, second) * 5} == {1000}
    assert ForkingPickler.loads(payload).data_ptr() == tensor.data_ptr()
    assert len(names(domain)) == 1


def test_payload_that_is_never_read_frees_its_memory(domain):
    install_reductions(domain=domain, expires=0.5)
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    payload = dump(torch.ones(64 * MIB, dtype=torch.uint8, device="cuda"))
    assert holds(before)
    eventually("the memory is back", lambda: not holds(before))
    with pytest.raises(Expired):
        ForkingPickler.loads(payload)


@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_killed_receiver_frees_the_memory(domain, child, moment):
    install_reductions(domain=domain, expires=0)
    started = reader(child)
    before = torch.cuda.memory_allocated()
    tensor = torch.ones(64 * MIB, dtype=torch.uint8, device="cuda")
    payload = dump(tensor)
    if moment == "during":
        started.tell(payload.hex())
    elif moment == "after":
        assert reads(started, payload) == 64 * MIB
        del tensor
        assert _native.flush(WATCHDOG)
        assert holds(before), "the receiver has it"
        tensor = None
    started.kill()
    del tensor
    eventually("the memory is back", lambda: not holds(before))


def test_memory_is_not_reused_while_a_receiver_has_it(domain, child):
    install_reductions(domain=domain, expires=0)
    started = child(CHILD + "tensor = load(); say('has it'); told(); say(int((tensor == 7).all()))")
    tensor = torch.full((4 * MIB,), 7, dtype=torch.uint8, device="cuda")
    started.tell(dump(tensor).hex())
    assert started.says() == "has it"
    del tensor
    gc.collect()
    others = [torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda") for _ in range(8)]
    torch.cuda.synchronize()
    started.tell()
    assert started.says() == "1" and len(others) == 8


# Holds 281.
def test_order_of_streams_holds_for_each_send(child):
    started = reader(child)
    tensor = torch.zeros(32 * MIB // 4, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for value in range(1, 31):
        with torch.cuda.stream(streams[value % 3]):
            for _ in range(20):
                tensor.fill_(0)
            tensor.fill_(value)
            payload = dump(tensor)
        assert reads(started, payload) == value * tensor.numel()


# Holds 280.
def test_ten_thousand_sends_wait_for_no_stream_and_leave_no_file(domain):
    before = set(os.listdir("/dev/shm"))
    tensor = torch.ones(8, device="cuda")
    for _ in range(10_000):
        dump(tensor)
    stream = torch.cuda.Stream()
    with domain.timeline("gate", writer=True) as gate, torch.cuda.stream(stream):
        dump(tensor)
        # A send that waits for the stream would wait until the limit. The driver queues about a thousand operations.
        gate.wait_on(1, stream, limit=WATCHDOG)
        for _ in range(300):
            dump(tensor)
        assert not stream.query(), "no send has waited"
        gate.signal(1)
        torch.cuda.synchronize()
    assert len(names(domain)) == 1
    assert not [name for name in set(os.listdir("/dev/shm")) - before if name.startswith("torch_")]


PEER_WITHOUT_PTRACE = (
    NO_PTRACE
    + "give_up_ptrace()"
    + CHILD
    + """
import contextlib
import partywall.torch
domain = pw.connect(socket=sys.argv[1])
partywall.torch.install_reductions(domain=domain)
if len(sys.argv) == 3:
    pool = domain.torch_pool("pool", size=64 << 20) if sys.argv[2] == "pool" else contextlib.nullcontext()
    with pool:
        tensor = torch.ones(1000, device="cuda")
else:
    say(may_take_descriptors(int(sys.argv[3])))
    tensor = load()
    tensor += 1
    torch.cuda.synchronize()
say(bytes(ForkingPickler.dumps(tensor)).hex(), tensor.sum().item())
told()
say(tensor.sum().item())
"""
)


# Holds 284.
@pytest.mark.parametrize(
    ("memory", "kind", "segments"), [("torch", "legacy", False), ("pool", "live", False), ("pool", "live", True)]
)
def test_sent_and_received_tensors_need_no_ptrace_rights(domain, child, memory, kind, segments):
    # What Yama and containers refuse: a process may not take file descriptors of another one.
    options = {"PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{segments}"}
    peers = [child(PEER_WITHOUT_PTRACE, domain.socket, memory, **options)]
    payload, total = peers[0].says().split()
    assert total == "1000.0" and [row.kind for row in domain.ls()] == [kind]
    for expected in "2000.0", "3000.0":
        peers.append(child(PEER_WITHOUT_PTRACE, domain.socket, memory, str(peers[-1].process.pid), **options))
        assert peers[-1].says() == "False"
        peers[-1].tell(payload)
        payload, total = peers[-1].says().split()
        assert total == expected
    for peer in peers[:2]:
        peer.tell()
        assert peer.says() == "3000.0"
    assert len(domain.ls()) == 1


def test_expandable_segments_are_refused(child, domain):
    script = """
import partywall.torch
partywall.torch.install_reductions(domain=pw.connect(socket=sys.argv[1]))
try:
    ForkingPickler.dumps(torch.ones(5, device="cuda"))
except pw.NotShareable as error:
    say(type(error).__name__)
"""
    other = child(CHILD + script, domain.socket, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    assert other.says() == "NotShareable"


def test_tensor_of_a_pool_is_sent_and_freed_with_its_last_user(child, domain):
    install_reductions(domain=domain, expires=0)
    with domain.torch_pool("pool", size=64 * MIB):
        tensor = torch.ones(MIB, device="cuda")
    payload = dump(tensor)
    assert [row.kind for row in domain.ls()] == ["live"]
    other = child(CHILD + "tensor = load(); tensor += 1; torch.cuda.synchronize(); say(tensor.sum().item()); told()")
    other.tell(payload.hex())
    assert other.says() == str(2.0 * MIB)
    assert (tensor == 2).all(), "the receiver writes in place"
    del tensor
    other.tell()
    assert other.end() == 0
    eventually("the name has ended", lambda: not names(domain))


def test_callers_change_the_device_and_drop_the_function(child):
    tensor = torch.arange(4.0, device="cuda")
    _, arguments = reductions.reduce_tensor(tensor)
    assert len(arguments) == 15 and hash(arguments) is not None
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    for device in (0, 7, uuid):
        assert torch.equal(_reductions.rebuild_cuda_tensor(*arguments[:6], device, *arguments[7:]), tensor)


def test_other_numbers_of_gpus_in_the_receiver(child):
    count = torch.cuda.device_count()
    last = torch.ones(5, device=f"cuda:{count - 1}")
    other = child(CHILD + "say(load().sum().item())", CUDA_VISIBLE_DEVICES=str(count - 1))
    other.tell(dump(last).hex())
    assert other.says() == "5.0"
