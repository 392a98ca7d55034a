"""What is read from a store is bit for bit what was written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipetransformer.autocache.store import FeatureStore

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12), seed=st.integers(0, 99))
def test_features_come_back_bit_for_bit(dtype: torch.dtype, lengths: list[int], seed: int, tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / f"{seed}-{len(lengths)}", np.array(lengths), 3, dtype)
    ids = np.random.default_rng(seed).permutation(len(lengths))
    longest = max(lengths)
    features = torch.randn(len(ids), longest, 3, generator=torch.Generator().manual_seed(seed)).to(dtype)
    store.write(ids, features)
    read = store.read(ids, longest)
    for row, sample in enumerate(ids):
        assert bits(read[row, : lengths[sample]]) == bits(features[row, : lengths[sample]])
        assert not read[row, lengths[sample] :].any(), "padding reads as zero"
    store.delete()


def test_another_opener_of_the_file_sees_the_same_memory(tmp_path: Path) -> None:
    lengths = np.array([2, 2])
    writer = FeatureStore(tmp_path / "level1", lengths, 4, torch.float32)
    reader = FeatureStore(tmp_path / "level1", lengths, 4, torch.float32)
    features = torch.randn(2, 2, 4)
    writer.write([0, 1], features)
    assert torch.equal(reader.read([1, 0], 2), features[[1, 0]])


def test_a_sample_that_was_never_stored_is_refused(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "level1", np.array([2, 2, 2]), 4, torch.float32)
    store.write([1], torch.ones(1, 2, 4))
    with pytest.raises(RuntimeError, match=r"no features of samples \[0, 2\]"):
        store.read([0, 1, 2], 2)


def test_padding_is_not_stored(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "level1", np.array([1, 5]), 4, torch.float32)
    assert store.num_bytes == 6 * 4 * 4


def test_delete_leaves_no_file(tmp_path: Path) -> None:
    store = FeatureStore(tmp_path / "level1", np.array([1]), 4, torch.float32)
    store.delete()
    assert list(tmp_path.iterdir()) == []
