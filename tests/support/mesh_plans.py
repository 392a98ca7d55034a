"""Plans on meshes, their stages as equal as layers allow."""

from itertools import pairwise

from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.mesh import StageMesh
from support.cases import NUM_BLOCKS

HEAD = NUM_BLOCKS + 1


def plan_on(
    mesh: StageMesh, num_stages: int = 1, replicas: int = 1, microbatches: int = 1, frozen: int = 0, level: int = 0,
    recompute: bool = False, schedule: str = "",
) -> Plan:  # fmt: skip
    """A plan of a case's layers; without a schedule 1F1B where there are micro-batches for it."""
    first = layer_above(level)
    bounds = [first + (HEAD + 1 - first) * stage // num_stages for stage in range(num_stages + 1)]
    stages = tuple((start, end - 1) for start, end in pairwise(bounds))
    schedule = schedule or ("1f1b" if microbatches >= num_stages else "gpipe")
    return Plan(frozen, level, stages, replicas, microbatches, schedule, recompute=recompute, mesh=mesh)
