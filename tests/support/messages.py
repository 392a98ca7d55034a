"""Tensors that go between the stages of a pipeline."""

from unittest import mock

import torch.distributed as dist

from pipetransformer.autopipe.plan import Plan
from support.cases import Case
from support.trainings import build, go, ids_of, rate


def num_received(case: Case, plan: Plan, folder: str) -> int:
    """Trains a step; returns how many outputs of the stage below and gradients of that above this rank receives."""
    runtime, loader, groups = build(case, folder)
    go(runtime, loader, plan)
    with mock.patch.object(dist, "P2POp", wraps=dist.P2POp) as made:
        runtime.train_step(loader, ids_of(case, 0), 0, rate(0))
    loader.cache_session.release()
    loader.close()
    groups.close()
    return sum(call.args[0] is dist.irecv for call in made.call_args_list)
