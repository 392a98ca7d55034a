"""Each sample comes from the fastest tier that has it, in every process of the node, and is right or not found."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.stores import HIDDEN, LENGTHS, PLENTY, features_of, fill, in_other_process, make_spec, padded, write_there

from pipetransformer.autocache import store as samples
from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.store import FeatureStore

EVERYTHING = np.arange(len(LENGTHS))
HALF = 12 * (LENGTHS.sum() // 2 + 1) + 32  # bytes: rows of about half of the tokens, flags and records
PLACES = {"memory": (PLENTY, 0), "disk": (0, PLENTY), "half memory": (HALF, PLENTY), "half disk": (HALF, HALF)}


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("memory", "disk"), PLACES.values(), ids=PLACES)
def test_what_is_kept_is_read_from_wherever_it_lies(memory: int, disk: int, persistent: bool, tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, memory, disk, persistent=persistent))
    fill(store, key=1)
    kept = np.isin(EVERYTHING, np.concatenate(store.shards))
    features, found = store.read(EVERYTHING, 6, key=1)
    assert found.tolist() == kept.tolist()
    assert torch.equal(features, padded(EVERYTHING, 6, 1) * torch.from_numpy(kept)[:, None, None])
    assert store.missing_ids(EVERYTHING, key=1).tolist() == EVERYTHING[~kept].tolist()
    assert sum(store.bytes_read.values()) == LENGTHS[kept].sum() * 4 * HIDDEN
    store.close()


def test_memory_comes_first(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, HALF, PLENTY, persistent=True))
    fill(store, key=1)
    store.read(EVERYTHING, 6, key=1)
    in_memory = store._tiers["memory"].layout.num_rows * 4 * HIDDEN
    assert store.bytes_read == {"memory": in_memory, "disk": LENGTHS.sum() * 4 * HIDDEN - in_memory}
    assert 0 < in_memory < LENGTHS.sum() * 4 * HIDDEN
    store.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_shards_of_several_tiers_are_written_together(persistent: bool, tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, HALF, PLENTY, persistent=persistent))
    assert {*store.bytes_by_tier} == {"memory", "disk"}
    ids = np.concatenate(store.shards)
    store.write_all(list(enumerate(store.shards)), features_of(ids, 6, key=1), key=1)
    features, found = store.read(EVERYTHING, 6, key=1)
    assert found.all()
    assert torch.equal(features, padded(EVERYTHING, 6, 1))
    assert store.verify() == 0
    store.close()


def test_what_one_tier_has_lost_is_read_from_the_next(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, PLENTY, PLENTY, persistent=True))
    fill(store, key=1)
    store._tiers["memory"].invalidate(np.array([2, 5]))
    features, found = store.read(EVERYTHING, 6, key=1)
    assert found.all()
    assert torch.equal(features, padded(EVERYTHING, 6, 1))
    store.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_features_come_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, HALF * dtype.itemsize // 4, PLENTY, dtype=dtype))
    size = (len(LENGTHS), 6, HIDDEN * dtype.itemsize)
    bits = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8))
    for number, ids in enumerate(store.shards):
        store.write(number, ids, bits[ids].view(dtype), key=1)
    out = torch.full((len(LENGTHS), 6, HIDDEN), 7, dtype=dtype)
    features, found = store.read(EVERYTHING, 6, key=1, out=out)
    assert features is out
    assert found.all()
    real = torch.arange(6) < torch.from_numpy(LENGTHS)[:, None]
    assert torch.equal(out.view(torch.uint8), bits * real[:, :, None])
    store.close()


@pytest.mark.parametrize("at_once", [1, 200, 2**21], ids=["one at a time", "a few", "all"])
@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "int8"])
def test_a_smaller_storage_takes_less_and_comes_close(
    storage: str, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(samples, "DECODED_BYTES", at_once)
    store = FeatureStore.create(make_spec(tmp_path, dtype=torch.float64, storage=storage))
    assert store.bytes_by_tier["memory"] < LENGTHS.sum() * HIDDEN * torch.float64.itemsize
    fill(store, key=1)
    features, found = store.read(EVERYTHING, 6, key=1)
    assert found.all()
    assert torch.allclose(features, padded(EVERYTHING, 6, 1).double(), atol=0.08)
    assert not features[LENGTHS == 1, 1:].any(), "padding is zero"
    store.close()


def test_a_higher_level_takes_the_place_of_the_lower_one(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, HALF, PLENTY))
    fill(store, key=1)
    size = store.bytes_by_tier
    for number, ids in enumerate(store.shards):
        below, found = store.read(ids, 6, key=1)
        assert found.all()
        store.write(number, ids, below + 10, key=2)
        assert len(store.missing_ids(ids, key=1)) == len(ids)
    assert torch.equal(store.read(EVERYTHING, 6, key=2)[0][:, 0], padded(EVERYTHING, 6, 2)[:, 0])
    assert store.bytes_by_tier == size
    assert os.stat(store.spec.addresses["disk"]).st_size == size["disk"]
    store.close()


def test_processes_of_a_node_share_one_store(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, HALF, PLENTY))
    assert in_other_process(write_there, store.spec, 3) == store.bytes_by_tier
    features, found = store.read(EVERYTHING, 6, key=3)
    assert found.all(), "the other process has closed its side, and nothing went with it"
    assert torch.equal(features, padded(EVERYTHING, 6, 3))
    store.close()


@pytest.mark.parametrize("persistent", [False, True])
def test_nothing_is_left_but_the_file_of_a_lasting_store(persistent: bool, tmp_path: Path) -> None:
    before = set(os.listdir("/proc/self/fd"))
    store = FeatureStore.create(make_spec(tmp_path, HALF, PLENTY, persistent=persistent))
    assert os.stat(store.spec.addresses["memory"]).st_nlink == 0
    fill(store, key=1)
    FeatureStore.attach(store.spec).close()
    assert files(tmp_path) == ["train.features"] * persistent, "only what shall last has a name"
    store.close()
    assert files(tmp_path) == ["train.features"] * persistent
    assert set(os.listdir("/proc/self/fd")) == before


def files(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if path.is_file()]


def test_two_runs_in_one_folder_have_files_of_their_own(tmp_path: Path) -> None:
    first, second = (FeatureStore.create(make_spec(tmp_path, 0, PLENTY)) for _ in range(2))
    fill(first, key=1)
    fill(second, key=2)
    joined = FeatureStore.attach(first.spec)
    assert torch.equal(joined.read(EVERYTHING, 6, key=1)[0], padded(EVERYTHING, 6, 1))
    for store in (joined, second, first):
        store.close()


def test_a_lasting_store_is_found_again_and_promoted(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, HALF, PLENTY, persistent=True)
    first = FeatureStore.create(spec)
    fill(first, key=1)
    first.close()
    again = FeatureStore.reopen(spec)
    assert again.verify(key=1) == 0
    assert again.promote() == len(again._tiers["memory"].layout.ids) > 0
    assert again.verify() == 0
    features, found = again.read(EVERYTHING, 6, key=1)
    assert found.all()
    assert torch.equal(features, padded(EVERYTHING, 6, 1))
    assert again.bytes_read["memory"] > 0
    again.close()


def test_what_was_damaged_between_two_runs_is_missing_and_not_promoted(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, PLENTY, PLENTY, persistent=True)
    first = FeatureStore.create(spec)
    fill(first, key=1)
    first.close()
    with open(spec.path, "r+b") as file:
        file.write(b"\xff")
    again = FeatureStore.reopen(spec)
    damaged = again.shards[0]
    assert again.verify(range(1, 3)) == 0, "processes share the shards"
    assert again.verify(range(1)) == len(damaged)
    assert again.promote() == len(EVERYTHING) - len(damaged)
    assert sorted(again.missing_ids(EVERYTHING, key=1)) == sorted(damaged)
    again.close()


def test_a_file_of_other_features_is_not_taken_for_these(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 0, PLENTY, persistent=True, dtype=torch.bfloat16)
    first = FeatureStore.create(spec)
    fill(first, key=1)
    first.close()
    again = FeatureStore.reopen(replace(spec, dtype=torch.float16))  # of the same size
    assert again.verify() == len(EVERYTHING)
    again.close()
    with pytest.raises(ValueError, match="bytes and the store needs"):
        FeatureStore.reopen(replace(spec, dtype=torch.float32))
    assert spec.path.exists(), "it is not ours to remove"


def test_two_runs_do_not_write_one_lasting_store(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 0, PLENTY, persistent=True)
    first = FeatureStore.create(spec)
    with pytest.raises(OSError, match=r"another run uses .*train\.features"):
        FeatureStore.reopen(spec)
    first.close()
    FeatureStore.reopen(spec).close()


def test_a_process_that_outlives_the_one_that_made_the_store_keeps_it_in_use(tmp_path: Path) -> None:
    spec = make_spec(tmp_path, 0, PLENTY, persistent=True)
    first = FeatureStore.create(spec)
    others = [FeatureStore.attach(first.spec) for _ in range(2)]
    first.close()
    for other in others:
        with pytest.raises(OSError, match=r"another run uses .*train\.features"):
            FeatureStore.reopen(spec)
        other.close()
    FeatureStore.reopen(spec).close()


def test_no_room_in_memory_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> SharedBuffer:
        raise OSError(f"no room for {num_bytes}")

    monkeypatch.setattr(samples.SharedBuffer, "memory", refuse)
    open_before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="no room for"):
        FeatureStore.create(make_spec(tmp_path, PLENTY, PLENTY, persistent=True))
    assert list((tmp_path / "store").iterdir()) == []
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_without_a_budget_nothing_is_kept_and_nothing_found(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path, 0, 0))
    features, found = store.read(EVERYTHING, 6, key=1)
    assert not features.any()
    assert not found.any()
    assert store.missing_ids(EVERYTHING, key=1).tolist() == EVERYTHING.tolist()
    assert (store.shards, store.bytes_by_tier, store.promote(), store.verify()) == ((), {}, 0, 0)


def test_features_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    store = FeatureStore.create(make_spec(tmp_path))
    ids = store.shards[0]
    short = int(LENGTHS[ids].max()) - 1
    with pytest.raises(AssertionError, match="are cut off"):
        store.write(0, ids, features_of(ids, short, 1), key=1)
    store.close()
