"""Builds the components of a run in the order of their dependencies: data, model, cache, planner, runtime."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.source import SampleSource
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.autodp.transition import Transition
from pipetransformer.autopipe.constraints import check_world
from pipetransformer.autopipe.offload import model_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.search import gib_upwards
from pipetransformer.config.no_effect import warnings
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Parallel
from pipetransformer.config.validate import check_batch
from pipetransformer.data.base import Data, ImageFormat, TextFormat, load_data
from pipetransformer.errors import TooLargePlan, UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.planning.planner import Planner
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.groups import RankContext, any_rank
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.cache_setup import CacheSetup, set_up_cache
from pipetransformer.training.input_reader import InputReader, open_inputs
from pipetransformer.training.loader import BatchLoader, sample_source
from pipetransformer.training.mesh_setup import choose_meshes
from pipetransformer.training.planner_setup import make_planner
from pipetransformer.training.resume import Checkpoint, Resumed, resume
from pipetransformer.training.world import ONE_NODE, NodeLayout


@dataclass
class RunComponents:
    """One rank's data, model, planner, cache and runtime, as they stand before the first step.

    Attributes:
        first: The transition to the first plan of a new run.
        optim: The optimizer's specification with the peak learning rate.
        inputs: Reads the samples of all splits, ahead of the steps.
        order: Of the training samples.
        num_parameters: Of the whole model; on a mesh the stack has a rank's part.
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
    num_parameters: int
    resumed: Resumed | None = None


def wanted_format(config: Config) -> TextFormat | ImageFormat:
    """Returns the input that the model takes of data."""
    wanted = config.model.input_format()
    return TextFormat(**wanted) if config.model.modality == "text" else ImageFormat(**wanted)


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
    wanted = wanted_format(config)
    data = load_data(config.dataset, wanted)
    # what a rank sees in a few samples may be chance
    data = replace(data, random_transform=any_rank(data.random_transform, device))
    _check_names(data)
    _check_shapes(config, data)
    check_batch(config.batch_size, len(data.train))
    inputs, input_notes = open_inputs(config, (data.train, *data.evaluation), device)
    closing.enter_context(inputs)
    report.write("phase", message="reading the model")
    precision = PRECISIONS[config.precision]
    stack = config.model.build_meta(data.task.head, data.input_shape, config.seed)
    _check_lengths(data, stack)
    config.peft.apply(stack, config.seed)
    num_parameters = stack.num_parameters
    stack = stack.to(precision.param_dtype)
    config.freeze.check(stack.num_blocks)
    if config.parallel.arrangement == "sharded":
        config.optim.check_shards()
    resumed = None if checkpoint is None else resume(checkpoint, config, data, stack)
    check_chunks(config.parallel, device, dist.get_world_size())
    nodes = NodeLayout.here()
    sources = _sources(config, data, stack, nodes)
    optim = config.optim.for_model(sources[0].hidden_size, config.peft.rate_factor, config.model.pretrained)
    meshes, mesh_notes = choose_meshes(config, stack, optim, sources, dist.get_world_size(), nodes.devices_per_node)
    check_world(dist.get_world_size(), len(stack), config.batch_size, meshes)
    feature_format = FeatureFormat(sources[0].hidden_size, precision.param_dtype, config.cache.storage)
    tokenizer = wanted.tokenizer if isinstance(wanted, TextFormat) else None
    cache_setup = set_up_cache(
        config, stack, data, sources, feature_format, device, run_dir, closing, report, tokenizer
    )
    train, *evaluation = _loaders(config, data, sources, cache_setup, nodes, inputs)
    order, order_notes = sample_order(config, data)
    timeline = Timeline.of(config, len(data.train))
    settings = warnings(config, timeline.num_steps, timeline.decision_every)
    for text in (*settings, *data.warnings, *cache_setup.notes, *order_notes, *input_notes, *mesh_notes):
        report.write("warning", message=text)
    report.write("phase", message="measuring layers and links")
    planner = make_planner(
        stack, data.task.loss, train, optim, config.parallel, config.batch_size, device, precision, nodes, cache_setup,
        config.parks, order, None if config.profile.path is None else Path(config.profile.path),
        lambda message: report.write("phase", message=message), meshes, config.randomness,
    )  # fmt: skip
    offload = None if config.parallel.offload_path is None else Path(config.parallel.offload_path)
    context = RankContext.create(
        device, precision, config.parallel.timeout_s, config.randomness, config.compile, offload
    )
    runtime = closing.enter_context(
        ElasticRuntime(stack, data.task, optim, context, own_rates=config.freeze.has_own_rates, parks=config.parks)
    )
    loaders, first = (train, tuple(evaluation)), _first(planner, config.parallel)
    if note := unused_chunks(planner, first.after, config.parallel):
        report.write("warning", message=note)
    return RunComponents(
        data, stack, *loaders, planner, first, cache_setup, runtime, inputs, optim, order,
        num_parameters, resumed,
    )  # fmt: skip


def check_chunks(parallel: Parallel, device: torch.device, world_size: int) -> None:
    """Refuses chunks on several GPUs, before one of their plans is asked for in the middle of a run.

    Raises:
        UserError: Their gradients lie in host memory, where GPUs cannot sum them.
    """
    if parallel.device_chunk_gib is not None and device.type != "cpu" and world_size > 1:
        raise UserError(
            f"`device_chunk_gib`={parallel.device_chunk_gib:g} has the gradients of each rank in host memory, and "
            f"{world_size} GPUs sum theirs on the device; take `world_size`=1, or `arrangement`='sharded' for several"
        )


def _check_names(data: Data) -> None:
    """Refuses splits of one name: metrics and stored features are kept by it.

    Raises:
        UserError: With the name.
    """
    names = [split.name for split in (data.train, *data.evaluation)]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"two splits are called {name}; give the one to evaluate another name, as {name}_rows")


def _check_shapes(config: Config, data: Data) -> None:
    """Refuses pictures to evaluate on of another shape than those to train on, for which the model is built.

    Raises:
        UserError: With both shapes.
    """
    for split in data.evaluation if config.dataset.modality == "image" else ():
        if split.input_shape != data.train.input_shape:
            raise UserError(
                f"samples of the {split.name} split have shape {split.input_shape}, and those of the training data "
                f"{data.train.input_shape}; give model.image_size=, or a fixed Resize or CenterCrop in "
                "dataset.transforms"
            )


def _check_lengths(data: Data, stack: LayerStack) -> None:
    """Refuses texts of different lengths for layers that see the padding, so that batches and the cache would count.

    Raises:
        UserError: With the layer and the lengths.
    """
    for split in (data.train, *data.evaluation):
        lengths = split.lengths
        if stack.padding_counts_in and lengths is not None and lengths.min() < lengths.max():
            raise UserError(
                f"{stack.padding_counts_in} sees the padding of a batch, and texts of {split.name} have "
                f"{lengths.min()} to {lengths.max()} tokens; give texts of one length, or a pt.LayerStack whose layers "
                "take attention_mask"
            )


def unused_chunks(planner: Planner, first: Plan, parallel: Parallel) -> str:
    """Returns that all of a device fits the chunks' budget under the first plan; empty where it does not."""
    if parallel.device_chunk_gib is None or first.chunk_bytes:
        return ""
    taken_gib = gib_upwards(model_bytes(planner.profile, first))
    return (
        f"parallel.device_chunk_gib={parallel.device_chunk_gib:g} has no effect: weights, gradients and optimizer "
        f"state of a device take {taken_gib:.4g} GiB; give less to keep a part of them in host memory"
    )


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
