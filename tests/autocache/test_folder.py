"""A node's folder comes and goes with the run, and takes nothing of others along."""

from pathlib import Path

import pytest

from pipetransformer.autocache.folder import node_folder


def no_barrier() -> None:
    pass


def write_store(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train-level1.features").touch()


def test_the_parents_that_were_made_go_too(tmp_path: Path) -> None:
    with node_folder(tmp_path / "outputs" / "run" / "cache" / "node1", no_barrier) as folder:
        write_store(folder)
    assert list(tmp_path.iterdir()) == []


def test_the_last_node_takes_a_shared_parent_back(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with node_folder(cache / "node0", no_barrier) as first:
        with node_folder(cache / "node1", no_barrier) as second:
            write_store(first)
            write_store(second)
        assert list(cache.iterdir()) == [first]
    assert list(tmp_path.iterdir()) == []


def test_a_parent_that_was_there_stays(tmp_path: Path) -> None:
    with node_folder(tmp_path / "node0", no_barrier) as folder:
        write_store(folder)
    assert tmp_path.is_dir()


def test_a_run_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with node_folder(tmp_path / "node0", no_barrier) as folder:
            write_store(folder)
            raise RuntimeError("a worker failed")

    with pytest.raises(RuntimeError, match="a worker failed"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_every_process_looks_before_any_makes_a_parent(tmp_path: Path) -> None:
    def others_go_ahead() -> None:
        write_store(tmp_path / "cache" / "node1")

    with node_folder(tmp_path / "cache" / "node0", others_go_ahead):
        pass
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["node1"], "it is not ours to remove"
