"""Measuring a tier takes no more of it than the cache may."""

from pathlib import Path

import pytest
import torch

from pipetransformer.autocache.bandwidth import NUM_BYTES, seconds_per_byte
from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.capacity import FeatureFormat

FORMAT = FeatureFormat(16, torch.float32)
SAMPLE_BYTES = 8 * 16 * 4


@pytest.mark.parametrize("num_bytes", [2 * SAMPLE_BYTES, 100_000, 2**40])
def test_measuring_keeps_the_budget_and_leaves_nothing(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    make = SharedBuffer.__init__

    def noted(buffer: SharedBuffer, descriptor: int, address: str, is_file: bool) -> None:
        make(buffer, descriptor, address, is_file)
        taken.append(buffer.num_bytes)

    monkeypatch.setattr(SharedBuffer, "__init__", noted)
    seconds = seconds_per_byte(FORMAT, 8, {"memory": num_bytes, "disk": num_bytes}, tmp_path / "not there")
    assert all(0 < each < 1e-3 for each in seconds.values())
    assert len(taken) == 2
    assert all(each <= min(num_bytes, 1.1 * NUM_BYTES) for each in taken)
    assert list(tmp_path.iterdir()) == []
