"""What tests of every room share."""

import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

gc.disable()  # until all tests are collected: it takes a fifth of the time of imports and finds nothing

import pytest
from hypothesis import HealthCheck, settings
from support import thinning
from support.pool import Pool

# Threads that wait for each other spin, and take the cores from the ranks of the test beside this one. Torch, which the
# process that shares the tests out to workers need not wait for, reads it when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
# of a process that it starts, and of gloo's, no thread takes the core of another: see runtime/groups.py
if sys.platform == "linux":
    with suppress(OSError):  # a sandbox may refuse it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
# hundreds of processes start here: each would compile the whole package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

TABLES = tempfile.TemporaryDirectory(prefix="tables-")  # what is converted, also in started processes; gone at the end
os.environ["HF_DATASETS_CACHE"] = TABLES.name

SLOW = [HealthCheck.too_slow]
settings.register_profile("patient", deadline=None, suppress_health_check=SLOW)  # time is the machine's affair
settings.load_profile("patient")

# A slow machine is given so many minutes; after that only the first row of each test runs. By default all of them do.
MINUTES, STARTED_S = float(os.environ.get("SUITE_MINUTES", "inf")), time.monotonic()
_begun: set[str] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leaves out further rows of a test that has run when the time is up, and says so."""
    test = item.nodeid.partition("[")[0]  # its rows are in one file, which one worker runs
    is_row = test in _begun
    _begun.add(test)
    if is_row and time.monotonic() - STARTED_S > 60 * MINUTES:
        pytest.skip(f"one row of this test has run, and SUITE_MINUTES={MINUTES:g} are over")


def pytest_addoption(parser: pytest.Parser) -> None:
    thinning.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    for marker in thinning.MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What starts commands comes first: these files take longest, and two workers share the files out in order."""
    thinning.thin(config, items)
    items.sort(key=lambda item: item.path.parent.name not in ("tests", "experiments"))


def pytest_collection_finish() -> None:
    """Leaves libraries and tests, which stay, out of every collection from here on."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Lets libraries tidy up what they made."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Worker processes that play the ranks of a world."""
    pool = Pool(tmp_path_factory.mktemp("stores"))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def passing() -> Iterator[Path]:
    """A folder for temporary files whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="session")
def bert_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the configuration of a tiny BERT."""
    from support.cases import write_config

    return write_config(tmp_path_factory.mktemp("bert"))
