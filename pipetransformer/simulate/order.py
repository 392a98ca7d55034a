"""The order in which each device of a pipeline works through the micro-batches of a step.

1F1B with three stages and four micro-batches; a device starts a pass as soon as what it needs is there::

    device 0   F0 F1 F2          B0 F3 B1    B2    B3
    device 1      F0 F1       B0 F2 B1 F3 B2    B3
    device 2         F0    B0 F1 B1 F2 B2 F3 B3
"""

from dataclasses import dataclass
from itertools import chain, zip_longest

from pipetransformer.autopipe.plan import Plan


@dataclass(frozen=True)
class Pass:
    """One micro-batch through one stage, forward or backward."""

    is_forward: bool
    stage: int
    microbatch: int


def order(plan: Plan, device: int) -> list[Pass]:
    """The passes of a device of a pipeline, as torch's schedule of that name runs them."""
    stages = list(plan.device_stages(device))
    per_round = _microbatches_per_round(plan)
    forwards = [Pass(True, *place) for place in _rounds(stages, plan.num_microbatches, per_round)]
    backwards = [Pass(False, *place) for place in _rounds(stages[::-1], plan.num_microbatches, per_round)]
    lead = min(_lead(plan, device, per_round), len(forwards))
    pairs = zip_longest(backwards, forwards[lead:])
    return forwards[:lead] + [one for one in chain.from_iterable(pairs) if one is not None]


def _microbatches_per_round(plan: Plan) -> int:
    """Micro-batches that a device takes through one of its stages before it turns to the next."""
    num_rounds = max(1, plan.num_microbatches // plan.pipeline_size) if plan.stages_per_rank > 1 else 1
    return -(-plan.num_microbatches // num_rounds)


def _rounds(stages: list[int], num_microbatches: int, per_round: int) -> list[tuple[int, int]]:
    """(stage, micro-batch) in order: a round of micro-batches through every stage, then the next round."""
    starts = range(0, num_microbatches, per_round)
    rounds = [range(start, min(start + per_round, num_microbatches)) for start in starts]
    return [(stage, microbatch) for batch in rounds for stage in stages for microbatch in batch]


def _lead(plan: Plan, device: int, per_round: int) -> int:
    """Forward passes before the first backward pass."""
    if plan.schedule == "gpipe":
        return plan.num_microbatches
    if plan.stages_per_rank == 1:
        return plan.pipeline_size - device
    return (plan.stages_per_rank - 1) * per_round + 2 * (plan.pipeline_size - 1 - device) + 1
