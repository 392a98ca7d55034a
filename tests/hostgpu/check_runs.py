"""The device shows what a GPU would: late copies, tensors of the host, waiting. Not collected with the suite."""

from pathlib import Path
from unittest import mock

import face
import pytest
import torch
from training.test_device_runs import CACHED, FREEZES, NAME, PICTURES, RUNS, train

OPTIONS = (*PICTURES, "precision=float64", *CACHED)


def test_features_that_nobody_waits_for_are_other_features(tmp_path: Path) -> None:
    """The mutation: a stream goes on without waiting for the event of an upload."""
    expected, _ = train(OPTIONS, "cpu", tmp_path / "cpu")
    with mock.patch.object(face.Stream, "wait_event", return_value=None):
        losses, _ = train(OPTIONS, NAME, tmp_path / "device")
    assert losses != pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.parametrize(
    ("options", "within"),
    [
        (("precision=float64", *RUNS["Muon"]), 1e-10),
        (("precision=float64", *FREEZES, "randomness=device"), 1e-10),
        (("precision=float64", *FREEZES, "parallel=sharded", "randomness=device"), 1e-10),
        (("precision=bfloat16", *CACHED), 1e-3),
        (("precision=float16", *CACHED), 1e-3),
    ],
    ids=str,
)
def test_kernels_and_draws_of_the_cpu_give_its_numbers(options: tuple[str, ...], within: float, tmp_path: Path) -> None:
    (expected, metrics), (losses, own) = (train((*PICTURES, *options), each, tmp_path / each) for each in ("cpu", NAME))
    assert losses == pytest.approx(expected, rel=0, abs=within)
    assert own == metrics


def test_a_tensor_of_the_host_does_not_mix_with_the_device() -> None:
    with pytest.raises(RuntimeError, match="to be on the same device"):
        torch.ones(2, device=NAME) + torch.ones(2)
    face.device.refuse_waiting(True)
    try:
        with pytest.raises(RuntimeError, match="the host waits"):
            torch.ones(2, device=NAME).sum().item()
    finally:
        face.device.refuse_waiting(False)
