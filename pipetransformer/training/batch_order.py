"""The batches of a run by their steps: the present one, and those that come before the next evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import numpy as np

from pipetransformer.autodp.sampler import SampleOrder, batch_ids
from pipetransformer.planning.timeline import Timeline
from pipetransformer.training.loader import BatchLoader, ComingBatch


class BatchOrder:
    """Tells which samples a step takes, and announces those of the steps after it.

    Args:
        samples: Their order in each epoch.
        timeline: Steps of the run.
        loader: Of the training split, which is set to the epoch of the present step.
    """

    def __init__(self, samples: SampleOrder, timeline: Timeline, loader: BatchLoader) -> None:
        self._samples, self._timeline, self._loader = samples, timeline, loader
        self._epoch: tuple[int, np.ndarray] | None = None  # that the loader is set to, with its order (N,)

    def ids(self, step: int) -> np.ndarray:
        """Returns the samples of a step's global batch, shape (B,); sets the loader to its epoch."""
        epoch, index = divmod(step, self._timeline.steps_per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = epoch, self._samples.epoch(epoch)
            self._loader.set_epoch(epoch)
        return batch_ids(self._epoch[1], index, self._samples.batch_size)

    def size(self, ids: np.ndarray) -> float:
        """Returns the tokens to which a global batch is padded, over those of a typical one.

        It is 1 where all samples are equally long, or share rows.
        """
        num_tokens, shares_rows = self._loader.padded(ids), self._loader.split.row_length is not None
        return 1.0 if num_tokens is None or shares_rows else num_tokens / self._typical_tokens

    @cached_property
    def _typical_tokens(self) -> int:
        num_tokens = self._loader.padded(self._samples.typical(self._loader.split.lengths))
        assert num_tokens is not None, "samples differ in length"
        return num_tokens

    def coming(self, step: int, evaluates_after: Callable[[int], bool]) -> Iterator[ComingBatch]:
        """Yields the batches from a step to the next evaluation, which has its own read ahead."""
        for each, ids in enumerate(self._samples.batches(step, self._timeline.num_steps), step):
            yield ComingBatch(ids, each, each // self._timeline.steps_per_epoch)
            if evaluates_after(each + 1):
                return

    def forget(self) -> None:
        """Sets the loader anew with the next batch, where the run goes on from another step."""
        self._epoch = None
