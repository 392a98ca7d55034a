"""The layouts that the search goes through, simplest first."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product
from math import inf

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import PlanConstraints, stages_per_rank_choices
from pipetransformer.autopipe.plan import DeviceLayout, Layout, microbatch_size
from pipetransformer.autopipe.schedules import GPIPE, SCHEDULES

Preference = tuple[bool, int, int, int, int, str, str]


def preference(layout: Layout) -> Preference:
    """Returns the key by which the simpler one of equally fast layouts comes first.

    Without recomputing, with fewer stages per rank, fewer stages, fewer micro-batches, fewer replicas, pipeline-first.
    """
    return (
        layout.recompute,
        layout.stages_per_rank,
        layout.num_stages,
        layout.num_microbatches,
        layout.num_replicas,
        layout.rank_order,
        layout.schedule,
    )


def device_layouts(
    cluster: Cluster, num_layers: int, batch_size: int, constraints: PlanConstraints
) -> Iterator[DeviceLayout]:
    """Yields all numbers of devices and replicas worth it.

    Of several numbers of replicas with as many samples in the largest one, the smallest is no slower: it sends less,
    and over no more nodes. Ranks are replica-first where replicas fill nodes or nodes hold several of them.
    """
    for size in _pipeline_sizes(constraints, num_layers):
        most = min(cluster.num_devices // size, batch_size)
        for num_replicas in (
            _replica_counts(most, batch_size) if constraints.num_replicas is None else [constraints.num_replicas]
        ):
            if num_replicas <= most:
                yield DeviceLayout(size, num_replicas)
        for num_replicas in _replica_first_counts(cluster, size, most, batch_size):
            if constraints.num_replicas in (None, num_replicas):
                yield DeviceLayout(size, num_replicas, "replica-first")


def _pipeline_sizes(constraints: PlanConstraints, num_layers: int) -> Iterable[int]:
    num_stages = constraints.fixed_num_stages
    if num_stages is None:
        return range(1, num_layers + 1)
    return [num_stages // stages_per_rank for stages_per_rank in stages_per_rank_choices(constraints, num_stages)]


def _replica_counts(most: int, batch_size: int) -> Iterator[int]:
    """Yields the smallest number of replicas for each number of samples that the largest replica may have."""
    num_replicas = 1
    while num_replicas <= most:
        yield num_replicas
        num_samples = -(-batch_size // num_replicas)
        if num_samples == 1:
            return
        num_replicas = -(-batch_size // (num_samples - 1))


def _replica_first_counts(cluster: Cluster, pipeline_size: int, most: int, batch_size: int) -> Iterator[int]:
    node_size = cluster.node_size
    if node_size is None or pipeline_size == 1:
        return
    yield from (count for count in range(2, min(node_size, most + 1)) if node_size % count == 0)
    seen = set[int]()
    for num_replicas in range(node_size, most + 1, node_size):
        num_samples = -(-batch_size // num_replicas)
        if num_samples not in seen:
            seen.add(num_samples)
            yield num_replicas


def candidates(
    devices: DeviceLayout, num_layers: int, batch_size: int, constraints: PlanConstraints, may_recompute: bool,
    gpipe_is_faster: bool = False,
) -> Iterator[Layout]:  # fmt: skip
    """Yields all layouts on a grid of devices.

    Args:
        gpipe_is_faster: It takes less time than 1F1B, though more memory, so that both are worth trying.
    """
    size, num_replicas, rank_order = devices
    recomputes = (False, True) if constraints.recompute is None and may_recompute else (bool(constraints.recompute),)
    for stages_per_rank in range(1, constraints.most_stages_per_rank + 1):
        num_stages = size * stages_per_rank
        if num_stages > num_layers or constraints.fixed_num_stages not in (None, num_stages):
            continue
        if stages_per_rank not in stages_per_rank_choices(constraints, num_stages):
            continue
        for num_microbatches in microbatch_counts(batch_size, devices, constraints.num_microbatches):
            sizes = num_stages, num_replicas, num_microbatches
            bare = Layout(*sizes, "", stages_per_rank)
            for schedule, recompute in product(_schedules(bare, constraints.schedule, gpipe_is_faster), recomputes):
                yield Layout(*sizes, schedule, stages_per_rank, recompute, rank_order)


def _schedules(layout: Layout, fixed: str | None, gpipe_is_faster: bool) -> list[str]:
    """Returns the first schedule that accepts a layout, if any does, and GPipe where it may be faster."""
    names = SCHEDULES if fixed is None else (fixed,)
    accepting = [name for name in names if SCHEDULES[name].accepts(layout)]
    may_gpipe = gpipe_is_faster and layout.num_stages > 1
    return accepting[:1] + [name for name in accepting[1:] if name == GPIPE.name and may_gpipe]


def smallest_candidates(
    cluster: Cluster, num_layers: int, batch_size: int, constraints: PlanConstraints
) -> Iterator[Layout]:
    """Yields the layouts that may take least memory.

    Where all else is the same, fewer samples never take more, nor do fewer micro-batches with one stage on a device.
    Replicas only matter by whether there are several.
    """
    every = device_layouts(cluster, num_layers, batch_size, constraints)
    pipeline_first = (devices for devices in every if devices.rank_order == "pipeline-first")
    for _, of_one_size in groupby(pipeline_first, lambda devices: devices.pipeline_size):
        fewest: dict[tuple[bool, bool, str], int] = {}
        for several, num_microbatches, devices in _with_fewest_samples(of_one_size, batch_size, constraints):
            fixed = replace(constraints, num_microbatches=num_microbatches)
            for layout in candidates(devices, num_layers, batch_size, fixed, may_recompute=True):
                alike, num_samples = (several, layout.recompute, layout.schedule), layout.microbatch_size(batch_size)
                if SCHEDULES[layout.schedule].multi_stage or num_samples < fewest.get(alike, inf):
                    fewest[alike] = num_samples
                    yield layout


def _with_fewest_samples(
    of_one_size: Iterable[DeviceLayout], batch_size: int, constraints: PlanConstraints
) -> list[tuple[bool, int, DeviceLayout]]:
    """Returns the first with the smallest micro-batches, for one replica and for several, and for each number of them.

    Returns:
        ``(several replicas, micro-batches, devices)``, sorted.
    """
    fewest: dict[tuple[bool, int], tuple[int, DeviceLayout]] = {}
    for devices in of_one_size:
        for num_microbatches in microbatch_counts(batch_size, devices, constraints.num_microbatches):
            alike = devices.num_replicas > 1, num_microbatches
            num_samples = microbatch_size(batch_size, devices.num_replicas, num_microbatches)
            if alike not in fewest or num_samples < fewest[alike][0]:
                fewest[alike] = num_samples, devices
    return sorted((*alike, devices) for alike, (_, devices) in fewest.items())


def microbatch_counts(batch_size: int, devices: DeviceLayout, fixed: int | None) -> list[int]:
    """Returns 1, 2, 3, 4, 6, 8, 12, ..., one for each device, and one for each sample, which needs least memory."""
    num_samples = microbatch_size(batch_size, devices.num_replicas, num_microbatches=1)
    if fixed is not None:
        return [fixed] if fixed <= num_samples else []
    powers = [2**exponent for exponent in range(num_samples.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power // 2)}
    return sorted(count for count in counts | {devices.pipeline_size, num_samples} if count <= num_samples)
