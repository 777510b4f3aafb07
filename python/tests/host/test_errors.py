"""Errors: their classes, and their entries in docs/troubleshooting.md."""

import importlib
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import partywall as pw
from partywall import _errors

PAGE = Path(__file__).parents[3] / "docs/troubleshooting.md"


def test_errors_are_the_built_in_ones_too(domain):
    with pytest.raises(KeyError, match="no segment, pool, topic or queue is named") as raised:
        domain.open("nothing")
    error = raised.value
    assert isinstance(error, pw.Error) and isinstance(error, pw.NameNotFound)
    assert (error.anchor, error.cuda_error) == ("not-found", None)
    assert error.advice and error.advice in str(error)
    with pytest.raises(ValueError, match="name"):
        domain.create("no/../name", 1, "uint8", device="host")
    with pytest.raises(FileNotFoundError):
        domain.put_file("/no/such/file", "x", device="host")
    with pytest.raises(ValueError, match="exceeds"):
        domain.create("x", 1 << 61, "float32", device="host")
    with pytest.raises(TimeoutError):
        domain.open("nothing", timeout=0.01)
    with pytest.raises(ValueError, match="timeout"):
        domain.open("nothing", timeout=-1)
    with pytest.raises(ConnectionError):
        pw.connect(socket=domain.socket + ".other", start=False)


def test_other_kinds_name_the_call_that_takes_them(domain):
    pool = domain.pool("pool", blocks=1, block_bytes=16, device="host")
    line = domain.timeline("line")
    with pytest.raises(TypeError, match=r'"pool" is a pool, not a segment; open it with d\.pool\("pool"\)'):
        domain.open("pool")
    with pytest.raises(pw.NameNotFound, match=r'there is a timeline of that name; open it with d\.timeline\("line"\)'):
        domain.open("line")
    pool.close()
    line.close()


def test_error_for_a_name_says_how_the_name_ended(domain):
    domain.put("x", np.zeros(1), device="host").close()
    told = rf"x@1 ended with its owner, pid {os.getpid()} \(\w+.*\), [\d.]+ m?s ago"
    with pytest.raises(pw.NameNotFound, match=told) as raised:
        domain.open("x")
    assert "kept=True" in raised.value.advice


@pytest.mark.parametrize(
    ("array", "what", "advice"),
    [
        (np.array(["a"]), "strings", "encode"),
        (np.array(["2026-01-01"], "M8[s]"), "dates and times", "int64"),
        (np.array([None]), "Python objects", "astype"),
    ],
)
def test_arrays_of_no_numbers_say_what_to_give_instead(domain, array, what, advice):
    with pytest.raises(pw.BadSource, match=f"its elements are {what}") as raised:
        domain.put("x", array, device="host")
    assert advice in raised.value.advice and "DLPack" not in str(raised.value)


# Holds 257.
def test_advice_fits_the_call(domain):
    frames = domain.topic("frames", dtype="uint8", shape=(3,), device="host")
    with pytest.raises(pw.NameExists, match="it is a topic") as raised:
        domain.put("frames", np.zeros(3), device="host")
    assert 'choose another name, or open it with d.topic("frames")' in raised.value.advice
    with frames.publisher() as publisher, publisher.loan((3,)) as loan:
        with pytest.raises(ValueError, match="a header of 300 bytes is too long.*the limit is 256 bytes"):
            loan.header = bytes(300)
    for wrong in (3, (1,), (1, 2, 3), "ab", {0: 1, 1: 2}):
        with pytest.raises(pw.WrongQueue, match="is not the number of blocks and the bytes of one") as raised:
            domain.queue("work", inputs=wrong)
        assert "inputs=(16, 4096)" in raised.value.advice
    with pytest.raises(pw.WrongQueue, match="outputs="):
        domain.queue("work", outputs=3)
    with pytest.raises(pw.WrongTopic) as raised:
        domain.topic("new", max_bytes=0, device="host")
    assert "dtype= and shape=, or max_bytes=" in raised.value.advice
    frames.close()


# Holds 257.
def test_misspelt_words_are_suggested(domain):
    with domain.topic("frames", dtype="uint8", shape=(3,), device="host") as frames:
        with pytest.raises(ValueError, match='did you mean "latest"'):
            frames.subscriber("lates")
    with pytest.raises(ValueError, match='did you mean "float32"'):
        domain.create("x", 1, "flaot32", device="host")
    with pytest.raises(ValueError, match='did you mean "host"'):
        domain.create("x", 1, "float32", device="hots")
    with domain.put("weights", {"bias": np.zeros(3)}, device="host") as weights:
        with pytest.raises(pw.TensorNotFound) as raised:
            weights["bais"]
        assert 'did you mean "bias"?' in raised.value.advice


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_traceback_names_the_entry(domain):
    with pytest.raises(pw.NameNotFound) as raised:
        domain.open("nothing")
    assert raised.value.__notes__ == ["more: partywall explain not-found"]
    assert pickle.loads(pickle.dumps(raised.value)).__notes__ == raised.value.__notes__


def test_package_exports_every_error_class_and_nothing_else_of_their_module():
    classes = {name for name, value in vars(_errors).items() if isinstance(value, type)}
    assert {"Error", "NameNotFound", "WriterDied"} <= classes <= set(pw.__all__)
    assert all(getattr(pw, name) is getattr(_errors, name) for name in classes)
    assert len(pw.__all__) == len(set(pw.__all__)) and not hasattr(pw, "builtins")


def test_every_error_class_goes_through_a_pickle():
    classes = [value for value in vars(pw).values() if isinstance(value, type) and issubclass(value, pw.Error)]
    assert len(classes) > 20
    for kind in classes:
        error = pickle.loads(pickle.dumps(kind("what", "do this", "anchor", 7)))
        assert type(error) is kind
        assert (str(error), error.advice, error.anchor, error.cuda_error) == ("what; do this", "do this", "anchor", 7)


def test_every_error_of_the_package_is_quoted_by_its_entry(domain):
    segment, timeline = domain.put("x", np.zeros(3)), domain.timeline("t")
    failing = [
        lambda: segment.__dlpack__(copy=True),
        lambda: segment.__dlpack__(dl_device=(2, 0)),
        lambda: domain.put("y", 3),
        lambda: domain.put("y", np.array([None])),
        lambda: (segment.close(), segment["data"]),
        lambda: timeline.signal(1),
    ]
    for fail in failing:
        with pytest.raises(pw.Error) as raised:
            fail()
        assert_quoted(raised.value)
    timeline.close()


def test_text_that_is_not_utf8_is_refused_with_its_use(domain, tmp_path):
    lone = "x\ud800"
    file = tmp_path / "file"
    file.write_bytes(b"1")
    array = np.arange(3)
    segment = domain.put("x", array)
    build = domain.create("y", 3, "int64", "host")
    queue = domain.queue("q", tasks=4)
    calls: dict[type[pw.Error], list[Callable[[], object]]] = {
        pw.BadName: [
            lambda: domain.open(lone),
            lambda: domain.open_or_build(lone, lambda claim: claim.put(array)),
            lambda: domain.descriptors(lone),
            lambda: domain.create(lone, 3, "int64"),
            lambda: domain.put(lone, array),
            lambda: domain.put_file(file, lone),
            lambda: domain.timeline(lone),
            lambda: domain.semaphore(lone, 1),
            lambda: domain.pool(lone, blocks=1, block_bytes=1),
            lambda: domain.topic(lone, max_bytes=1),
            lambda: domain.queue(lone, tasks=1),
            lambda: domain.exists(lone),
            lambda: domain.rm(lone),
            lambda: segment.to("host", name=lone),
            lambda: queue.attach(lone),
            lambda: pw.connect(lone, start=False),
        ],
        pw.BadTensor: [
            lambda: domain.put("z", {lone: array}),
            lambda: domain.create_many("z", {lone: (3, "int64")}),
            lambda: domain.create("z", 3, "int64", metadata={lone: "1"}),
            lambda: domain.put("z", array, metadata={"1": lone}),
        ],
        pw.TensorNotFound: [lambda: segment[lone], lambda: build[lone]],
        pw.BadTask: [
            lambda: queue.submit(lone),
            lambda: queue.submit_all([pw.Task("ok"), pw.Task(lone)]),
        ],
        pw.BadPattern: [lambda: domain.watch(lone)],
    }
    for kind, refused in calls.items():
        for call in refused:
            with pytest.raises(kind, match="surrogate") as raised:
                call()
            assert raised.value.anchor == "not-utf-8" and str(raised.value).isascii()
            assert_quoted(raised.value)
    assert [name.name for name in domain.ls()] == ["q", "x"]
    for handle in (segment, build, queue):
        handle.close()


def assert_quoted(error: pw.Error) -> None:
    """Checks that the entry of an error in the page quotes its message."""
    _, entry = PAGE.read_text().split(f"\n### {error.anchor}\n")
    quoted = re.search("^    (.*)$", entry, re.MULTILINE)[1]
    assert re.match(re.escape(quoted).replace("…", ".*"), str(error)), error


class Dying:
    """A dataset that ends its worker."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        os._exit(3)


def test_every_error_about_models_of_torch_is_quoted_by_its_entry(domain):
    torch = pytest.importorskip("torch")
    shared = importlib.import_module("partywall.torch")
    linear = torch.nn.Linear
    shared.share_module(linear(2, 2), "model", domain=domain)
    loaded, used = linear(2, 2), linear(2, 2)
    shared.load_module(loaded, "model", domain=domain)
    view = used.weight[:1]
    domain.put("plain", np.ones(3))
    domain.put("old", np.ones(3), metadata={"partywall.torch": '{"format": 0}'})
    failing = {
        "module-mismatch": lambda: shared.load_module(linear(2, 3), "model", domain=domain),
        "no-module": lambda: shared.load_module(linear(2, 2), "plain", domain=domain),
        "module-format": lambda: shared.load_module(linear(2, 2), "old", domain=domain),
        "tensor-in-use": lambda: shared.load_module(used, "model", domain=domain),
        "unsupported-tensor": lambda: shared.share_module(linear(2, 2, device="meta"), "x", domain=domain),
        "shared-parameter": lambda: loaded.requires_grad_(),
        "loader-worker-died": lambda: list(shared.DataLoader(Dying(), num_workers=1, domain=domain)),
    }
    for anchor, fail in failing.items():
        with pytest.raises(pw.Error) as raised:
            fail()
        assert raised.value.anchor == anchor and raised.value.advice
        assert_quoted(raised.value)
    domain.put("deep", np.ones(3), metadata={"partywall.torch": "[" * 50_000})
    with pytest.raises(pw.WrongKind, match="another version"):
        shared.load_module(linear(2, 2), "deep", domain=domain)
    del view


def test_another_user_is_refused_with_a_sentence(domain):
    if os.geteuid() != 0:
        pytest.skip("only root becomes another user")
    code = (
        "import os, sys, partywall as pw\n"
        "os.setuid(65534)\n"
        "try:\n"
        "    pw.connect(socket=sys.argv[1], start=False)\n"
        "except PermissionError as error:\n"
        "    print(error)\n"
    )
    refused = subprocess.run([sys.executable, "-c", code, domain.socket], capture_output=True, text=True, check=False)
    assert refused.stdout.startswith("this process runs as user 65534, which may not use ")
    assert "it belongs to user 0; start the broker with" in refused.stdout
