"""Runs torch's zero-bubble schedules over a frozen stage."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, ScheduleInterleavedZeroBubble

KINDS: dict[str, type[PipelineScheduleMulti]] = {
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": ScheduleInterleavedZeroBubble,
}
NUM_STAGES, NUM_MICROBATCHES, WIDTH = 4, 4, 8


def stages_without_gradient(kind: str) -> list[int]:
    """Trains one step on two ranks, two stages each, the lowest one frozen.

    Returns:
        The trainable stages of this rank that are left without a weight gradient.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = {index: _layer(index) for index in range(rank, NUM_STAGES, world)}
    stages = [_stage(index, layer) for index, layer in layers.items()]
    schedule = KINDS[kind]([*stages], NUM_MICROBATCHES, loss_fn=lambda y, target: (y - target).square().sum())
    x = torch.ones(NUM_MICROBATCHES, WIDTH)
    schedule.step(*((x,) if rank == 0 else ()), **({"target": x} if rank == world - 1 else {}))
    return [index for index, layer in layers.items() if index > 0 and layer.weight.grad is None]


def _layer(index: int) -> nn.Linear:
    torch.manual_seed(index)
    return nn.Linear(WIDTH, WIDTH).requires_grad_(index > 0)


def _stage(index: int, layer: nn.Module) -> PipelineStage:
    def meta(has_gradient: bool) -> torch.Tensor:
        return torch.empty(1, WIDTH, device="meta", requires_grad=has_gradient)

    return PipelineStage(
        layer, index, NUM_STAGES, torch.device("cpu"), input_args=meta(index > 1), output_args=meta(index > 0)
    )
