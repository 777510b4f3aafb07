"""The README's programs in Python, as they stand."""

import re
from pathlib import Path

import pytest

import partywall as pw

README = Path(__file__).parents[3] / "README.md"


@pytest.mark.skipif(not README.is_file(), reason="the package alone, without the repository")
def test_the_readmes_processes_find_each_other(socket, child):
    section = README.read_text().split("\n## In Python\n")[1].split("\n## ")[0]
    first, second = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    writer = child(first, PARTYWALL_SOCKET=socket)
    with pw.connect(socket=socket) as domain:
        domain.topic("frames", timeout=60).close()
        reader = child(second, PARTYWALL_SOCKET=socket, PYTHONUNBUFFERED="1")
        assert reader.says() == "1.048576e+06"
        with domain.topic("frames") as frames:
            while frames.stats().subscribers == 0:
                pass
        writer.tell()
        assert reader.says() == "(480, 640, 3) 921600"
        writer.tell()
        assert reader.end() == writer.end() == 0
        # Once their deaths are proved.
        while domain.ls():
            pass
