# Holds 381.
"""`partywall.torch.DataLoader`, beside torch's own.

With a GPU the same tests run with page-locked blocks. `docs/torch.md` lists the tests of torch's `test_dataloader.py`
that are expressed here.
"""

import collections
import copy
import gc
import itertools
import os
import random
import signal
import subprocess
import time

import pytest

from partywall._program import PROGRAM

from ..conftest import eventually

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
shared = pytest.importorskip("partywall.torch")
data = torch.utils.data

# Machines with few processors.
pytestmark = pytest.mark.filterwarnings(
    "ignore:This DataLoader will create",
    "ignore:Sparse invariant checks",
    "ignore:The PyTorch API of nested tensors",
)

Point = collections.namedtuple("Point", "x y")


class Items(data.Dataset):
    """Returns what a function returns for the number of each item."""

    def __init__(self, count, make):
        self.count, self.make = count, make

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.make(index)


class Stream(data.IterableDataset):
    """Each worker has its part of the numbers, and they have different lengths."""

    def __init__(self, count, make=torch.tensor, length=None):
        self.count, self.make, self.length = count, make, length

    def __iter__(self):
        worker = data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter([self.make(number) for number in range(first, self.count, step)])

    def __len__(self):
        if self.length is None:
            raise TypeError
        return self.length


class Custom:
    """A batch of a class of its own, which torch would pin by its method."""

    def __init__(self, samples):
        self.tensors = torch.stack(samples)
        self.names = {"count": len(samples)}


@pytest.fixture
def loader(domain, request):
    """Makes loaders of the test's domain, and ends with all blocks given back."""
    made = []

    def make(*arguments, **options):
        made.append(shared.DataLoader(*arguments, domain=domain, **options))
        return made[-1]

    failed = request.session.testsfailed
    yield make
    for each in made:
        # Workers that stay keep what they have.
        each._iterator = None
    gc.collect()
    # The traceback of a failure keeps batches.
    for each in made if request.session.testsfailed == failed else []:
        if each._batches is not None:
            for pool in each._batches._pools.values():
                eventually(lambda pool=pool: pool.stats().free == pool.blocks)


def pools(loader):
    """The pools of a loader, newest last."""
    return [pool for _, pool in sorted(loader._batches._pools.items())]


def same(ours, theirs):
    """Whether two batches are equal in everything."""
    assert type(ours) is type(theirs)
    if isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert ours.requires_grad == theirs.requires_grad
        if ours.layout is torch.strided:
            assert torch.equal(torch.nan_to_num(ours) if ours.is_floating_point() else ours, theirs)
        else:
            assert torch.equal(ours.to_dense(), theirs.to_dense())
    elif isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    elif isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            same(one, other)
    elif isinstance(ours, Custom):
        same(vars(ours), vars(theirs))
    else:
        assert ours == theirs


def both(loader, dataset, **options):
    """Iterates over torch's loader and over ours, and returns the batches of ours."""
    options = {"num_workers": 2, **options}
    seeds = options.pop("seed", None)

    def generator():
        return {} if seeds is None else {"generator": torch.Generator().manual_seed(seeds)}

    theirs = list(data.DataLoader(dataset, **options, **generator()))
    ours = list(loader(dataset, held=len(theirs), **options, **generator()))
    same(ours, theirs)
    return ours


MAKERS = {
    "tensors": lambda i: torch.full((3, 5), i / 3),
    "numbers": lambda i: i,
    "floats": lambda i: i / 3,
    "strings": lambda i: f"item {i}",
    "bytes": lambda i: b"%d" % i,
    "long strings": lambda i: "x" * (5000 + i),
    "numpy": lambda i: np.arange(i, i + 4, dtype="int16"),
    "numpy numbers": lambda i: np.float32(i),
    "pairs": lambda i: (torch.tensor([i]), i),
    "lists": lambda i: [torch.tensor([i]), [f"{i}", i]],
    "dictionaries": lambda i: {"x": torch.tensor([i, 2.0]), "y": {"z": i}},
    "named tuples": lambda i: Point(torch.tensor(i), Point(i, "y")),
    "bool": lambda i: torch.tensor([i % 2 == 0, True]),
    "bfloat16": lambda i: torch.tensor([i, 0.5], dtype=torch.bfloat16),
    "float8": lambda i: torch.tensor([i, 0.5]).to(torch.float8_e4m3fn).view(torch.uint8),
    "complex": lambda i: torch.tensor([complex(i, 1)]),
    "without elements": lambda i: torch.empty(0, 4),
    "scalars": lambda i: torch.tensor(i),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_batches_are_those_of_torch(loader, make):
    both(loader, Items(11, make), batch_size=4)


COLLATED = {
    "turned": lambda samples: torch.stack(samples).t(),
    "sliced": lambda samples: torch.stack(samples)[:, ::2].contiguous(),
    "expanded": lambda samples: torch.tensor([float(len(samples))]).expand(1000, 3),
    "custom class": Custom,
    "numpy": lambda samples: torch.stack(samples).numpy(),
    "part of the default": lambda samples: data.default_collate(samples)[:, 1:3],
    "default, changed": lambda samples: data.default_collate(samples).double() + 1,
    "twice": lambda samples: [samples[0], samples[0]],
    "requires grad": lambda samples: torch.stack(samples).requires_grad_(),
    "sparse": lambda samples: torch.stack(samples).to_sparse(),
    "conjugate": lambda samples: torch.stack(samples).to(torch.complex64).conj(),
    "nothing": lambda samples: None,
    "sizes": lambda samples: (torch.stack(samples), torch.zeros(0), torch.zeros(3, 0, 2), torch.tensor(1.5)),
}


@pytest.mark.parametrize("collate", COLLATED.values(), ids=COLLATED)
def test_batches_of_any_collate_function_are_those_of_torch(loader, collate):
    both(loader, Items(9, lambda i: torch.arange(i, i + 4.0)), batch_size=2, collate_fn=collate)


def test_a_tensor_that_a_batch_has_twice_is_one(loader):
    for first, second in loader(Items(3, float), num_workers=1, collate_fn=lambda samples: [torch.ones(2)] * 2):
        assert first is second


OPTIONS = {
    "one by one": {"batch_size": None},
    "ragged": {"batch_size": 4},
    "without the last": {"batch_size": 4, "drop_last": True},
    "shuffled": {"batch_size": 3, "shuffle": True, "seed": 7},
    "sampler": {"batch_size": 2, "sampler": [5, 3, 3, 1, 0]},
    "batch sampler": {"batch_sampler": [[1, 2, 3], [4], [5, 6]]},
    "many workers": {"batch_size": 1, "num_workers": 5},
    "prefetch": {"batch_size": 1, "prefetch_factor": 5},
    "no prefetch": {"batch_size": 2, "prefetch_factor": 1},
    "in this process": {"batch_size": 4, "num_workers": 0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("pinned", [True, False])
def test_arguments_mean_what_they_mean_to_torch(loader, options, pinned):
    dataset = Items(13, lambda i: (torch.full((3,), i), i))
    ours = both(loader, dataset, **options)
    options = {"num_workers": 2, **{k: v for k, v in options.items() if k != "seed"}}
    assert len(list(loader(dataset, pin_memory=pinned, **options))) == len(ours)


STREAMS = {
    "batches": {"batch_size": 4},
    "without the last": {"batch_size": 4, "drop_last": True},
    "one by one": {"batch_size": None},
    "in this process": {"batch_size": 4, "num_workers": 0},
    "more workers than items": {"batch_size": 2, "num_workers": 15},
}


@pytest.mark.parametrize("options", STREAMS.values(), ids=STREAMS)
def test_iterable_datasets_are_iterated_as_by_torch(loader, options):
    both(loader, Stream(13), **options)
    both(loader, data.ChainDataset([Stream(3), Stream(4)]), **options)


def test_more_items_than_the_length_of_an_iterable_dataset_warn(loader):
    iterated = loader(Stream(6, length=2), batch_size=2, num_workers=1)
    assert len(iterated) == 1
    with pytest.warns(UserWarning, match="was reported to be 2"):
        assert len(list(iterated)) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"num_workers": 1, "prefetch_factor": -1},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 2, "batch_sampler": [[1]]},
        {"sampler": [1], "shuffle": True},
        {"persistent_workers": True},
        {"num_workers": 1, "multiprocessing_context": "bad"},
        {"multiprocessing_context": "fork"},
    ],
    ids=str,
)
def test_arguments_that_torch_refuses_are_refused_in_its_words(loader, options):
    dataset = Items(3, float)
    with pytest.raises(ValueError) as theirs:
        data.DataLoader(dataset, **options)
    with pytest.raises(ValueError) as ours:
        loader(dataset, **options)
    assert str(ours.value) == str(theirs.value)


def test_own_arguments_are_checked():
    dataset = Items(3, float)
    for options, expected in [
        ({"held": -1}, "held= is a number"),
        ({"restart": 1.5}, "restart= is a number"),
        ({"domain": "x"}, "domain="),
    ]:
        with pytest.raises((ValueError, TypeError), match=expected):
            shared.DataLoader(dataset, **options)
    with pytest.raises(ValueError, match="map-style"):
        shared.DataLoader(Stream(3), num_workers=1, restart=1)
    with pytest.raises(TypeError, match="unexpected"):
        shared.DataLoader(dataset, no_such=1)
    # By position, as torch takes it.
    assert not shared.DataLoader(dataset, 2, False, None, None, 0, None, False).pin_memory
    assert shared.DataLoader(dataset).pin_memory


def test_attributes_are_those_of_torch(loader):
    made = loader(Items(3, float), num_workers=1)
    assert isinstance(made, data.DataLoader)
    with pytest.raises(ValueError, match="should not be set"):
        made.batch_size = 3
    list(made)
    assert made.collate_fn is data.default_collate and made.pin_memory and made.multiprocessing_context is None
    assert copy.copy(made)._batches is None


def test_each_epoch_uses_the_same_blocks(loader):
    made = loader(Items(8, lambda i: torch.full((1000,), i)), batch_size=2, num_workers=2)
    addresses = set()
    for _ in range(4):
        for batch in made:
            addresses.add(batch.data_ptr())
    (pool,) = pools(made)
    assert len(addresses) <= pool.blocks == 2 * 2 + 4
    assert pool.block_bytes == 16384


@pytest.mark.parametrize("collate", [None, lambda samples: torch.stack(samples) + 0])
def test_a_batch_is_where_its_worker_put_it(loader, collate):
    made = loader(Items(12, lambda i: torch.full((1000,), i)), batch_size=2, num_workers=1, collate_fn=collate)
    for batch in made:
        (pool,) = pools(made)
        assert pool.stats().held >= 1
        assert batch.untyped_storage().nbytes() == batch.nbytes
        batch += 1


# Holds 383.
def test_more_batches_than_blocks_can_be_kept(loader):
    made = loader(Items(40, lambda i: torch.full((100,), i)), num_workers=2, held=1)
    kept = list(made)
    assert [int(batch[0, 0]) for batch in kept] == list(range(40))
    assert pools(made)[0].blocks == 5
    del kept
    eventually(lambda: pools(made)[0].stats().free == 5)
    assert len(list(made)) == 40


def test_batches_may_grow(loader):
    made = loader(Items(12, lambda i: torch.full((10 ** (i // 2),), i)), num_workers=2)
    for epoch in range(2):
        for number, batch in enumerate(made):
            assert batch.shape == (1, 10 ** (number // 2)) and bool((batch == number).all())
        assert len(pools(made)) >= 2 - epoch
    assert len(pools(made)) <= 3 and pools(made)[-1].block_bytes >= 400_000


def test_a_batch_that_its_dataset_keeps_stays_as_it_is(loader):
    class Cache(data.Dataset):
        def __init__(self):
            self.known = {}

        def __len__(self):
            return 4

        def __getitem__(self, index):
            if index not in self.known:
                self.known[index] = data.default_collate([torch.full((100,), index), torch.full((100,), index)])
            return self.known[index]

    made = loader(Cache(), batch_size=None, num_workers=1, persistent_workers=True, held=20)
    for _ in range(4):
        for number, batch in enumerate(made):
            assert bool((batch == number).all())
            batch.fill_(-1)


def test_without_a_broker_batches_go_the_way_of_torch(domain):
    made = shared.DataLoader(Items(10, lambda i: torch.full((10 ** (i // 2),), i)), num_workers=2, domain=domain)
    iterator = iter(made)
    batches = [next(iterator)]
    subprocess.run([PROGRAM, "--socket", domain.socket, "stop", "--force"], capture_output=True, check=True)
    # Larger ones do not fit into the blocks, and nobody makes others.
    batches += iterator
    assert [(int(batch[0, 0]), batch.numel()) for batch in batches] == [(i, 10 ** (i // 2)) for i in range(10)]


def test_seeds_are_those_of_torch(loader):
    def draw(_):
        return torch.tensor([torch.initial_seed(), random.getrandbits(40), np.random.randint(2**31)])

    for options in [{"batch_size": None}, {"batch_size": 3, "worker_init_fn": torch.manual_seed}]:
        both(loader, Items(10, draw), seed=11, **options)
        torch.manual_seed(5)
        theirs = [list(data.DataLoader(Items(10, draw), num_workers=2, **options)) for _ in range(2)]
        torch.manual_seed(5)
        ours = [list(loader(Items(10, draw), num_workers=2, held=10, **options)) for _ in range(2)]
        same(ours, theirs)


def test_workers_have_their_information_and_init_function(loader):
    marks = []

    def mark(worker):
        marks.append(worker)

    def tell(_):
        worker = data.get_worker_info()
        return torch.tensor([worker.id, worker.num_workers, worker.seed, len(worker.dataset), marks[0], os.getpid()])

    made = loader(Items(8, tell), batch_size=None, num_workers=2, worker_init_fn=mark)
    rows = {tuple(row[:2].tolist()): row for row in made}
    assert sorted(rows) == [(0, 2), (1, 2)]
    for (worker, _), row in rows.items():
        assert row[4] == worker and row[5] != os.getpid() and row[3] == 8
    assert data.get_worker_info() is None and not marks


def test_affinity_may_be_set_by_the_init_function(loader):
    cpu = max(os.sched_getaffinity(0))
    made = loader(
        Items(2, lambda _: min(os.sched_getaffinity(0))),
        num_workers=2,
        worker_init_fn=lambda _: os.sched_setaffinity(0, [cpu]),
    )
    assert [int(batch) for batch in made] == [cpu, cpu]


def raiser(error):
    def raise_it(index):
        if index == 5:
            raise error
        return torch.tensor(index)

    return raise_it


class Odd(Exception):
    def __init__(self, first, second):
        super().__init__(first, second)


@pytest.mark.parametrize("error", [ValueError("bad item"), KeyError("a\nb"), Odd(1, 2), StopIteration()], ids=repr)
@pytest.mark.parametrize("workers", [0, 2])
def test_errors_come_where_torch_raises_them(loader, error, workers):
    dataset = Items(8, raiser(error))
    found = []
    for made in (data.DataLoader(dataset, num_workers=workers), loader(dataset, num_workers=workers)):
        iterator = iter(made)
        assert [int(next(iterator)) for _ in range(5)] == list(range(5))
        with pytest.raises(Exception) as raised:
            next(iterator)
        found.append(raised)
        if workers:
            assert "Original Traceback" in str(raised.value) and "raise_it" in str(raised.value)
            # The pass goes on behind the item, as with torch.
            assert [int(batch) for batch in iterator] == [6, 7]
    assert found[0].type is found[1].type


def test_an_error_in_the_init_function_is_raised(loader):
    def fail(worker):
        raise RuntimeError(f"no worker {worker}")

    with pytest.raises(RuntimeError, match="no worker 0"):
        list(loader(Items(8, float), num_workers=2, worker_init_fn=fail))


def test_items_of_unequal_size_are_refused_in_the_words_of_torch(loader):
    dataset = Items(4, lambda i: torch.zeros(i + 1))
    made = loader(dataset, batch_size=2, num_workers=1)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="each tensor to be equal size"):
            list(made)


def test_a_batch_that_cannot_be_pickled_is_an_error_at_its_place(loader):
    made = loader(Items(3, lambda i: (lambda: i) if i == 1 else torch.tensor(i)), batch_size=None, num_workers=1)
    iterator = iter(made)
    assert int(next(iterator)) == 0
    with pytest.raises(AttributeError, match=r"(?s)in DataLoader worker process 0.*lambda"):
        next(iterator)
    assert [int(batch) for batch in iterator] == [2]


def test_a_worker_that_takes_too_long_is_a_timeout(loader):
    made = loader(Items(2, lambda i: time.sleep(1000)), num_workers=1, timeout=1)
    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds"):
        next(iter(made))


def kill_once(path):
    """The first process that gets item 7 kills itself, and the next ones do not."""

    def make(index):
        if index == 7:
            try:
                os.close(os.open(path, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return torch.full((10,), index)
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((10,), index)

    return make


# Holds 382.
@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_is_an_error_that_names_it(loader, tmp_path, persistent):
    made = loader(
        Items(20, kill_once(tmp_path / "killed")), batch_size=2, num_workers=2, persistent_workers=persistent
    )
    pids = check_death(made)
    gc.collect()
    if not persistent:
        assert len(list(made)) == 10
        for pid in pids:
            eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))


def check_death(made):
    iterator = iter(made)
    pids = [worker.pid for worker in iterator._workers]
    with pytest.raises(shared.LoaderWorkerDied, match=rf"worker 1 of a loader \(pid {pids[1]}\) was killed by SIGKILL"):
        list(iterator)
    # And again, rather than waiting for it.
    with pytest.raises(RuntimeError, match="was killed by SIGKILL"):
        next(iterator)
    return pids


def test_a_worker_that_ends_by_itself_is_an_error_that_says_how(loader):
    with pytest.raises(shared.LoaderWorkerDied, match="worker 0 of a loader .* ended with exit code 3"):
        list(loader(Items(3, lambda i: os._exit(3)), num_workers=1))


# Holds 382.
@pytest.mark.parametrize("persistent", [False, True])
def test_a_killed_worker_is_replaced(loader, tmp_path, persistent, caplog):
    made = loader(
        Items(20, kill_once(tmp_path / "killed")),
        batch_size=2,
        num_workers=2,
        restart=1,
        persistent_workers=persistent,
    )
    for _ in range(2):
        assert [batch[:, 0].tolist() for batch in made] == [[n, n + 1] for n in range(0, 20, 2)]
    (message,) = caplog.messages
    assert message.startswith("worker 1 of a loader") and "was killed by SIGKILL and is replaced by pid" in message


# Holds 382.
def test_workers_that_are_killed_at_any_time_are_replaced(loader):
    made = loader(Items(200, lambda i: torch.full((50,), i)), batch_size=2, num_workers=2, restart=1000)
    iterator, chance, found = iter(made), random.Random(1), []
    for _ in range(60):
        found.append(next(iterator)[:, 0].tolist())
        time.sleep(chance.random() / 50)
        worker = chance.choice(iterator._workers)
        if worker.is_alive():
            os.kill(worker.pid, signal.SIGKILL)
    found += [batch[:, 0].tolist() for batch in iterator]
    assert found == [[n, n + 1] for n in range(0, 200, 2)]


def test_a_worker_that_dies_again_and_again_is_an_error_in_the_end(loader):
    def die(index):
        if index == 3:
            os._exit(1)
        return index

    made = loader(Items(8, die), num_workers=1, restart=2)
    iterator = iter(made)
    assert [int(next(iterator)) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(shared.LoaderWorkerDied, match="exit code 1"):
        next(iterator)


def test_a_worker_killed_between_two_passes_is_replaced(loader):
    made = loader(Items(6, float), num_workers=2, persistent_workers=True, restart=1)
    for _ in range(3):
        assert [float(batch) for batch in made] == [0, 1, 2, 3, 4, 5]
        os.kill(made._iterator._workers[1].pid, signal.SIGKILL)


def test_a_pass_may_be_left_early(loader):
    made = loader(Items(1000, lambda i: torch.full((100,), i)), num_workers=2)
    for _ in range(3):
        iterator = iter(made)
        pids = [worker.pid for worker in iterator._workers]
        assert int(next(iterator)[0, 0]) == 0
        del iterator
        gc.collect()
        for pid in pids:
            eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))


def test_persistent_workers_stay_and_may_be_left_early(loader):
    sampler = list(range(6))
    made = loader(Items(12, lambda i: torch.tensor(i)), sampler=sampler, num_workers=2, persistent_workers=True)
    assert [int(batch) for batch in made] == [0, 1, 2, 3, 4, 5]
    pids = [worker.pid for worker in made._iterator._workers]
    for batch in made:
        break
    # As `set_epoch` of a distributed sampler does.
    sampler[:] = range(11, 5, -1)
    assert [int(batch) for batch in made] == [11, 10, 9, 8, 7, 6]
    assert pids == [worker.pid for worker in made._iterator._workers]
    del batch


def test_iterable_datasets_with_persistent_workers_begin_again(loader):
    made = loader(Stream(7), num_workers=3, persistent_workers=True, batch_size=2)
    expected = [batch.tolist() for batch in data.DataLoader(Stream(7), num_workers=3, batch_size=2)]
    for _ in range(3):
        assert [batch.tolist() for batch in made] == expected


@pytest.mark.skipif("in_order" not in data.DataLoader.__init__.__annotations__, reason="torch 2.6 or later")
def test_batches_may_come_out_of_order(loader):
    def slow(index):
        if index == 0:
            while not done.wait(0.01):
                pass
        elif index == 5:
            done.set()
        return torch.tensor(index)

    done = torch.multiprocessing.Event()
    found = [int(batch) for batch in loader(Items(6, slow), num_workers=2, in_order=False, prefetch_factor=6)]
    assert sorted(found) == list(range(6)) and found[0] != 0


def test_two_passes_at_a_time_do_not_mix(loader):
    made = loader(Items(20, lambda i: torch.full((10,), i)), num_workers=2)
    for number, (one, two) in enumerate(zip(made, made, strict=True)):
        assert int(one[0, 0]) == int(two[0, 0]) == number


@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_other_start_methods(loader, context):
    tensors = data.TensorDataset(torch.arange(10), torch.rand(10, 3))
    method = torch.multiprocessing.get_context(context) if context == "spawn" else context
    both(loader, tensors, batch_size=4, num_workers=1, multiprocessing_context=method)


def test_workers_end_with_a_killed_trainer(child, domain):
    trainer = child(
        """
        import torch, partywall.torch, time
        with pw.connect(socket=sys.argv[1], start=False) as d:
            dataset = torch.utils.data.TensorDataset(torch.arange(1000))
            iterator = iter(partywall.torch.DataLoader(dataset, num_workers=2, domain=d))
            next(iterator)
            say(*(worker.pid for worker in iterator._workers))
            told()
        """,
        domain.socket,
    )
    pids = trainer.says().split()
    assert len(pids) == 2
    trainer.kill()
    for pid in pids:
        eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))
    eventually(lambda: not [object for object in domain.ls() if "loader" in object.name])


def test_control_c_ends_a_pass_and_its_workers(child, domain):
    trainer = child(
        """
        import torch, partywall.torch, time
        with pw.connect(socket=sys.argv[1], start=False) as d:
            class Slow(torch.utils.data.Dataset):
                def __len__(self): return 2
                def __getitem__(self, index): time.sleep(1000)
            iterator = iter(partywall.torch.DataLoader(Slow(), num_workers=1, domain=d))
            say(iterator._workers[0].pid)
            try:
                next(iterator)
            except KeyboardInterrupt:
                say("interrupted")
            del iterator
        """,
        domain.socket,
    )
    pid = trainer.says()
    assert trainer.interrupt() == "interrupted"
    assert trainer.end() == 0
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))


def test_a_program_may_end_with_persistent_workers(child, domain):
    trainer = child(
        """
        import torch, partywall.torch
        d = pw.connect(socket=sys.argv[1], start=False)
        dataset = torch.utils.data.TensorDataset(torch.rand(64, 28, 28))
        loader = partywall.torch.DataLoader(dataset, 16, num_workers=2, persistent_workers=True, domain=d)
        for batch in loader:
            break
        say(*(worker.pid for worker in loader._iterator._workers))
        """,
        domain.socket,
    )
    pids = trainer.says().split()
    assert trainer.end() == 0
    for pid in pids:
        eventually(lambda pid=pid: not os.path.exists(f"/proc/{pid}"))


def test_nested_tensors_go_the_way_of_torch(loader):
    nested = [torch.nested.nested_tensor([torch.full((5,), i), torch.zeros(2)]) for i in range(3)]
    for number, batch in enumerate(loader(nested, num_workers=1, collate_fn=lambda samples: samples[0].clone())):
        assert batch.is_nested and bool((batch[0] == number).all())
    with pytest.raises(RuntimeError, match="not currently supported by the default collate_fn"):
        list(loader(nested, num_workers=1))


def test_a_dataset_may_grow_between_passes_and_persistent_workers_keep_theirs(loader):
    numbers = [torch.tensor(i) for i in range(4)]
    made = loader(numbers, num_workers=1)
    assert len(made) == len(list(made)) == 4
    numbers.append(torch.tensor(4))
    assert len(made) == len(list(made)) == 5
    numbers = Items(4, lambda i: i)
    made = loader(numbers, num_workers=1, persistent_workers=True)
    assert [int(batch) for batch in made] == [0, 1, 2, 3]
    numbers.make = lambda i: -i
    assert [int(batch) for batch in made] == [0, 1, 2, 3]


def test_the_parts_of_a_distributed_sampler_are_those_of_torch(loader):
    dataset = torch.arange(9)
    seen = []
    for rank in range(4):
        sampler = data.distributed.DistributedSampler(dataset, 4, rank)
        made = loader(dataset, batch_size=2, drop_last=True, sampler=sampler, num_workers=1)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            same(list(made), list(data.DataLoader(dataset, batch_size=2, drop_last=True, sampler=sampler)))
        seen += [number for batch in made for number in batch.tolist()]
    assert len(seen) == len(set(seen)) == 8


def test_many_workers_and_batches_leave_nothing_behind(loader):
    made = loader(Items(30, lambda i: torch.full((10,), i)), num_workers=3)
    before = len(os.listdir("/proc/self/fd"))
    list(made)
    gc.collect()
    first = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert sum(1 for _ in itertools.chain(made)) == 30
        gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= first <= before + 20
