"""Trainings whose optimizer runs torch's fused kernels, or the plain ones of optimizers that have no others."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipetransformer.optim import fused
from pipetransformer.runtime.device_update import NormVerdict
from support.cases import Case
from support.guarding import Guarded, train_guarded
from support.mixed import Step, steps_with_overflow
from support.observations import one_step
from support.trainings import Plans, Trace, build, go, train_elastic


@contextmanager
def plain_kernels() -> Iterator[None]:
    with mock.patch.object(fused, "DEVICES", frozenset()):
        yield


def train_plain(case: Case, plans: Plans, folder: str) -> Trace:
    with plain_kernels():
        return train_elastic(case, plans, folder)


def overflow_plain(case: Case, plans: Plans, folder: str, ranks: dict[int, int]) -> list[Step]:
    with plain_kernels():
        return steps_with_overflow(case, plans, folder, ranks)


def guard_plain(*arguments: Any) -> Guarded:
    """The host judges the norms before the update."""
    with plain_kernels():
        return train_guarded(*arguments)


def guard_without_dropping(*arguments: Any) -> Guarded:
    """The device takes no notice of the flag."""
    with mock.patch.object(NormVerdict, "dropping", return_value=nullcontext()):
        return train_guarded(*arguments)


class _Scalars(TorchDispatchMode):
    """Counts what Python makes a number of: ``item``, ``float``, ``bool`` and the like."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads_of_steps(case: Case, plans: Plans, folder: str) -> list[int]:
    """How often the host takes numbers from a tensor in each step, each of which would wait for a GPU."""
    reads, lists, own = [], [0], torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        lists[0] += 1
        return own(tensor)

    with mock.patch.object(torch.Tensor, "tolist", counted):
        runtime, loader, groups = build(case, folder)
        for step in range(case.num_steps):
            if step in plans:
                go(runtime, loader, plans[step], step)
            lists[0] = 0
            with _Scalars() as scalars:
                one_step(runtime, loader, case, step)
            reads.append(lists[0] + scalars.count)
        loader.close()
        groups.close()
    return reads


def steps_without_waiting(case: Case, plans: Plans, folder: str) -> int:
    """Trains on a GPU that refuses every copy or number that the host would wait for; returns the steps.

    The norms, which the host does wait for, come by an event. The first step under a plan copies what it keeps.
    """
    runtime, loader, groups = build(case, folder)
    for step in range(case.num_steps):
        if step in plans:
            go(runtime, loader, plans[step], step)
            loader.cache_session.release()
        else:
            torch.cuda.set_sync_debug_mode("error")
        try:
            result = one_step(runtime, loader, case, step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert result.loss == result.loss
    loader.close()
    groups.close()
    return case.num_steps
