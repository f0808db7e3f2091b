"""A served embedded model inside the test's own process, for what needs no second one."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from podium.server.serve import _maker
from podium.server.served import Served
from podium.settings.tables import Settings
from tests.server.serving import Running, serving


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = Settings.from_dict({"model": {"device": "cpu"}})
    root = tmp_path / "root"
    root.mkdir()
    made = Served(_maker(settings, None, None), root)
    asyncio.run(made.start())
    yield made
    made.close()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server in a process of its own, at a port, with a token; it has to outlive all that is done to it."""
    with serving(tmp_path_factory.mktemp("server"), "--model.device=cpu", tcp=True) as running:
        yield running
