"""One fork server for all chaos tests."""

from collections.abc import Iterator

import pytest

from tests.chaos.harness import ForkServer, fork_server, left_behind


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with fork_server(tmp_path_factory.mktemp("chaos")) as server:
        yield server


@pytest.fixture
def server(shared_server: ForkServer) -> Iterator[ForkServer]:
    """After each test no process of its jobs is left (G8)."""
    yield shared_server
    assert left_behind(shared_server.mark) == []
