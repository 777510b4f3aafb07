"""The Python programs of the README and of the page on queues, unchanged."""

import re
from pathlib import Path

import pytest

import partywall as pw

README = Path(__file__).parents[3] / "README.md"
QUEUES = README.parent / "docs/queues.md"


@pytest.mark.skipif(not README.is_file(), reason="the package alone, without the repository")
def test_the_readmes_processes_find_each_other(socket, child):
    section = README.read_text().split("\n## In Python\n")[1].split("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    writer = child(first, PARTYWALL_SOCKET=socket)
    with pw.connect(socket=socket) as domain:
        domain.topic("frames", timeout=60).close()
        reader = child(second, PARTYWALL_SOCKET=socket, PYTHONUNBUFFERED="1")
        assert reader.says() == "1.048576e+06"
        assert reader.says() == "(480, 640, 3) 921600"
        writer.tell()
        assert reader.end() == writer.end() == 0
        # The names end once the deaths are proved.
        while domain.ls():
            pass


@pytest.mark.skipif(not QUEUES.is_file(), reason="the package alone, without the repository")
def test_the_pages_worker_does_the_task_of_the_pages_submitter(socket, child):
    section = QUEUES.read_text().split("\n## In Python\n")[1].split("\n## ")[0]
    submitter, worker = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    # Connects first, so that the test's own broker is used.
    with pw.connect(socket=socket):
        child(worker, PARTYWALL_SOCKET=socket)
        submitting = child(submitter, PARTYWALL_SOCKET=socket)
        assert submitting.says() == "7.0"
        assert submitting.end() == 0
