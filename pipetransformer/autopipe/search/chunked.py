"""The fastest plan where a device keeps a part of its weights and gradients in host memory."""

from dataclasses import replace

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import UNCONSTRAINED, PlanConstraints
from pipetransformer.autopipe.cost import step_seconds
from pipetransformer.autopipe.offload import chunk_sizes, model_bytes, on_host, smallest_budget
from pipetransformer.autopipe.plan import Plan, layer_above
from pipetransformer.autopipe.profile import Profile
from pipetransformer.autopipe.search.search import best_plan, gib_upwards
from pipetransformer.errors import InfeasiblePlan


def chunked_plan(
    profile: Profile, cluster: Cluster, batch_size: int, chunk_bytes: int, num_frozen: int = 0, cache_level: int = 0,
    constraints: PlanConstraints = UNCONSTRAINED,
) -> Plan:  # fmt: skip
    """Returns the fastest plan with chunks, or the fastest one without where all of a device fits their budget.

    All of it is what the plan runs, and the layers below the cache where some samples are computed again.

    Args:
        profile: Knows the time of a copy from host memory.
        chunk_bytes: Of weights and gradients on a device at a time.

    Raises:
        InfeasiblePlan: The budget is less than one layer takes, or nothing fits the memory.
    """
    arguments = batch_size, num_frozen, cache_level
    whole = _whole_plan(profile, cluster, *arguments, constraints)
    lent = profile.layers[: layer_above(cache_level)] if profile.cache_miss_rate else ()
    lent_bytes = sum(layer.parameter_bytes for layer in lent)
    if whole is not None and model_bytes(profile, whole) + lent_bytes <= chunk_bytes:
        return whole
    _check_budget(profile, cluster, chunk_bytes, num_frozen, cache_level)
    limit = cluster.device_memory_bytes
    beside = cluster if limit is None else replace(cluster, device_memory_bytes=limit - chunk_bytes)
    found = best_plan(on_host(profile), beside, *arguments, replace(constraints, recompute=True, stages_per_rank=1))
    plan = replace(found, chunk_bytes=chunk_bytes)
    return replace(plan, predicted_step_s=step_seconds(profile, cluster, plan, batch_size))


def _whole_plan(
    profile: Profile, cluster: Cluster, batch_size: int, num_frozen: int, cache_level: int, constraints: PlanConstraints
) -> Plan | None:
    try:
        return best_plan(profile, cluster, batch_size, num_frozen, cache_level, constraints)
    except InfeasiblePlan:  # all of the layers does not fit; what else is wrong is found again
        return None


def _check_budget(profile: Profile, cluster: Cluster, chunk_bytes: int, num_frozen: int, cache_level: int) -> None:
    running = range(layer_above(cache_level), len(profile.layers))
    least = smallest_budget(chunk_sizes(profile, running, layer_above(num_frozen)))
    if chunk_bytes < least:
        raise InfeasiblePlan(
            f"`device_chunk_gib`={chunk_bytes / 2**30:.4g} ({chunk_bytes:,} bytes) is less than weights and gradient "
            f"of the largest layer, {least:,} bytes; give at least {gib_upwards(least):.4g}"
        )
    if cluster.device_memory_bytes is not None and cluster.device_memory_bytes <= chunk_bytes:
        raise InfeasiblePlan(
            f"`device_chunk_gib`={chunk_bytes / 2**30:.4g} leaves nothing of `device_memory_gib`="
            f"{cluster.device_memory_bytes / 2**30:.4g} for activations; lower it to {gib_upwards(least):.4g} or more"
        )
