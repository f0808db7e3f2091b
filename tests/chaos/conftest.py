"""Every chaos test's commands leave nothing behind."""

from collections.abc import Iterator

import pytest

from tests.chaos.harness import ChaosJobs, left_behind


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> ChaosJobs:
    return ChaosJobs(tmp_path_factory.mktemp("chaos"))


@pytest.fixture
def server(shared_server: ChaosJobs) -> Iterator[ChaosJobs]:
    """After each test no process of its jobs is left (G8)."""
    yield shared_server
    assert left_behind(shared_server.mark) == []
