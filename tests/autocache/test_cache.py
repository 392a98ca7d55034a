"""Levels: filled once, each computed from the one below."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from pipetransformer.autocache.cache import AutoCache, Source

LENGTHS = np.array([3, 1, 4, 2, 5])


def make_cache(folder: Path, worker: int = 0, num_workers: int = 1) -> AutoCache:
    return AutoCache(folder, 2, torch.float64, worker, num_workers, barrier=lambda: None)


def make_source(reads: list[int]) -> Source:
    def read(ids: np.ndarray, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
        reads.extend(ids.tolist())
        return torch.from_numpy(ids)[:, None, None].expand(-1, num_tokens, 2).double(), {}

    return Source("train", LENGTHS, read)


def test_a_level_is_computed_from_the_level_below_it(tmp_path: Path) -> None:
    cache, source = make_cache(tmp_path), make_source([])
    ids = np.arange(5)
    cache.advance(1, [(source, ids)], lambda x, _: x + 10, batch_size=2)
    cache.advance(3, [(source, ids)], lambda x, _: x * 2, batch_size=2)
    assert cache.level == 3
    assert cache.read(source, np.array([4]), 5).unique().tolist() == [(4 + 10) * 2]


def test_only_wanted_samples_are_computed(tmp_path: Path) -> None:
    reads: list[int] = []
    cache, source = make_cache(tmp_path), make_source(reads)
    assert cache.advance(2, [(source, np.array([0, 3]))], lambda x, _: x, batch_size=8) == 2
    assert sorted(reads) == [0, 3]


def test_workers_share_the_samples(tmp_path: Path) -> None:
    reads: list[list[int]] = [[], []]
    for worker in (1, 0):
        make_cache(tmp_path, worker, 2).advance(1, [(make_source(reads[worker]), np.arange(5))], lambda x, _: x, 4)
    assert sorted(reads[0] + reads[1]) == [0, 1, 2, 3, 4]
    assert abs(len(reads[0]) - len(reads[1])) <= 1


def test_the_old_level_is_given_back(tmp_path: Path) -> None:
    cache, source = make_cache(tmp_path), make_source([])
    for level in (1, 2):
        cache.advance(level, [(source, np.arange(5))], lambda x, _: x, batch_size=8)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train-level2.features", "train-level2.valid"]
    cache.delete()
    assert list(tmp_path.iterdir()) == []


def test_it_does_not_go_back(tmp_path: Path) -> None:
    cache, source = make_cache(tmp_path), make_source([])
    cache.advance(2, [(source, np.arange(5))], lambda x, _: x, batch_size=8)
    with pytest.raises(AssertionError, match="cannot advance to 1"):
        cache.advance(1, [(source, np.arange(5))], lambda x, _: x, batch_size=8)
