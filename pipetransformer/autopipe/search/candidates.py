"""What the search goes through: arrangements without their partition, simplest first."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.constraints import PlanConstraints, chunk_counts
from pipetransformer.autopipe.cost import microbatch_size
from pipetransformer.autopipe.memory import interleaves


class DeviceLayout(NamedTuple):
    """How the devices are used.

    Attributes:
        pipeline_size: Devices of a pipeline.
        num_replicas, replicas_adjacent: As in the plan.
    """

    pipeline_size: int
    num_replicas: int
    replicas_adjacent: bool


class Candidate(NamedTuple):
    """A candidate without its partition, in the order of preference.

    Attributes:
        recompute, stages_per_rank, num_stages, num_microbatches, num_replicas, replicas_adjacent, schedule: As in the
            plan.
        num_samples: Of each micro-batch.
    """

    recompute: bool
    stages_per_rank: int
    num_stages: int
    num_microbatches: int
    num_replicas: int
    replicas_adjacent: bool
    schedule: str
    num_samples: int

    @property
    def pipeline_size(self) -> int:
        return self.num_stages // self.stages_per_rank


def device_layouts(
    cluster: Cluster, num_layers: int, batch_size: int, constraints: PlanConstraints
) -> Iterator[DeviceLayout]:
    """All numbers of devices and replicas worth it.

    Of several numbers of replicas with the same largest share the smallest is no slower: it sends less, and over no
    more nodes. Replicas are put side by side where they fill nodes or nodes hold several of them.
    """
    for size in _pipeline_sizes(constraints, num_layers):
        most = min(cluster.num_devices // size, batch_size)
        for num_replicas in (
            _share_starts(most, batch_size) if constraints.num_replicas is None else [constraints.num_replicas]
        ):
            if num_replicas <= most:
                yield DeviceLayout(size, num_replicas, replicas_adjacent=False)
        for num_replicas in _side_by_side(cluster, size, most, batch_size):
            if constraints.num_replicas in (None, num_replicas):
                yield DeviceLayout(size, num_replicas, replicas_adjacent=True)


def _pipeline_sizes(constraints: PlanConstraints, num_layers: int) -> Iterable[int]:
    num_stages = constraints.fixed_num_stages
    if num_stages is None:
        return range(1, num_layers + 1)
    return [num_stages // stages_per_rank for stages_per_rank in chunk_counts(constraints, num_stages)]


def _share_starts(most: int, batch_size: int) -> Iterator[int]:
    """The smallest number of replicas for each largest share."""
    num_replicas = 1
    while num_replicas <= most:
        yield num_replicas
        share = -(-batch_size // num_replicas)
        if share == 1:
            return
        num_replicas = -(-batch_size // (share - 1))


def _side_by_side(cluster: Cluster, pipeline_size: int, most: int, batch_size: int) -> Iterator[int]:
    node_size = cluster.node_size
    if node_size is None or pipeline_size == 1:
        return
    yield from (count for count in range(2, min(node_size, most + 1)) if node_size % count == 0)
    shares = set[int]()
    for num_replicas in range(node_size, most + 1, node_size):
        share = -(-batch_size // num_replicas)
        if share not in shares:
            shares.add(share)
            yield num_replicas


def candidates(
    pipelines: DeviceLayout, num_layers: int, batch_size: int, constraints: PlanConstraints, may_recompute: bool
) -> Iterator[Candidate]:
    """All candidates of some pipelines."""
    size, num_replicas = pipelines.pipeline_size, pipelines.num_replicas
    checkpoints = (False, True) if constraints.recompute is None and may_recompute else (bool(constraints.recompute),)
    for stages_per_rank in (1, 2, 3, 4) if constraints.stages_per_rank is None else (constraints.stages_per_rank,):
        num_stages = size * stages_per_rank
        if num_stages > num_layers or constraints.fixed_num_stages not in (None, num_stages):
            continue
        if stages_per_rank not in chunk_counts(constraints, num_stages):
            continue
        for num_microbatches in _microbatch_counts(batch_size, pipelines, constraints.num_microbatches):
            schedule = _schedule(size, stages_per_rank, num_microbatches, constraints.schedule)
            num_samples = microbatch_size(batch_size, num_replicas, num_microbatches)
            for recompute in checkpoints if schedule else ():
                yield Candidate(
                    recompute,
                    stages_per_rank,
                    num_stages,
                    num_microbatches,
                    num_replicas,
                    pipelines.replicas_adjacent,
                    schedule,
                    num_samples,
                )


def smallest_candidates(
    cluster: Cluster, num_layers: int, batch_size: int, constraints: PlanConstraints
) -> Iterator[Candidate]:
    """The candidates that may take least memory.

    Where all else is the same, fewer samples never take more, nor do fewer micro-batches with one stage on a device.
    Replicas only matter by whether there are several.
    """
    every = device_layouts(cluster, num_layers, batch_size, constraints)
    apart = (pipelines for pipelines in every if not pipelines.replicas_adjacent)
    for _, of_one_size in groupby(apart, lambda pipelines: pipelines.pipeline_size):
        fewest: dict[tuple[bool, bool, str], int] = {}
        for several, num_microbatches, pipelines in _with_fewest_samples(of_one_size, batch_size, constraints):
            pinned = replace(constraints, num_microbatches=num_microbatches)
            for candidate in candidates(pipelines, num_layers, batch_size, pinned, may_recompute=True):
                alike = several, candidate.recompute, candidate.schedule
                if candidate.schedule == "interleaved1f1b" or candidate.num_samples < fewest.get(alike, inf):
                    fewest[alike] = candidate.num_samples
                    yield candidate


def _with_fewest_samples(
    of_one_size: Iterable[DeviceLayout], batch_size: int, constraints: PlanConstraints
) -> list[tuple[bool, int, DeviceLayout]]:
    """The first with the smallest micro-batches, by whether there are several replicas and by the micro-batches."""
    fewest: dict[tuple[bool, int], tuple[int, DeviceLayout]] = {}
    for pipelines in of_one_size:
        for num_microbatches in _microbatch_counts(batch_size, pipelines, constraints.num_microbatches):
            alike = pipelines.num_replicas > 1, num_microbatches
            num_samples = microbatch_size(batch_size, pipelines.num_replicas, num_microbatches)
            if alike not in fewest or num_samples < fewest[alike][0]:
                fewest[alike] = num_samples, pipelines
    return sorted((*alike, pipelines) for alike, (_, pipelines) in fewest.items())


def _schedule(pipeline_size: int, stages_per_rank: int, num_microbatches: int, pin: str | None) -> str:
    """The schedule that takes least memory, as all take the same time; empty where torch refuses to run it."""
    if stages_per_rank > 1 or pin == "interleaved1f1b":
        return "interleaved1f1b" if interleaves(pipeline_size, num_microbatches) else ""
    enough = num_microbatches >= pipeline_size
    if pin == "1f1b":
        return pin if enough else ""
    return pin or ("1f1b" if enough else "gpipe")


def _microbatch_counts(batch_size: int, pipelines: DeviceLayout, pin: int | None) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ..., one for each device, and one for each sample, which needs the least memory."""
    share = microbatch_size(batch_size, pipelines.num_replicas, num_microbatches=1)
    if pin is not None:
        return [pin] if pin <= share else []
    powers = [2**exponent for exponent in range(share.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power // 2)}
    return sorted(count for count in counts | {pipelines.pipeline_size, share} if count <= share)
