"""Makes a run's planner from measurements on its own samples: layers, meshes, links, and the rest of a step."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.autocache.buffer import GIB
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.cluster import Cluster, Link, allreduce_links, boundary_links
from pipetransformer.autopipe.meshes import mesh_batch_size
from pipetransformer.autopipe.plan import DeviceLayout, Plan
from pipetransformer.autopipe.profile import AffineTime, LayerProfile
from pipetransformer.config.sections import Parallel
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.planning.planner import Planner
from pipetransformer.profiling.kept import Measurement, kept_or_measured, profile_key
from pipetransformer.profiling.layers import Batches, profile
from pipetransformer.profiling.meshes import profile_mesh
from pipetransformer.profiling.network import (
    measure_all_reduces,
    measure_host_copies,
    measure_messages,
)
from pipetransformer.profiling.overhead import (
    ShardedBlock,
    measure_reading,
    measure_sharding_overhead,
    measure_step_overheads,
)
from pipetransformer.runtime.batch import Batch, SampleLoss
from pipetransformer.runtime.groups import RankContext, broadcast_from_rank0
from pipetransformer.runtime.precision import Precision
from pipetransformer.training.cache_setup import CacheSetup
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.world import NodeLayout, device_name

MOST_OUTPUTS = 1 << 27  # numbers, of which a loss over a vocabulary takes four times the memory
USABLE = 0.9  # of a GPU's memory; the rest is CUDA's own, and what lies unused between tensors


def make_planner(
    stack: LayerStack, loss: SampleLoss, loader: BatchLoader, optim: OptimizerSpec, parallel: Parallel,
    batch_size: int, device: torch.device, precision: Precision, nodes: NodeLayout,
    cache_setup: CacheSetup | None = None, parks: bool = False, order: SampleOrder | None = None,
    kept: Path | None = None, tell: Callable[[str], object] = str, meshes: tuple[StageMesh, ...] = (SINGLE,),
    randomness: str = "sample",
) -> Planner:  # fmt: skip
    """Measures the layers on a typical batch of a feed, and the links; every rank calls it.

    Args:
        loss: Of the head's output.
        nodes: The nodes of all ranks; links are measured within and between them.
        cache_setup: With which the cache's time is counted; else reading takes none.
        parks: Frozen layers keep their optimizer state.
        order: Of the samples; ``None``: uniform.
        kept: Folder of the measurements of other runs; ``None`` measures.
        tell: Receives a line where measurements of another run are used.
        meshes: Those that a plan may have.
        randomness: Where dropout gets its numbers.
    """
    context = RankContext.create(device, precision, parallel.timeout_s, randomness)
    order = order or SampleOrder(len(loader.split), 0, batch_size)
    measuring = Measuring(stack, loss, loader, optim, batch_size, context, nodes.devices_per_node, order, meshes)
    key = measuring.key()
    (measured, cluster), is_kept = kept_or_measured(kept, key, measuring.measure)
    if is_kept:
        tell(f"planning by what an equal job has measured: {kept}/{key}.json")
    # nodes may store different samples, and have other devices
    figures, (name, usable_bytes) = broadcast_from_rank0((_cache_figures(cache_setup, loader), _about(device)))
    figures["fill_read_s"] = measured.read.per_sample_s  # no worker reads ahead of a fill
    if loader.reads_ahead:
        figures["read"] = measured.read_besides  # workers read the inputs while the rank computes
    if parallel.device_chunk_gib is not None:
        figures["host_copy_s_per_byte"] = measure_host_copies(device)
    if parallel.arrangement == "sharded":
        (link,) = allreduce_links(cluster, DeviceLayout(1, dist.get_world_size()))
        overhead = measuring.sharding_overhead(measured.layers[1], link)
        figures["sharding_overhead_s"], figures["sharding_s_per_byte"] = overhead
    budget_gib = parallel.device_memory_gib
    memory_bytes = None if budget_gib is None else int(budget_gib * GIB)
    cluster = replace(cluster, device_memory_bytes=memory_bytes, device_name=name, usable_bytes=usable_bytes)
    return Planner(replace(measured, **figures), cluster, parallel, batch_size, parks, meshes)


def _about(device: torch.device) -> tuple[str, int | None]:
    """Returns the name of a device, and the memory of a GPU that a plan can use; CPU ranks share the host's."""
    if device.type != "cuda":
        return device_name(device), None
    return device_name(device), int(USABLE * torch.cuda.get_device_properties(device).total_memory)


def _cache_figures(setup: CacheSetup | None, loader: BatchLoader) -> dict[str, Any]:
    """Returns the entries of a profile that say how fast the cache is read, and how much of it is missed."""
    if setup is None or setup.cache is None:
        return {}
    read, miss_rate = setup.mean_read, setup.cache.capacity.miss_rate(loader.source.name)
    return {
        "cache_read_s_per_byte": read.per_sample_s,
        "cache_read_fixed_s": read.fixed_s,
        "cache_miss_rate": miss_rate,
    }


@dataclass(frozen=True)
class Measuring:
    """All that equal jobs measure alike. Every rank makes the same calls.

    Attributes:
        loss: Of the head's output.
        loader: Of the training split.
        batch_size: Of a global batch.
        order: Of the samples.
        meshes: On which the layers are measured.
    """

    stack: LayerStack
    loss: SampleLoss
    loader: BatchLoader
    optim: OptimizerSpec
    batch_size: int
    context: RankContext
    devices_per_node: int
    order: SampleOrder
    meshes: tuple[StageMesh, ...]

    def key(self) -> str:
        """Returns a digest of all that determines :meth:`measure`."""
        split, context = self.loader.split, self.context
        samples = f"{type(split).__qualname__}, slow={split.is_slow}, {split.reading}"
        about = context.device, context.precision, self.devices_per_node, self.meshes, context.randomness
        return profile_key(self.stack, self.loss, self._whole, samples, self.optim, *about)

    def measure(self) -> Measurement:
        """Measures layers, links, and the parts of a step that no plan changes."""
        context = self.context
        where = context.device, context.precision
        about = *where, self.devices_per_node, context.randomness
        layers = profile(self.stack, self.loss, self._whole, self.optim, *about)
        cluster = _measured_cluster(context.device, self.devices_per_node)
        split_meshes = (mesh for mesh in self.meshes if mesh != SINGLE)
        on_meshes = tuple(
            profile_mesh(self.stack, self.loss, mesh, self._batches(mesh), self.optim, *where, cluster)
            for mesh in split_meshes
        )
        (link, _) = boundary_links(cluster, DeviceLayout(2, 1))  # a message up and one back are counted elsewhere
        overheads = measure_step_overheads(self.optim, context)
        reading, besides = self._reading()
        measured = replace(
            layers,
            read=reading,
            read_besides=besides,
            meshes=on_meshes,
            step_overhead_s=overheads.step_s,
            schedule_overhead_s=max(0.0, overheads.schedule_s - 2 * link.latency_s),
            gpipe_overhead_s=max(0.0, overheads.gpipe_s - 2 * link.latency_s),
        )
        return measured, cluster

    def _reading(self) -> tuple[AffineTime, AffineTime]:
        """Measures reading a batch, and what of it is left where a cache has the inputs."""
        small, large, *_ = self._ids(SINGLE)
        whole, besides = (
            measure_reading((partial(read, small), partial(read, large)), (len(small), len(large)))
            for read in (self._read, self._read_besides)
        )
        return whole, besides

    def sharding_overhead(self, block: LayerProfile, link: Link) -> tuple[float, float]:
        """Measures what a step takes more with sharded layers: see :func:`measure_sharding_overhead`.

        Args:
            block: As it was measured.
            link: Of all-reduces, which is counted elsewhere.
        """
        sizes = [parameter.numel() for parameter in self.stack[1].parameters()]
        return measure_sharding_overhead(
            self.optim, self.context, ShardedBlock(len(sizes), sum(sizes), block.optimizer_s), link
        )

    @cached_property
    def _typical(self) -> np.ndarray:
        return self.order.typical(self.loader.split.lengths)

    @cached_property
    def _whole(self) -> Batches:
        return self._batches(SINGLE)

    @cached_property
    def _outputs(self) -> int:
        """Numbers of the head's output for the longest sample at most: for each token as its widest layer has."""
        lengths = self.loader.split.lengths
        num_tokens = self._read(np.array([0 if lengths is None else lengths.argmax()])).hidden_shape[1]
        return num_tokens * max([1, *(len(p) for p in self.stack[-1].parameters() if p.ndim > 1)])

    def _batches(self, mesh: StageMesh) -> Batches:
        context = self.context
        about = context.device, context.precision.param_dtype, context.randomness == "device"
        return [self._read(ids).to(*about) for ids in self._ids(mesh)]

    def _read(self, ids: np.ndarray) -> Batch:
        """Reads samples to one device, as a plan with one stage would see them."""
        stages = ((0, len(self.stack) - 1),)
        whole = Plan(num_frozen=0, cache_level=0, stages=stages, num_replicas=1, num_microbatches=1)
        return self.loader.batch(ids, Topology(whole, rank=0))

    def _read_besides(self, ids: np.ndarray) -> Batch:
        """Reads samples without their inputs, as the last one of two stages does."""
        last = len(self.stack) - 1
        stages = ((0, last - 1), (last, last))
        halves = Plan(num_frozen=0, cache_level=0, stages=stages, num_replicas=1, num_microbatches=1, schedule="gpipe")
        return self.loader.batch(ids, Topology(halves, rank=1))

    def _ids(self, mesh: StageMesh) -> list[np.ndarray]:
        """Returns the samples of :data:`~pipetransformer.profiling.layers.Batches` on a mesh.

        The large batch is a device's share, or as much of it as has :data:`MOST_OUTPUTS`: a plan may have
        micro-batches, and the share be larger than the device. The small one is a quarter of it. The longest sample
        counts by itself where samples differ in length, and do not share rows with others.
        """
        num_units, multiple, split = dist.get_world_size() // mesh.num_ranks, mesh.rows_multiple, self.loader.split
        share = max(2, min(-(-mesh_batch_size(self.batch_size, mesh) // num_units), MOST_OUTPUTS // self._outputs))
        found = [np.resize(self._typical, size * multiple) for size in (max(1, share // 4), share)]
        if split.lengths is not None and split.row_length is None:
            found += [np.full(times * multiple, split.lengths.argmax()) for times in (1, 2)]
        return found


def _measured_cluster(device: torch.device, devices_per_node: int) -> Cluster:
    """Measures the links; memory has no limit here."""
    pairs = *measure_messages(device, devices_per_node), *measure_all_reduces(device, devices_per_node)
    link, node_link, allreduce_link, node_allreduce_link = (Link(*pair) if pair else None for pair in pairs)
    assert link is not None
    return Cluster(dist.get_world_size(), None, link, node_link, devices_per_node, allreduce_link, node_allreduce_link)
