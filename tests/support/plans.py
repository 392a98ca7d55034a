"""Plans for the tiny models of :mod:`support.cases`."""

from pipetransformer.autopipe.plan import Plan
from support.cases import NUM_BLOCKS

HEAD = NUM_BLOCKS + 1


def plan(frozen: int, cached: int, ends: list[int], replicas: int, microbatches: int, schedule: str = "1f1b") -> Plan:
    """Stages that end with the given layers."""
    starts = [cached + 1 if cached else 0, *(end + 1 for end in ends[:-1])]
    return Plan(frozen, cached, tuple(zip(starts, ends, strict=True)), replicas, microbatches, schedule)


PIPE_TO_DATA = {  # 4 stages -> 2 -> 1, as the paper draws it
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4),
    2: plan(2, 2, [5, HEAD], 2, 2),
    4: plan(4, 4, [HEAD], 4, 1),
}
