"""A run that finds a store locked waits for it, shares it, or keeps its own, and says which and because of whom."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.caches import OURS
from support.jobs import TINY, loaded

from pipetransformer.autocache.communicator import SingleProcess
from pipetransformer.autocache.persistent import StoreDir, lock_store_dir
from pipetransformer.autocache.store_lock import is_locked
from pipetransformer.report.reporter import Reporter
from pipetransformer.training import kept_stores
from pipetransformer.training.kept_stores import KeptStores, lock_stores, stored_features

PREFIX = (*TINY, "freeze=prefix", "freeze.num_blocks=1")
FINGERPRINTS = (OURS, replace(OURS, split_name="dev"))
HOLD = f"""
import sys
from pathlib import Path
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.persistent import lock_store_dir
with lock_store_dir(Path(sys.argv[1]), {OURS!r}, "the first", 0, sys.argv[2]):
    print("ready", flush=True)
    sys.stdin.read()
"""


class Told(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def write(self, event: Any, **values: Any) -> None:
        self.messages.append(values["message"])


def lock(root: Path, closing: ExitStack, *options: str, told: Told | None = None) -> KeptStores:
    config = loaded(*PREFIX, f"cache.path={root}", *options)
    return lock_stores(config, FINGERPRINTS, Path("second"), closing, SingleProcess(), told)  # type: ignore[arg-type]


@contextmanager
def first_run(root: Path, *options: str) -> Iterator[StoreDir]:
    """Another run that fills the store of the training samples."""
    features = stored_features(loaded(*PREFIX, *options))
    with lock_store_dir(root, OURS, "the first", 0, features) as store_dir:
        yield store_dir


def test_all_stores_are_locked_and_given_back(tmp_path: Path) -> None:
    with ExitStack() as closing:
        kept = lock(tmp_path, closing)
        assert sorted(kept.folders) == ["dev", "train"]
        assert not any(each.is_shared for each in kept.locks.values())
        assert all(map(is_locked, kept.folders.values()))
    assert not any(map(is_locked, kept.folders.values()))


def test_a_run_waits_for_the_one_that_fills_and_then_reads_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = Told()
    with first_run(tmp_path) as first, ExitStack() as closing:
        monkeypatch.setattr(kept_stores, "_pause", first.lock.share)
        kept = lock(tmp_path, closing, told=told)
        assert {name: each.is_shared for name, each in kept.locks.items()} == {"train": True, "dev": False}
        assert not kept.notes
    waits, shares = told.messages
    assert waits.startswith("waits for the store that the first (process ")
    assert shares.startswith(f"shares the store {kept.folders['train']} with the first (process ")


def test_a_waiting_run_goes_on_with_what_a_killed_one_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), str(stored_features(loaded(*PREFIX)))]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"

        def kill() -> None:
            process.kill()
            process.wait()

        monkeypatch.setattr(kept_stores, "_pause", kill)
        with ExitStack() as closing:
            kept = lock(tmp_path, closing)
            assert len(kept.locks) == 2
            assert not any(each.is_shared for each in kept.locks.values())


def test_a_wait_has_an_end_and_says_for_whom_it_was(tmp_path: Path) -> None:
    with first_run(tmp_path), ExitStack() as closing:
        kept = lock(tmp_path, closing, "cache.wait_s=0")
        assert not is_locked(next(tmp_path.glob("*/node0/dev"))), "nothing stays locked"
    (note,) = kept.notes
    assert note.startswith("the cache is kept for this run only: ")
    assert "in use by the first (process " in note
    assert note.endswith("(it was not filled within cache.wait_s=0)")
    assert not kept.folders


def test_a_signal_ends_a_wait_and_leaves_nothing_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(kept_stores, "_pause", interrupt)
    with ExitStack() as closing, first_run(tmp_path), pytest.raises(KeyboardInterrupt):
        lock(tmp_path, closing)
    assert not any(map(is_locked, tmp_path.glob("*/node0/*")))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((*PREFIX, "seed=2"), PREFIX),  # other weights, since they are drawn
        ((*PREFIX, "freeze.num_blocks=2"), PREFIX),
        (PREFIX, (*TINY, "freeze=pipetransformer")),  # may store a higher level later
        ((*TINY, "freeze=pipetransformer"), PREFIX),
    ],
    ids=["other weights", "another level", "does not share", "is not shared"],
)
def test_nobody_waits_for_features_that_are_of_no_use(
    first: tuple[str, ...], second: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_stores, "_pause", None)
    features, config = stored_features(loaded(*first)), loaded(*second, f"cache.path={tmp_path}")
    with lock_store_dir(tmp_path, OURS, "the first", 0, features), ExitStack() as closing:
        kept = lock_stores(config, FINGERPRINTS, Path("second"), closing, SingleProcess())  # type: ignore[arg-type]
    (note,) = kept.notes
    assert "in use by the first (process " in note
    assert (f"which stores {features}" in note) == (features is not None)


def test_weights_that_are_drawn_are_those_of_their_seed() -> None:
    assert stored_features(loaded(*PREFIX, "seed=1")) != stored_features(loaded(*PREFIX, "seed=2"))
    published = ("model=vit", "freeze=prefix", "freeze.num_blocks=1", "optim.lr=1")
    assert stored_features(loaded(*published, "seed=1")) == stored_features(loaded(*published, "seed=2"))
    adapters = (*published, "peft=lora")
    assert stored_features(loaded(*adapters, "seed=1")) != stored_features(loaded(*adapters, "seed=2"))
