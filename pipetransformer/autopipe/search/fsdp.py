"""The fastest plan whose layers are sharded over all devices.

It is a static arrangement that the user asks for.
:func:`~pipetransformer.autopipe.search.search.best_plan` does not consider it: a transition to any other plan
would have to all-gather what is sharded.
"""

from collections.abc import Iterator
from dataclasses import replace

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints, check_constraints
from pipetransformer.autopipe.cost import Profile, step_seconds
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.autopipe.search.candidates import DeviceLayout, candidates
from pipetransformer.autopipe.search.search import gib_upwards
from pipetransformer.errors import InfeasiblePlan


def sharded_plan(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_frozen: int = 0,
    cache_level: int = 0,
    constraints: PlanConstraints = UNCONSTRAINED,
) -> Plan:
    """The fastest sharded plan that fits the memory: how many micro-batches, and whether to checkpoint activations.

    Of equally fast plans it takes the one without checkpointing, then the one with fewer micro-batches.

    Raises:
        InfeasiblePlan: Nothing fits the memory, or the batch is too small.
    """
    constraints = replace(constraints, num_stages=1, num_replicas=cluster.num_devices, stages_per_rank=1)
    layers = range(layer_above(cache_level), len(profile.layers))
    check_constraints(constraints, layers, cluster.num_devices, batch_size)
    whole = Plan(num_frozen, cache_level, ((layers[0], layers[-1]),), cluster.num_devices, 1, sharded=True)
    budget = cluster.device_memory_bytes
    plans = list(_plans(profile, cluster, batch_size, whole, constraints))
    sizes = [max(device_memory_bytes(profile, plan, batch_size)) for plan in plans]
    fitting = [plan for plan, size in zip(plans, sizes, strict=True) if budget is None or size <= budget]
    if not fitting:
        min_memory, smallest = min(zip(plans, sizes, strict=True), key=lambda pair: pair[1])
        raise InfeasiblePlan(_explain(min_memory, smallest, budget or 0, batch_size))
    return min(fitting, key=lambda plan: plan.predicted_step_s)


def _plans(
    profile: Profile, cluster: Cluster, batch_size: int, whole: Plan, constraints: PlanConstraints
) -> Iterator[Plan]:
    """All candidates, simplest first, from one with whole shares; only limited memory asks for checkpointing."""
    limited = cluster.device_memory_bytes is not None
    pipelines = DeviceLayout(1, whole.num_replicas, replicas_adjacent=False)
    for candidate in sorted(candidates(pipelines, whole.num_layers, batch_size, constraints, may_recompute=limited)):
        plan = replace(whole, num_microbatches=candidate.num_microbatches, recompute=candidate.recompute)
        yield replace(plan, predicted_step_s=step_seconds(profile, cluster, plan, batch_size))


def _explain(min_memory: Plan, smallest: int, budget: int, batch_size: int) -> str:
    others = " with activation checkpointing" * min_memory.recompute
    return (
        f"a sharded plan does not fit `device_memory_gib`={budget / 2**30:.4g}: it takes at least "
        f"{gib_upwards(smallest):.4g} GiB on each of {min_memory.num_replicas} devices ({min_memory.num_microbatches} "
        f"micro-batches{others}) at `batch_size`={batch_size}; raise `device_memory_gib` or `num_devices`, "
        "or lower `batch_size`"
    )
