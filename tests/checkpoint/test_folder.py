"""A published checkpoint is whole; retention keeps the newest and the best."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from checkpoint.test_manifest import EXAMPLE
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from torch.distributed import HashStore

from pipetransformer.checkpoint.folder import CheckpointFolder, Retention, check_files, open_checkpoints, read_file
from pipetransformer.checkpoint.manifest import MANIFEST, Manifest, layer_file, read_manifest
from pipetransformer.checkpoint.writer import CheckpointWriter
from pipetransformer.errors import DamagedCheckpoint

LAYERS = {layer: (f"blocks.{layer}.", {"weights/w": torch.full((4,), float(layer))}) for layer in range(3)}


ALL = Retention(100, 0)


def writers(folder: Path, world: int = 1, timeout_s: float = 60) -> list[CheckpointWriter]:
    found, store = CheckpointFolder(folder, "0123abcd"), HashStore()
    return [CheckpointWriter(found, rank, world, timeout_s, store.clone()) for rank in range(world)]


def write(folder: Path, step: int, metric: float | None = None) -> Path:
    (writer,) = writers(folder)
    writer.start(LAYERS, replace(EXAMPLE, step=step, layers=(), metric=metric), ALL)
    writer.wait()
    outcome = writer.take_outcome()
    assert outcome is not None
    assert outcome.path is not None, outcome.error
    return outcome.path


def contents(folder: Path) -> list[bytes]:
    """The layer files of a checkpoint, each with its digest."""
    return [read_file(folder, file) for file in read_manifest(folder).layers]


def steps(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in CheckpointFolder(folder).published()]


def test_ranks_write_one_checkpoint_together(tmp_path: Path) -> None:
    first, second = writers(tmp_path, world=2)
    first.start({0: LAYERS[0], 2: LAYERS[2]}, replace(EXAMPLE, layers=()), ALL)
    assert not steps(tmp_path), "nothing is published before all ranks are done"
    second.start({1: LAYERS[1]}, replace(EXAMPLE, layers=()), ALL)
    for writer in (first, second):
        writer.wait()
    assert second.take_outcome() is None
    assert first.take_outcome() is not None
    assert first.take_outcome() is None, "it is reported once"
    folder = tmp_path / "step-00000007"
    manifest = read_manifest(folder)
    assert [file.prefix for file in manifest.layers] == ["blocks.0.", "blocks.1.", "blocks.2."]
    assert sorted(path.name for path in folder.iterdir()) == [*map(layer_file, range(3)), MANIFEST]
    check_files(folder, manifest.layers)


def test_a_rank_may_begin_a_second_checkpoint_of_a_step_while_the_first_is_published(tmp_path: Path) -> None:
    first, second = writers(tmp_path, world=2)
    about = replace(EXAMPLE, layers=())
    with mock.patch.object(first.folder, "publish", wraps=first.folder.publish) as publish:

        def publish_late(staging: Path, step: int) -> Path:
            publish.side_effect = None
            second.start({1: LAYERS[2]}, about, ALL)  # its part of the first is written
            second.wait()
            return CheckpointFolder.publish(first.folder, staging, step)

        publish.side_effect = publish_late
        second.start({1: LAYERS[1]}, about, ALL)
        first.start({0: LAYERS[0]}, about, ALL)
        first.wait()
        assert contents(tmp_path / "step-00000007") == [save(LAYERS[layer][1]) for layer in (0, 1)]
        first.start({0: LAYERS[0]}, about, ALL)
        first.wait()
    outcome = first.take_outcome()
    assert outcome is not None
    assert outcome.path is not None, outcome.error
    assert contents(outcome.path) == [save(LAYERS[layer][1]) for layer in (0, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000007"]


def test_a_rank_that_cannot_write_tells_why_and_nothing_is_published(tmp_path: Path) -> None:
    first, second = writers(tmp_path, world=2)
    first.start({0: LAYERS[0]}, replace(EXAMPLE, layers=()), ALL)
    in_the_way = first.folder.staging(7) / layer_file(1)
    in_the_way.mkdir(parents=True)
    second.start({1: LAYERS[1]}, replace(EXAMPLE, layers=()), ALL)
    for writer in (second, first):
        writer.wait()
    outcome = first.take_outcome()
    assert outcome is not None
    assert outcome.path is None
    assert "directory" in outcome.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_for_a_file_tells_so(tmp_path: Path, rank: int) -> None:
    def saved(tensors: dict[str, torch.Tensor]) -> bytes:
        if tensors["weights/w"][0] == rank:
            raise MemoryError
        return save(tensors)

    both = writers(tmp_path, world=2)
    with mock.patch("pipetransformer.checkpoint.writer.save", saved):
        for layer, writer in enumerate(both):
            writer.start({layer: LAYERS[layer]}, replace(EXAMPLE, layers=()), ALL)
        for writer in both[::-1]:
            writer.wait()
    outcome = both[0].take_outcome()
    assert outcome is not None
    assert f"no memory of the host is left for the file of layer {rank}" in outcome.error
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_come_is_waited_for_only_so_long(tmp_path: Path) -> None:
    first, _ = writers(tmp_path, world=2, timeout_s=0.05)
    first.start({0: LAYERS[0]}, replace(EXAMPLE, layers=()), ALL)
    first.wait()
    outcome = first.take_outcome()
    assert outcome is not None
    assert "rank 1 did not write its layers" in outcome.error
    assert "within 0.05 s" in outcome.error


def test_a_rank_that_writes_late_leaves_nothing_after_the_first_has_failed(tmp_path: Path) -> None:
    first, second = writers(tmp_path, world=2)
    (first.folder.staging(7) / layer_file(0)).mkdir(parents=True)  # in the way
    first.start({0: LAYERS[0]}, replace(EXAMPLE, layers=()), ALL)
    second.start({1: LAYERS[1]}, replace(EXAMPLE, layers=()), ALL)
    for writer in (second, first):
        writer.wait()
    outcome = first.take_outcome()
    assert outcome is not None
    assert "directory" in outcome.error
    assert list(tmp_path.iterdir()) == []


def test_files_that_another_node_wrote_elsewhere_are_not_published(tmp_path: Path) -> None:
    first, second = writers(tmp_path / "here", world=2)
    second.folder = CheckpointFolder(tmp_path / "there", "0123abcd")
    for step in (7, 8):
        for layer, writer in enumerate((first, second)):
            writer.start({layer: LAYERS[layer]}, replace(EXAMPLE, step=step, layers=()), ALL)
        for writer in (second, first):
            writer.wait()
        outcome = first.take_outcome()
        assert outcome is not None
        assert "all need one run folder" in outcome.error
        assert list((tmp_path / "here").iterdir()) == []
        assert len(list((tmp_path / "there").iterdir())) == 1, "not those of all checkpoints"
    second.close(give_up=False)
    assert list((tmp_path / "there").iterdir()) == []


def test_a_run_that_has_failed_does_not_wait_for_other_ranks(tmp_path: Path) -> None:
    first, _ = writers(tmp_path, world=2)
    first.start({0: LAYERS[0]}, replace(EXAMPLE, layers=()), ALL)
    first.close(give_up=True)
    assert steps(tmp_path) == []


def test_what_a_killed_run_has_left_is_never_taken_for_a_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 1)
    left = tmp_path / ".staging-00000002-89abcdef"
    left.mkdir()
    (left / MANIFEST).write_bytes((tmp_path / "step-00000001" / MANIFEST).read_bytes())
    assert steps(tmp_path) == [1]
    CheckpointFolder(tmp_path).discard()
    assert not left.exists()


def test_a_link_or_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (tmp_path / "step-00000002").symlink_to(path)
    (tmp_path / "step-00000003").write_text("")
    assert steps(tmp_path) == [1]


@given(
    metrics=st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=8),
    keep=st.integers(1, 4),
    best=st.integers(0, 3),
    pinned=st.frozensets(st.integers(0, 7), max_size=2),
)
def test_the_newest_the_best_and_the_pinned_one_stay(
    tmp_path_factory: pytest.TempPathFactory, metrics: list[float | None], keep: int, best: int, pinned: frozenset[int]
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    for step, metric in enumerate(metrics):
        path = folder / f"step-{step:08d}"
        path.mkdir()
        (path / MANIFEST).write_bytes(replace(EXAMPLE, step=step, metric=metric).to_json())
    CheckpointFolder(folder).prune(Retention(keep, best, pinned), len(metrics) - 1)
    scored = sorted(((m, s) for s, m in enumerate(metrics) if m is not None), reverse=True)[:best]
    stays = {*range(len(metrics))[-keep:], *(step for _, step in scored)}
    assert steps(folder) == sorted(stays | (pinned & set(range(len(metrics)))))


def test_later_ones_are_removed_when_the_run_is_rolled_back(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    CheckpointFolder(tmp_path).remove_after(1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_damaged_one_counts_for_nothing_in_retention(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, step)
    (tmp_path / "step-00000003" / MANIFEST).write_bytes(b"")
    CheckpointFolder(tmp_path).prune(Retention(1, 0), 3)
    assert steps(tmp_path) == [2, 3]
    found = open_checkpoints(tmp_path)
    assert isinstance(found[0][1], DamagedCheckpoint)
    assert isinstance(found[1][1], Manifest)


def test_one_of_a_later_step_takes_no_place_of_those_that_the_run_can_go_on_from(tmp_path: Path) -> None:
    """The run has passed over that of step 9, a file of which is damaged, and goes on from that of step 4."""
    for step in (4, 6, 9):
        write(tmp_path, step)
    CheckpointFolder(tmp_path).prune(Retention(1, 0), 6)
    assert steps(tmp_path) == [6, 9]


def test_a_step_is_replaced_where_the_run_could_not_be_resumed_from_it(tmp_path: Path) -> None:
    write(tmp_path, 1, metric=0.25)
    write(tmp_path, 1, metric=0.75)
    assert read_manifest(tmp_path / "step-00000001").metric == 0.75
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize("moment", range(4))
def test_a_kill_while_a_step_is_replaced_leaves_one_that_is_whole(tmp_path: Path, moment: int) -> None:
    class Killed(BaseException):
        pass

    def until_then(do: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **options: Any) -> Any:
            if next(moments) == moment:
                raise Killed
            return do(*args, **options)

        return called

    write(tmp_path, 1, metric=0.25)
    folder = CheckpointFolder(tmp_path)
    shutil.copytree(tmp_path / "step-00000001", folder.staging(1))
    moments = count()
    with (
        mock.patch.object(shutil, "rmtree", until_then(shutil.rmtree)),
        mock.patch.object(Path, "rename", until_then(Path.rename)),
        pytest.raises(Killed),
    ):
        folder.publish(folder.staging(1), 1)
    CheckpointFolder(tmp_path).discard()
    ((path, manifest),) = open_checkpoints(tmp_path)
    assert isinstance(manifest, Manifest)
    check_files(path, manifest.layers)
    write(tmp_path, 1)
    CheckpointFolder(tmp_path).discard()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_checkpoint_is_written_also_where_an_earlier_one_cannot_be_removed(tmp_path: Path) -> None:
    write(tmp_path, 1)
    (writer,) = writers(tmp_path)
    with mock.patch.object(CheckpointFolder, "_remove", side_effect=OSError("of another user")):
        writer.start(LAYERS, replace(EXAMPLE, step=2, layers=()), Retention(1, 0))
        writer.wait()
    outcome = writer.take_outcome()
    assert outcome is not None
    assert (outcome.path, outcome.error) == (tmp_path / "step-00000002", "of another user")
    assert steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "longer", "swap"])
def test_a_file_that_is_not_what_was_written_is_found(tmp_path: Path, damage: str) -> None:
    folder = write(tmp_path, 1)
    layer, content = read_manifest(folder).layers[1], (folder / layer_file(1)).read_bytes()
    path = folder / layer.name
    changed = {
        "cut": content[:-1],
        "flip": content[:-1] + bytes([content[-1] ^ 1]),
        "longer": content + b"0",
        "swap": (folder / layer_file(2)).read_bytes(),
    }
    path.unlink() if damage == "remove" else path.write_bytes(changed[damage])
    with pytest.raises(DamagedCheckpoint, match=layer.name):
        read_file(folder, layer)
