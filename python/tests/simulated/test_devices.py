# Holds 63.
"""The default device of new memory."""

from pathlib import Path

DRIVER = Path(__file__).parent

PLACES = """
sys.path.insert(0, sys.argv[2])
import driver, threading
def places(name):
    with d.create(name + "/c", 1, "uint8") as build:
        say(build.place)
    with d.create(name + "/cuda", 1, "uint8", device="cuda") as build:
        say(build.place)
    with d.create_many(name + "/m", {"a": (1, "uint8")}) as build:
        say(build.place)
    with d.open_or_build(name + "/b", lambda claim: claim.create(1, "uint8").commit()) as made:
        say(made.place)
    with d.put_file(__import__("os").__file__, name + "/f") as put:
        say(put.place)
    with d.pool(name + "/p", blocks=1, block_bytes=1) as pool:
        say(pool.place)
    with d.topic(name + "/t", max_bytes=1) as topic:
        say(topic.place)
    with d.put(name + "/host", np.zeros(1)) as put:
        say(put.place)
d = pw.connect(socket=sys.argv[1])
with d.create("first", 1, "uint8", device="cuda:0") as first, d.create("second", 1, "uint8", device="cuda:1") as second:
    say(first.place)
    say(second.place)
places("none")
driver.use(1)
places("current")
other = threading.Thread(target=places, args=("thread",))
other.start()
other.join()
"""


def test_memory_is_made_on_the_device_that_is_current_on_the_thread(socket, child):
    started = child(PLACES, socket, str(DRIVER), SIMCUDA_DEVICES="2")
    first, second = started.says(), started.says()
    assert first != second
    for place in (first, second, first):
        assert [started.says() for _ in range(8)] == [place] * 7 + ["host"]
    assert started.end() == 0


NAMED = """
d = pw.connect(socket=sys.argv[1])
with d.topic("frames", max_bytes=8) as topic, d.pool("blocks", blocks=1, block_bytes=8) as pool:
    say(topic.place)
    say(pool.place)
"""


def test_a_name_that_is_there_is_opened_wherever_it_is(domain, child):
    topic = domain.topic("frames", max_bytes=8, device="host")
    with topic, domain.pool("blocks", blocks=1, block_bytes=8, device="host"):
        started = child(NAMED, domain.socket)
        assert [started.says(), started.says()] == ["host", "host"]
        assert started.end() == 0
