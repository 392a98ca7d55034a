"""The device shows what a GPU would: late copies, tensors of the host, waiting. Not collected with the suite."""

from pathlib import Path
from unittest import mock

import face
import pytest
import torch
from training.test_device_runs import CACHED, FREEZES, NAME, PICTURES, check, closed_world, train

__all__ = ["closed_world"]
OPTIONS = (*PICTURES, "precision=float64", *CACHED)


def test_features_come_while_the_device_computes(tmp_path: Path) -> None:
    before = face.device.num_late()
    train(OPTIONS, NAME, tmp_path)
    assert face.device.num_late() > before


def test_features_that_nobody_waits_for_are_other_features(tmp_path: Path) -> None:
    """The mutation: a stream goes on without waiting for the event of an upload."""
    expected, _ = train(OPTIONS, "cpu", tmp_path / "cpu")
    with mock.patch.object(face.Stream, "wait_event", return_value=None):
        losses, _ = train(OPTIONS, NAME, tmp_path / "device")
    assert losses != pytest.approx(expected, rel=0, abs=1e-10)


def test_the_device_draws_as_the_cpu_whose_generator_it_has(tmp_path: Path) -> None:
    check((*PICTURES, "precision=float64", *FREEZES, "randomness=device"), tmp_path)


def test_a_tensor_of_the_host_does_not_mix_with_the_device() -> None:
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.ones(2, device=NAME) + torch.ones(2)
    face.device.refuse_waiting(True)
    try:
        with pytest.raises(RuntimeError, match="the host waits"):
            torch.ones(2, device=NAME).sum().item()
    finally:
        face.device.refuse_waiting(False)
