# Holds 296.
"""The tensor transport in Ray. Each test has a driver, and so a Ray of its own."""

import json

import pytest


DRIVER = """
import gc
import json
import os
import time
import ray
import torch
import partywall.integrations.ray
if sys.argv[2] == "one":
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=sys.argv[1])
else:
    from ray.cluster_utils import Cluster
    first = {"num_cpus": 4, "include_dashboard": False, "resources": {"here": 9}}
    cluster = Cluster(initialize_head=True, head_node_args=first)
    cluster.add_node(num_cpus=4, resources={"there": 9})
    ray.init(address=cluster.address, log_to_driver=False)
partywall.integrations.ray.register()

@ray.remote(enable_tensor_transport=True)
class Actor:
    @ray.method(tensor_transport="PARTYWALL")
    def make(self, kind):
        if kind == "one":
            return torch.arange(1000.0)
        if kind == "none":
            return []
        if kind == "meta":
            return torch.empty(3, device="meta")
        return [
            torch.arange(6.0).reshape(2, 3),
            torch.ones(4, dtype=torch.bfloat16),
            torch.arange(24).reshape(4, 6)[:, ::2],
            torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
            torch.zeros(0, 3),
            torch.nn.Parameter(torch.full((2,), 7.0)),
        ]

    def ping(self):
        return "pong"

    def pid(self):
        return os.getpid()

    def take(self, given):
        self.held = given
        return self.read()

    def read(self):
        given = self.held if isinstance(self.held, list) else [self.held]
        return [[str(t.dtype), list(t.shape), t.to(torch.float64).tolist()] for t in given]

    def place(self):
        with open("/proc/self/maps") as maps:
            address = self.held.data_ptr()
            for line in maps:
                begin, _, end = line.split()[0].partition("-")
                if int(begin, 16) <= address < int(end, 16):
                    return [line.split()[4], address - int(begin, 16)]

def kill(actor):
    # The way of a crash: Ray learns of it afterwards.
    os.kill(ray.get(actor.pid.remote()), 9)
    while True:
        try:
            ray.get(actor.ping.remote())
        except ray.exceptions.RayActorError:
            return

d = pw.connect()
def names():
    return [name.name for name in d.ls()]

def until(reached):
    while not reached():
        gc.collect()
        time.sleep(0.05)
"""


@pytest.fixture
def driver(child, socket, domain, tmp_path_factory):
    """Runs code in a driver."""

    def start(code, nodes="one"):
        # Ray's sockets have a limit on their paths.
        folder = tmp_path_factory.mktemp("r")
        return child(DRIVER + code, str(folder), nodes, PARTYWALL_SOCKET=socket, RAY_USAGE_STATS_ENABLED="0")

    return start


def lines(child):
    """Returns what the child says as JSON until it ends."""
    said = []
    while line := child.says():
        if line.startswith("SAY "):
            said.append(json.loads(line[4:]))
    assert child.end() == 0
    return said


@pytest.mark.case("E1")
def test_transport_is_registered_once_and_used(driver):
    [one, duplicate] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
say("SAY", json.dumps(ray.get(receiver.take.remote(source.make.remote("one")))))
partywall.integrations.ray.register()
try:
    transport = partywall.integrations.ray.PartywallTransport
    ray.experimental.register_tensor_transport("partywall", ["cpu"], transport, torch.Tensor)
except ValueError as error:
    say("SAY", json.dumps(str(error)))
""")
    )
    assert one == [["torch.float32", [1000], list(range(1000))]]
    assert "already registered" in duplicate


@pytest.mark.case("E1")
def test_metadata_does_not_hold_up_the_next_task(driver):
    [said] = lines(
        driver("""
source = Actor.remote()
ref = source.make.remote("one")
pong = ray.get(source.ping.remote())
receiver = Actor.remote()
say("SAY", json.dumps([pong, len(ray.get(receiver.take.remote(ref)))]))
""")
    )
    assert said == ["pong", 1]


@pytest.mark.case("E1")
def test_another_device_is_refused(driver):
    [said] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
try:
    ray.get(receiver.take.remote(source.make.remote("meta")))
    say("SAY", json.dumps("taken"))
except Exception as error:
    say("SAY", json.dumps(type(error).__name__))
""")
    )
    assert said != "taken"


@pytest.mark.case("E2")
def test_freed_object_leaves_nothing_and_its_receiver_keeps_it(driver):
    [held, left, read] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
ref = source.make.remote("one")
ray.get(receiver.take.remote(ref))
say("SAY", json.dumps(len(names())))
del ref
until(lambda: not names())
say("SAY", json.dumps(len(names())))
say("SAY", json.dumps(ray.get(receiver.read.remote())[0][1]))
""")
    )
    assert (held, left, read) == (1, 0, [1000])


@pytest.mark.case("E3")
def test_object_that_was_fetched_survives_its_source(driver):
    [before, after] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
ref = source.make.remote("one")
say("SAY", json.dumps(ray.get(receiver.take.remote(ref))))
kill(source)
say("SAY", json.dumps(ray.get(receiver.read.remote())))
""")
    )
    assert before == after == [["torch.float32", [1000], list(range(1000))]]


@pytest.mark.case("E3")
def test_object_is_fetched_after_the_end_of_its_source(driver):
    [passed_on, got] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
ref = source.make.remote("one")
until(lambda: len(names()) == 1)
ray.wait([ref])
kill(source)
say("SAY", json.dumps(ray.get(receiver.take.remote(ref))))
say("SAY", json.dumps(ray.get(ref).tolist()))
""")
    )
    assert passed_on == [["torch.float32", [1000], list(range(1000))]]
    assert got == list(range(1000))


@pytest.mark.case("E4")
def test_killed_driver_leaves_nothing(driver, domain):
    killed = driver("""
sources = [Actor.remote() for _ in range(2)]
refs = [source.make.remote("one") for source in sources]
ray.wait(refs, num_returns=2)
until(lambda: len(names()) == 2)
kill(sources[0])
say("SAY", json.dumps(names()))
told()
""")
    while not (line := killed.says()).startswith("SAY "):
        assert line or killed.process.poll() is None
    names = json.loads(line[4:])
    assert len(names) == 2
    segments = [domain.open(name) for name in names]
    killed.kill()
    for segment in segments:
        segment.wait_withdrawn(60)
        segment.close()
    assert domain.ls() == []


@pytest.mark.case("E5")
def test_tensors_of_any_number_dtype_and_shape(driver):
    [many, none] = lines(
        driver("""
source, receiver = Actor.remote(), Actor.remote()
say("SAY", json.dumps(ray.get(receiver.take.remote(source.make.remote("many")))))
say("SAY", json.dumps(ray.get(receiver.take.remote(source.make.remote("none")))))
""")
    )
    dtypes = ["torch.float32", "torch.bfloat16", "torch.int64", "torch.int64", "torch.float32", "torch.float32"]
    assert [tensor[0] for tensor in many] == dtypes
    assert [tensor[1] for tensor in many] == [[2, 3], [4], [4, 3], [4, 2, 3], [0, 3], [2]]
    assert many[2][2] == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18, 20, 22]]
    assert many[3][2][1] == [[1, 5, 9], [13, 17, 21]]
    assert none == []


@pytest.mark.case("E5")
def test_two_consumers_share_one_memory(driver):
    [first, second] = lines(
        driver("""
source, *receivers = [Actor.remote() for _ in range(3)]
ref = source.make.remote("one")
for receiver in receivers:
    ray.get(receiver.take.remote(ref))
    say("SAY", json.dumps(ray.get(receiver.place.remote())))
""")
    )
    # The inode of the mapped memory, and the offset in it.
    assert first is not None and first == second


@pytest.mark.case("E6")
def test_object_reaches_an_actor_on_another_node_from_either_side(driver):
    """Two nodes of Ray on one machine count as two machines, because nobody knows better."""
    there_and_back, many, killed, left = lines(
        driver(
            """
here, there = [Actor.options(resources={place: 1}).remote() for place in ("here", "there")]
for source, receiver in [(here, there), (there, here), (there, there)]:
    assert ray.get(receiver.take.remote(source.make.remote("one"))) == [["torch.float32", [1000], list(range(1000))]]
say("SAY", json.dumps("same"))
say("SAY", json.dumps([tensor[1] for tensor in ray.get(there.take.remote(here.make.remote("many")))]))
# What was put on the driver's node outlives its actor for those elsewhere, too.
ref = here.make.remote("one")
ray.wait([ref])
kill(here)
say("SAY", json.dumps(len(ray.get(there.take.remote(ref))[0][2])))
del ref
say("SAY", json.dumps(len(names()) <= 1))
ray.shutdown()
cluster.shutdown()
""",
            "two",
        )
    )
    assert (there_and_back, killed, left) == ("same", 1000, True)
    assert many == [[2, 3], [4], [4, 3], [4, 2, 3], [0, 3], [2]]
