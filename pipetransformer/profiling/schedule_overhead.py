"""Measures once what a pipeline costs besides its layers and its messages: torch's bookkeeping of each pass."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from pipetransformer.profiling.timing import median_seconds
from pipetransformer.runtime.signals import broadcast_from_rank0

FEW, MANY, NUM_REPEATS = 2, 10, 5


def measure_pass(device: torch.device) -> float:
    """Seconds of a stage for the forward and backward pass of one micro-batch of next to nothing, messages included.

    Ranks 0 and 1 run a pipeline of two tiny stages with few and with many micro-batches; all ranks call it, and hear
    what rank 0 measured. Zero where there is one rank.
    """
    if dist.get_world_size() == 1:
        return 0.0
    group = dist.new_group([0, 1])
    seconds = 0.0
    if dist.get_rank() < 2:
        assert isinstance(group, ProcessGroup)
        few, many = (_step_seconds(num_microbatches, device, group) for num_microbatches in (FEW, MANY))
        seconds = max(0.0, (many - few) / (MANY - FEW))
        dist.destroy_process_group(group)
    return broadcast_from_rank0(torch.tensor(seconds, dtype=torch.float64)).item()


def _step_seconds(num_microbatches: int, device: torch.device, group: ProcessGroup) -> float:
    rank = dist.get_rank()
    number = torch.empty(1, 1, device="meta")
    stage = PipelineStage(
        nn.Linear(1, 1, device=device), rank, 2, device,
        input_args=number.clone().requires_grad_(rank > 0), output_args=number.clone().requires_grad_(), group=group,
    )  # fmt: skip
    schedule = Schedule1F1B(stage, num_microbatches, loss_fn=_loss)
    inputs = (torch.ones(num_microbatches, 1, device=device),) if rank == 0 else ()
    target: dict[str, Any] = {"target": torch.ones(num_microbatches, 1, device=device)} if rank == 1 else {}
    return median_seconds(lambda: schedule.step(*inputs, **target), device, NUM_REPEATS)


def _loss(output: Tensor, _: Tensor) -> Tensor:
    return output.sum()
