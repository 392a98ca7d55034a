"""What the search goes through: arrangements without their partition, simplest first."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import groupby
from math import inf
from typing import NamedTuple

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.cost import microbatch_size
from pipetransformer.autopipe.memory import interleaves
from pipetransformer.autopipe.pins import Pins, chunk_counts


class Pipelines(NamedTuple):
    """How the devices are used.

    Attributes:
        pipeline_size: Devices of a pipeline.
        num_replicas, replicas_adjacent: As in the plan.
    """

    pipeline_size: int
    num_replicas: int
    replicas_adjacent: bool


class Grid(NamedTuple):
    """A candidate without its partition, in the order of preference.

    Attributes:
        checkpoint, num_chunks, num_stages, num_microbatches, num_replicas, replicas_adjacent, schedule: As in the plan.
        num_samples: Of each micro-batch.
    """

    checkpoint: bool
    num_chunks: int
    num_stages: int
    num_microbatches: int
    num_replicas: int
    replicas_adjacent: bool
    schedule: str
    num_samples: int

    @property
    def pipeline_size(self) -> int:
        return self.num_stages // self.num_chunks


def all_pipelines(cluster: Cluster, num_layers: int, batch_size: int, pins: Pins) -> Iterator[Pipelines]:
    """All numbers of devices and replicas worth it.

    Of several numbers of replicas with the same largest share the smallest is no slower: it sends less, and over no
    more nodes. Replicas are put side by side where they fill nodes or nodes hold several of them.
    """
    for size in _pipeline_sizes(pins, num_layers):
        most = min(cluster.num_devices // size, batch_size)
        for num_replicas in _share_starts(most, batch_size) if pins.num_replicas is None else [pins.num_replicas]:
            if num_replicas <= most:
                yield Pipelines(size, num_replicas, replicas_adjacent=False)
        for num_replicas in _side_by_side(cluster, size, most, batch_size):
            if pins.num_replicas in (None, num_replicas):
                yield Pipelines(size, num_replicas, replicas_adjacent=True)


def _pipeline_sizes(pins: Pins, num_layers: int) -> Iterable[int]:
    num_stages = pins.fixed_num_stages
    if num_stages is None:
        return range(1, num_layers + 1)
    return [num_stages // num_chunks for num_chunks in chunk_counts(pins, num_stages)]


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


def grids(pipelines: Pipelines, num_layers: int, batch_size: int, pins: Pins, may_checkpoint: bool) -> Iterator[Grid]:
    """All candidates of some pipelines."""
    size, num_replicas = pipelines.pipeline_size, pipelines.num_replicas
    checkpoints = (False, True) if pins.checkpoint is None and may_checkpoint else (bool(pins.checkpoint),)
    for num_chunks in (1, 2, 3, 4) if pins.num_chunks is None else (pins.num_chunks,):
        num_stages = size * num_chunks
        if num_stages > num_layers or pins.fixed_num_stages not in (None, num_stages):
            continue
        if num_chunks not in chunk_counts(pins, num_stages):
            continue
        for num_microbatches in _microbatch_counts(batch_size, pipelines, pins.num_microbatches):
            schedule = _schedule(size, num_chunks, num_microbatches, pins.schedule)
            num_samples = microbatch_size(batch_size, num_replicas, num_microbatches)
            for checkpoint in checkpoints if schedule else ():
                yield Grid(
                    checkpoint,
                    num_chunks,
                    num_stages,
                    num_microbatches,
                    num_replicas,
                    pipelines.replicas_adjacent,
                    schedule,
                    num_samples,
                )


def lean_grids(cluster: Cluster, num_layers: int, batch_size: int, pins: Pins) -> Iterator[Grid]:
    """The candidates that may take least memory.

    Where all else is the same, fewer samples never take more, nor do fewer micro-batches with one stage on a device.
    Replicas only matter by whether there are several.
    """
    every = all_pipelines(cluster, num_layers, batch_size, pins)
    apart = (pipelines for pipelines in every if not pipelines.replicas_adjacent)
    for _, of_one_size in groupby(apart, lambda pipelines: pipelines.pipeline_size):
        fewest: dict[tuple[bool, bool, str], int] = {}
        for several, num_microbatches, pipelines in _with_fewest_samples(of_one_size, batch_size, pins):
            pinned = replace(pins, num_microbatches=num_microbatches)
            for grid in grids(pipelines, num_layers, batch_size, pinned, may_checkpoint=True):
                alike = several, grid.checkpoint, grid.schedule
                if grid.schedule == "interleaved1f1b" or grid.num_samples < fewest.get(alike, inf):
                    fewest[alike] = grid.num_samples
                    yield grid


def _with_fewest_samples(
    of_one_size: Iterable[Pipelines], batch_size: int, pins: Pins
) -> list[tuple[bool, int, Pipelines]]:
    """The first with the smallest micro-batches, by whether there are several replicas and by the micro-batches."""
    fewest: dict[tuple[bool, int], tuple[int, Pipelines]] = {}
    for pipelines in of_one_size:
        for num_microbatches in _microbatch_counts(batch_size, pipelines, pins.num_microbatches):
            alike = pipelines.num_replicas > 1, num_microbatches
            num_samples = microbatch_size(batch_size, pipelines.num_replicas, num_microbatches)
            if alike not in fewest or num_samples < fewest[alike][0]:
                fewest[alike] = num_samples, pipelines
    return sorted((*alike, pipelines) for alike, (_, pipelines) in fewest.items())


def _schedule(pipeline_size: int, num_chunks: int, num_microbatches: int, pin: str | None) -> str:
    """The schedule that takes least memory, as all take the same time; empty where torch refuses to run it."""
    if num_chunks > 1 or pin == "interleaved1f1b":
        return "interleaved1f1b" if interleaves(pipeline_size, num_microbatches) else ""
    enough = num_microbatches >= pipeline_size
    if pin == "1f1b":
        return pin if enough else ""
    return pin or ("1f1b" if enough else "gpipe")


def _microbatch_counts(batch_size: int, pipelines: Pipelines, pin: int | None) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ..., one for each device, and one for each sample, which needs the least memory."""
    share = microbatch_size(batch_size, pipelines.num_replicas, num_microbatches=1)
    if pin is not None:
        return [pin] if pin <= share else []
    powers = [2**exponent for exponent in range(share.bit_length())]
    counts = {count for power in powers for count in (power, 3 * power // 2)}
    return sorted(count for count in counts | {pipelines.pipeline_size, share} if count <= share)
