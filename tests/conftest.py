"""What tests of every room share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import write_config
from support.pool import Pool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With pytest-xdist one worker takes all tests that need the pool, as that keeps two cores busy by itself."""
    with_pool = {item.path for item in items if "pool" in getattr(item, "fixturenames", ())}
    for item in items:
        item.add_marker(pytest.mark.xdist_group("pool" if item.path in with_pool else str(item.path)))


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Worker processes that play the ranks of a world."""
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def bert_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the configuration of a tiny BERT."""
    return write_config(tmp_path_factory.mktemp("bert"))
