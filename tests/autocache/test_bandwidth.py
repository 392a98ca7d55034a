"""Measuring a tier takes no more of it than the cache may."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from planning.test_planner import planner

from pipetransformer.autocache import bandwidth
from pipetransformer.autocache.bandwidth import NUM_BYTES, passes_to_pay_back, read_seconds, read_times
from pipetransformer.autocache.buffer import SharedBuffer
from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autopipe.limit import fill_seconds

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
    lines = read_times(FORMAT, 8, {"memory": num_bytes, "disk": num_bytes}, tmp_path / "not there", share=4)
    assert all(0 < each.at(SAMPLE_BYTES) / SAMPLE_BYTES < 1e-3 for each in lines.values())
    assert len(taken) == 2
    assert all(each <= min(num_bytes, 1.1 * NUM_BYTES) for each in taken)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("share", "fixed_s"),
    [(4, 0.25), (NUM_BYTES // SAMPLE_BYTES // 8, 0.0), (10**6, 0.0)],
    ids=["few samples", "as many as in a larger batch", "more than are measured"],
)
def test_what_reading_a_batch_takes_besides_its_bytes_is_told_by_batches_of_few_samples(
    share: int, fixed_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "_seconds", lambda _, ids, out: 0.25 + out.nbytes * 1e-6)
    (line,) = read_times(FORMAT, 8, {"memory": 2**40}, tmp_path, share).values()
    assert line.fixed_s == pytest.approx(fixed_s)
    assert line.per_sample_s == pytest.approx(1e-6 + (0.25 - fixed_s) / (NUM_BYTES / 4), rel=0.01)


def test_a_fill_pays_back_by_what_each_later_pass_saves() -> None:
    layers = tuple(replace(layer, output_bytes=64) for layer in planner().profile.layers)
    measured = replace(planner().profile, layers=layers, cache_read_s_per_byte=0.0)
    forward_s = fill_seconds(measured, 0, 4, 1)
    assert passes_to_pay_back(measured, 0, 4) == 1, "reading takes no time, so that one pass saves what it took"
    half = replace(measured, cache_read_s_per_byte=forward_s / 2 / measured.layers[4].output_bytes)
    assert passes_to_pay_back(half, 0, 4) == pytest.approx(2)
    assert passes_to_pay_back(half, 0, 4, missing=0.25) == pytest.approx(0.5)
    above_s = fill_seconds(half, 2, 4, 1)
    assert passes_to_pay_back(half, 2, 4) == pytest.approx(
        above_s / (above_s + read_seconds(half, 2) - read_seconds(half, 4))
    )
    slow = replace(measured, cache_read_s_per_byte=2 * forward_s / measured.layers[4].output_bytes)
    assert passes_to_pay_back(slow, 0, 4) is None
