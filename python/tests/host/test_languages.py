"""A topic in host memory between C++, Rust and Python: each publishes to each."""

import pytest

from ..languages import LANGUAGES, commands, exchange, needs_examples

pytestmark = needs_examples


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return commands(tmp_path_factory.mktemp("cpp"))


# Holds 375.
@pytest.mark.parametrize("to", LANGUAGES)
@pytest.mark.parametrize("by", LANGUAGES)
@pytest.mark.usefixtures("domain")
def test_frames_go_from_each_language_to_each(
    socket: str, monkeypatch: pytest.MonkeyPatch, programs: dict[str, list[str]], by: str, to: str
) -> None:
    monkeypatch.setenv("PARTYWALL_SOCKET", socket)
    exchange(programs[by], programs[to], "host")
