"""The numbers by which the ranks of a run plan."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autopipe.profile import AffineTime
from pipetransformer.mesh import SINGLE
from pipetransformer.planning.planner import Planner
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training import planner_setup
from pipetransformer.training.cache_session import CacheSession
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.planner_setup import Measuring
from pipetransformer.training.trainer import Trainer
from support.cases import OPTIMIZERS, SEED, Case
from support.jobs import play

_num_samples, _foresee = CacheSession.num_samples, Trainer._foresee


def numbers_of_plans(overrides: tuple[str, ...], folder: Path, of_nodes: bool) -> tuple[str, list[Any]]:
    """Plays a run with measured times, whose error is returned, too.

    Args:
        of_nodes: Each rank's cache misses and reads are those of another node.
    """
    seen: list[Any] = []

    def planner(profile: Any, cluster: Any, *arguments: Any) -> Planner:
        seen.extend([repr(profile), repr(cluster)])
        return Planner(profile, cluster, *arguments)

    def figures(*_: Any) -> dict[str, Any]:
        return {"cache_read_s_per_byte": 1e-9 * (1 + dist.get_rank()), "cache_miss_rate": 0.1 + 0.01 * dist.get_rank()}

    def num_samples(session: CacheSession, step: int) -> int:
        seen.append(_num_samples(session, step))
        return seen[-1]

    def foresee(trainer: Trainer) -> dict[str, Any]:
        """Rank 0 alone tells what it foresees, and nothing is decided by it."""
        before = len(seen)
        found = _foresee(trainer)
        del seen[before:]
        return found

    patches = [
        mock.patch.object(Trainer, "_foresee", foresee),
        mock.patch.object(planner_setup, "Planner", planner),
        mock.patch.object(CacheSession, "num_samples", num_samples),
        mock.patch.object(planner_setup, "_cache_figures", figures if of_nodes else planner_setup._cache_figures),
    ]
    with ExitStack() as patched:
        for patch in patches:
            patched.enter_context(patch)
        return play(overrides, folder, made_up_times=False), seen


def reading_of_plans(
    overrides: tuple[str, ...], folder: Path, reads_ahead: bool
) -> list[tuple[AffineTime, AffineTime, float]]:
    """The time of reading in a step, without a cache and with one, and in a fill, by which a run plans, where a batch
    took 1 s and 2 s a sample, and without inputs 0.5 s and 0.25 s a sample."""
    seen: list[tuple[AffineTime, AffineTime, float]] = []

    def planner(profile: Any, *arguments: Any) -> Planner:
        seen.append((profile.read, profile.read_besides, profile.fill_read_s))
        return Planner(profile, *arguments)

    def measured(batches: tuple[Callable[[], Batch], ...], _: object) -> AffineTime:
        has_inputs = {read().inputs is not None for read in batches}
        assert len(has_inputs) == 1
        return AffineTime(1.0, 2.0) if has_inputs.pop() else AffineTime(0.5, 0.25)

    reading = mock.patch.object(planner_setup, "measure_reading", measured)
    ahead = mock.patch.object(BatchLoader, "reads_ahead", new_callable=mock.PropertyMock, return_value=reads_ahead)
    with mock.patch.object(planner_setup, "Planner", planner), reading, ahead:
        assert play(overrides, folder, made_up_times=False) == ""
    return seen


def sizes_measured(case: Case, most: int) -> list[int]:
    """Returns the samples of each batch on which a rank of this world measures the layers."""
    stack, precision = case.stack(), PRECISIONS[case.precision]
    loader = BatchLoader.uncached(case.split(), stack.hidden_shape, SEED)
    context = RankContext.create(torch.device("cpu"), precision, 60)
    about = OPTIMIZERS[case.optimizer], case.batch_size, context, 1, SampleOrder(case.num_samples, 0, case.batch_size)
    measuring = Measuring(stack, case.task.loss, loader, *about, (SINGLE,))
    with mock.patch.object(planner_setup, "MOST_OUTPUTS", most):
        return [len(batch) for batch in measuring._batches(SINGLE)]
