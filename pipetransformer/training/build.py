"""Builds the components of a run in the order of their dependencies: data, model, cache, planner, runtime."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.autocache.buffer import GIB
from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Transition
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.constraints import check_world
from pipetransformer.autopipe.meshes import mesh_batch_size
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import AffineTime, MeshProfile
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Parallel
from pipetransformer.config.validate import check_batch, warnings
from pipetransformer.data.base import Data, ImageFormat, Split, TextFormat
from pipetransformer.errors import TooLargePlan
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
    measure_schedule_overhead,
)
from pipetransformer.profiling.overhead import measure_reading, measure_sharding_overhead, measure_step_overhead
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.precision import PRECISIONS, Precision
from pipetransformer.training.cache_setup import CacheSetup, set_up_cache
from pipetransformer.training.input_reader import InputReader, open_inputs
from pipetransformer.training.loader import BatchLoader, sample_source
from pipetransformer.training.mesh_setup import choose_meshes
from pipetransformer.training.resume import Checkpoint, Resumed, resume
from pipetransformer.training.world import ONE_NODE, NodeLayout

FROM_SCRATCH = 10.0  # times the learning rate of a recipe, where weights are drawn; so much lies between the field's


@dataclass
class RunComponents:
    """One rank's data, model, planner, cache and runtime, as they stand before the first step.

    Attributes:
        first: The transition to the first plan of a new run.
        optim: The optimizer's specification with the peak learning rate.
        inputs: Reads the samples of all splits, ahead of the steps.
        order: Of the training samples.
        resumed: The checkpoint that the run goes on from.
    """

    data: Data
    stack: LayerStack
    train: BatchLoader
    evaluation: tuple[BatchLoader, ...]
    planner: Planner
    first: Transition
    cache_setup: CacheSetup
    runtime: ElasticRuntime
    inputs: InputReader
    optim: OptimizerSpec
    order: SampleOrder
    resumed: Resumed | None = None


def prepare(
    config: Config, device: torch.device, run_dir: Path, closing: ExitStack, report: Reporter,
    checkpoint: Checkpoint | None = None,
) -> RunComponents:  # fmt: skip
    """Loads data and model, finds room for the cache, measures the layers, and makes planner and runtime.

    Args:
        closing: Receives what has to be closed when the run ends.
        checkpoint: Gives the weights of a run that goes on.
        report: Receives a line per phase, and the settings that have no effect.

    Raises:
        UserError: Data, model, batch and devices do not fit together.
    """
    report.write("phase", message="reading data")
    wanted = config.model.input_format()
    data: Data = config.dataset.load(TextFormat(**wanted) if config.model.modality == "text" else ImageFormat(**wanted))
    check_batch(config.batch_size, len(data.train))
    inputs, input_notes = open_inputs(config, (data.train, *data.evaluation), device)
    closing.enter_context(inputs)
    report.write("phase", message="reading the model")
    precision = PRECISIONS[config.precision]
    stack = config.model.build_meta(data.task.head, data.input_shape, config.seed)
    config.peft.apply(stack, config.seed)
    stack = stack.to(precision.param_dtype)
    config.freeze.check(stack.num_blocks)
    if config.parallel.arrangement == "sharded":
        config.optim.check_shards()
    resumed = None if checkpoint is None else resume(checkpoint, config, data, stack)
    check_world(dist.get_world_size(), len(stack), config.batch_size)
    nodes = NodeLayout.here()
    sources = _sources(config, data, stack, nodes)
    rate_factor = config.peft.rate_factor * (1 if config.model.pretrained else FROM_SCRATCH)
    optim = config.optim.for_model(sources[0].hidden_size, rate_factor)
    meshes, mesh_notes = choose_meshes(config, stack, optim, sources, dist.get_world_size(), nodes.devices_per_node)
    feature_format = FeatureFormat(sources[0].hidden_size, precision.param_dtype, config.cache.storage)
    tokenizer = wanted.get("tokenizer")
    cache_setup = set_up_cache(
        config, stack, data, sources, feature_format, device, run_dir, closing, report, tokenizer
    )
    train, *evaluation = _loaders(config, data, sources, cache_setup, nodes, inputs)
    order, order_notes = sample_order(config, data)
    for text in (*warnings(config), *data.warnings, *cache_setup.notes, *order_notes, *input_notes, *mesh_notes):
        report.write("warning", message=text)
    report.write("phase", message="measuring layers and links")
    planner = make_planner(
        stack, train, optim, config.parallel, config.batch_size, device, precision, nodes, cache_setup, config.parks,
        order, None if config.profile.path is None else Path(config.profile.path),
        lambda message: report.write("phase", message=message), meshes,
    )  # fmt: skip
    offload = None if config.parallel.offload_path is None else Path(config.parallel.offload_path)
    context = RankContext.create(
        device, precision, config.parallel.timeout_s, config.randomness, config.compile, offload
    )
    runtime = closing.enter_context(
        ElasticRuntime(stack, data.task, optim, context, own_rates=config.freeze.has_own_rates, parks=config.parks)
    )
    loaders = train, tuple(evaluation)
    return RunComponents(
        data, stack, *loaders, planner, _first(planner, config.parallel), cache_setup, runtime, inputs, optim, order,
        resumed,
    )  # fmt: skip


def _first(planner: Planner, parallel: Parallel) -> Transition:
    """Returns the transition to the first plan.

    Raises:
        InfeasiblePlan: There is none; where memory is short with the option that takes weights to the host, if it goes
            with the others.
    """
    try:
        return planner.first
    except TooLargePlan as error:
        if parallel.device_chunk_gib is not None or parallel.splits_stages:
            raise
        raise TooLargePlan(f"{error.message}; or keep weights in host memory by `device_chunk_gib`") from None


def _sources(config: Config, data: Data, stack: LayerStack, nodes: NodeLayout) -> list[SampleSource]:
    """Describes each split to the cache, the training split first."""
    pair = data.train.flip_pair if config.cache.augmentation == "flip_pair" else None
    is_drawn = data.random_transform and (pair is not None or config.cache.augmentation != "flip_pair")
    num_draws = max(1, config.cache.num_draws) if is_drawn else 1
    train = sample_source(data.train, stack.hidden_shape, num_draws, nodes, pair)
    return [train, *(sample_source(split, stack.hidden_shape, nodes=nodes) for split in data.evaluation)]


def _loaders(
    config: Config, data: Data, sources: Sequence[SampleSource], cache_setup: CacheSetup, nodes: NodeLayout,
    inputs: InputReader,
) -> list[BatchLoader]:  # fmt: skip
    """Makes the loader of each split, the training split first."""
    storing = nodes if cache_setup.is_partial else ONE_NODE  # each stores other samples, or all do the same
    splits = zip((data.train, *data.evaluation), sources, strict=True)
    return [BatchLoader(split, source, config.seed, cache_setup.reader, storing, inputs) for split, source in splits]


def sample_order(config: Config, data: Data) -> tuple[SampleOrder, list[str]]:
    """Makes the order of the training samples; with a note where ``batching`` has no effect."""
    train, lengths, notes = data.train, None, []
    if config.batching == "bucketed" and train.lengths is None:
        notes.append("batching=bucketed has no effect: pictures have no lengths")
    elif config.batching == "bucketed" and train.row_length is not None:
        notes.append("batching=bucketed has no effect: texts share rows, which are full")
    elif config.batching == "bucketed":
        lengths = train.lengths
    return SampleOrder(len(train), config.seed, config.batch_size, lengths), notes


def make_planner(
    stack: LayerStack, loader: BatchLoader, optim: OptimizerSpec, parallel: Parallel, batch_size: int,
    device: torch.device,
    precision: Precision, nodes: NodeLayout, cache_setup: CacheSetup | None = None, parks: bool = False,
    order: SampleOrder | None = None, kept: Path | None = None, tell: Callable[[str], object] = str,
    meshes: tuple[StageMesh, ...] = (SINGLE,),
) -> Planner:  # fmt: skip
    """Measures the layers on a typical batch of a feed, and the links; every rank calls it.

    Args:
        nodes: The nodes of all ranks; links are measured within and between them.
        cache_setup: With which the cache's time is counted; else reading takes none.
        parks: Frozen layers keep their optimizer state.
        order: Of the samples; ``None``: uniform.
        kept: Folder of the measurements of other runs; ``None`` measures.
        tell: Receives a line where measurements of another run are used.
        meshes: Those that a plan may have.
    """
    order = order or SampleOrder(len(loader.split), 0, batch_size)

    typical = order.typical(loader.split.lengths)

    def read(ids: np.ndarray) -> Batch:
        return _whole_batch(loader, len(stack), ids)

    def loaded(mesh: StageMesh) -> Batches:
        measured = _measured_ids(loader.split, typical, batch_size, mesh)
        return [read(ids).to(device, precision.param_dtype) for ids in measured]

    whole = loaded(SINGLE)

    def measure_on(mesh: StageMesh) -> MeshProfile:
        return profile_mesh(stack, mesh, loaded(mesh), optim, device, precision)

    def measure() -> Measurement:
        layers = profile(stack, whole, optim, device, precision, nodes.devices_per_node)
        on_meshes = tuple(measure_on(mesh) for mesh in meshes if mesh != SINGLE)
        cluster = _measured_cluster(device, nodes.devices_per_node)
        overhead_s = measure_step_overhead(optim, RankContext.create(device, precision, parallel.timeout_s))
        # a message up and one back are counted elsewhere
        schedule_overhead_s = max(0.0, measure_schedule_overhead(device) - 2 * cluster.link.latency_s)
        small, large, *_ = _measured_ids(loader.split, typical, batch_size, SINGLE)
        reading = measure_reading((partial(read, small), partial(read, large)), (len(small), len(large)))
        overheads = {"step_overhead_s": overhead_s, "schedule_overhead_s": schedule_overhead_s}
        return replace(layers, read=reading, meshes=on_meshes, **overheads), cluster

    samples = f"{type(loader.split).__qualname__}, slow={loader.split.is_slow}"
    key = profile_key(stack, whole, samples, optim, device, precision, nodes.devices_per_node, meshes)
    (measured, cluster), is_kept = kept_or_measured(kept, key, measure)
    if is_kept:
        tell(f"planning by what an equal job has measured: {kept}/{key}.json")
    if loader.reads_ahead:
        measured = replace(measured, read=AffineTime(0.0, 0.0))  # by workers, while the rank computes
    if cache_setup is not None and cache_setup.cache is not None:
        miss_rate = cache_setup.cache.capacity.miss_rate(loader.source.name)
        measured = replace(measured, cache_read_s_per_byte=cache_setup.mean_read_s_per_byte, cache_miss_rate=miss_rate)
    if parallel.device_chunk_gib is not None:
        measured = replace(measured, host_copy_s_per_byte=measure_host_copies(device))
    if parallel.arrangement == "sharded":
        latency_s = (cluster.allreduce_link or cluster.link).latency_s
        context = RankContext.create(device, precision, parallel.timeout_s)
        sharding_s = measure_sharding_overhead(optim, context, len(list(stack[1].parameters())), latency_s)
        measured = replace(measured, sharding_overhead_s=sharding_s)
    budget_gib = parallel.device_memory_gib
    cluster = replace(cluster, device_memory_bytes=None if budget_gib is None else int(budget_gib * GIB))
    return Planner(measured, cluster, parallel, batch_size, parks, meshes)


def _measured_ids(split: Split, typical: np.ndarray, batch_size: int, mesh: StageMesh) -> list[np.ndarray]:
    """Returns the samples of :data:`~pipetransformer.profiling.layers.Batches` on a mesh.

    The large batch is a device's share, the small one a quarter of it. The longest sample counts by itself where
    samples differ in length, and do not share rows with others.
    """
    num_units, multiple = dist.get_world_size() // mesh.num_ranks, mesh.rows_multiple
    share = max(2, -(-mesh_batch_size(batch_size, mesh) // num_units))
    found = [np.resize(typical, size * multiple) for size in (max(1, share // 4), share)]
    if split.lengths is not None and split.row_length is None:
        found += [np.full(times * multiple, split.lengths.argmax()) for times in (1, 2)]
    return found


def _measured_cluster(device: torch.device, devices_per_node: int) -> Cluster:
    """Measures the links; memory has no limit here."""
    pairs = *measure_messages(device, devices_per_node), *measure_all_reduces(device, devices_per_node)
    link, node_link, allreduce_link, node_allreduce_link = (Link(*pair) if pair else None for pair in pairs)
    assert link is not None
    return Cluster(dist.get_world_size(), None, link, node_link, devices_per_node, allreduce_link, node_allreduce_link)


def _whole_batch(loader: BatchLoader, num_layers: int, ids: np.ndarray) -> Batch:
    """Samples on one device, as a plan with one stage would see them."""
    whole = Plan(num_frozen=0, cache_level=0, stages=((0, num_layers - 1),), num_replicas=1, num_microbatches=1)
    return loader.batch(ids, Topology(whole, rank=0))
