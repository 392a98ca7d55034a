"""Runs whose evaluations give scores that a test has made up."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from support.jobs import play


def play_with_scores(
    scores: Sequence[float], overrides: tuple[str, ...], folder: Path, damaged: str | None = None
) -> str:
    """One rank of a run whose evaluations give these accuracies in turn, over all splits.

    Args:
        damaged: File of the run folder that is emptied at the last evaluation.
    """
    coming = list(scores)

    def evaluate(*_: Any) -> dict[str, float]:
        if len(coming) == 1 and damaged is not None:
            (folder / damaged).write_bytes(b"")
        return {"accuracy": coming.pop(0)}

    with mock.patch("pipetransformer.training.evaluations.evaluate", evaluate):
        return play(overrides, folder, True)
