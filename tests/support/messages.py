"""Tensors that go between the stages of a pipeline."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch.distributed as dist

from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime import pipeline_stage
from pipetransformer.runtime.pipeline_stage import EarlyReceivingStage, TracedStage
from support.cases import Case
from support.trainings import Plans, Trace, build, go, ids_of, rate, train_elastic


def num_received(case: Case, plan: Plan, folder: str) -> int:
    """Trains a step; returns how many outputs of the stage below and gradients of that above this rank receives."""
    runtime, loader, groups = build(case, folder)
    go(runtime, loader, plan)
    with mock.patch.object(dist, "P2POp", wraps=dist.P2POp) as made:
        runtime.train_step(loader, ids_of(case, 0), 0, rate(0))
    loader.close()
    groups.close()
    return sum(call.args[0] is dist.irecv for call in made.call_args_list)


def num_asked_early(case: Case, plan: Plan, folder: str) -> tuple[int, int]:
    """Trains a step; returns how many messages this rank asks for early: before its first pass, and altogether."""
    runtime, loader, groups = build(case, folder)
    go(runtime, loader, plan)
    forward, receive = TracedStage.forward_one_chunk, pipeline_stage._receive
    num_asked, num_first = 0, list[int]()

    def ask(operations: Sequence[dist.P2POp], tag: int) -> list[dist.Work]:
        nonlocal num_asked
        num_asked += len(operations)
        return receive(operations, tag)

    def run(self: TracedStage, index: int, *args: Any, **options: Any) -> Any:
        num_first.append(num_asked)
        return forward(self, index, *args, **options)

    with (
        mock.patch.object(pipeline_stage, "_receive", ask),
        mock.patch.object(TracedStage, "forward_one_chunk", run),
    ):
        runtime.train_step(loader, ids_of(case, 0), 0, rate(0))
    loader.close()
    groups.close()
    return num_first[0], num_asked


def train_with_other_messages(case: Case, plans: Plans, folder: str) -> Trace:
    """The second rank asks for the micro-batches from the last one to the first."""
    tag = EarlyReceivingStage._tag

    def reversed_there(self: EarlyReceivingStage, receiver: int, microbatch: int, is_gradient: bool = False) -> int:
        index = self._num_microbatches - 1 - microbatch if dist.get_rank() == 1 else microbatch
        return tag(self, receiver, index, is_gradient)

    with mock.patch.object(EarlyReceivingStage, "_tag", reversed_there):
        return train_elastic(case, plans, folder)
