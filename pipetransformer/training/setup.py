"""Builds what a run needs, in the order in which one thing asks for another: data, model, profile, planner."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autodp.topology import Position
from pipetransformer.autopipe.cluster import Cluster, Link
from pipetransformer.autopipe.pins import check_world
from pipetransformer.autopipe.plan import Plan
from pipetransformer.config import Config, Parallel
from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.link import measure_all_reduces, measure_messages
from pipetransformer.runtime.precision import PRECISIONS, Precision
from pipetransformer.runtime.profile import profile
from pipetransformer.training.feed import Feed
from pipetransformer.training.node import Node, devices_per_node
from pipetransformer.training.optim import OptimizerSpec
from pipetransformer.training.planner import Planner

GIB = 1 << 30


@dataclass
class Prepared:
    """Everything that stands before the first step."""

    data: Data
    stack: LayerStack
    train: Feed
    evaluation: tuple[Feed, ...]
    planner: Planner
    first_plan: Plan
    device: torch.device
    precision: Precision


def prepare(config: Config, device: torch.device) -> Prepared:
    """Loads data and model, measures the layers, and makes the planner.

    Raises:
        ValueError: Data, model, batch and devices do not fit together.
    """
    wanted = config.model.input_format()
    data: Data = config.dataset.load(
        ImageFormat(**wanted) if config.model.modality == "image" else TextFormat(**wanted)
    )
    if config.batch_size > len(data.train):
        raise ValueError(
            f"batch_size={config.batch_size} is larger than the {len(data.train)} training samples; lower batch_size"
        )
    precision = PRECISIONS[config.precision]
    stack = config.model.outline(data.task, data.num_outputs, data.input_shape, config.seed).to(precision.weights)
    check_world(dist.get_world_size(), len(stack), config.batch_size)
    feeds = [Feed(split, stack.hidden_shape, config.seed) for split in (data.train, *data.evaluation)]
    planner = make_planner(stack, feeds[0], config.optim, config.parallel, config.batch_size, device, precision)
    return Prepared(data, stack, feeds[0], tuple(feeds[1:]), planner, planner.initial(), device, precision)


def make_planner(
    stack: LayerStack, feed: Feed, optim: OptimizerSpec, parallel: Parallel, batch_size: int, device: torch.device,
    precision: Precision,
) -> Planner:  # fmt: skip
    """Measures the layers on the first samples of a feed, and the links; every rank calls it."""
    share = max(2, -(-batch_size // dist.get_world_size()))
    sizes = max(1, share // 4), share
    small, large = (_whole_batch(feed, len(stack), size).to(device, precision.weights) for size in sizes)
    measured = profile(stack, (small, large), optim.build, optim.state_factor, device, precision)
    return Planner(measured, _cluster(parallel.device_memory_gib, device), parallel, batch_size)


def _cluster(budget_gib: float | None, device: torch.device) -> Cluster:
    memory, num_together = None if budget_gib is None else int(budget_gib * GIB), devices_per_node()
    pairs = *measure_messages(device, num_together), *measure_all_reduces(device, num_together)
    link, node_link, ring, node_ring = (Link(*pair) if pair else None for pair in pairs)
    assert link is not None
    return Cluster(dist.get_world_size(), memory, link, node_link, num_together, ring, node_ring)


def _whole_batch(feed: Feed, num_layers: int, size: int) -> Batch:
    """The first samples on one device, as a plan with one stage would see them."""
    whole = Plan(num_frozen=0, cache_level=0, stages=((0, num_layers - 1),), num_replicas=1, num_microbatches=1)
    ids = np.arange(size) % len(feed.split)
    return feed.batch(ids, whole, Position(replica=0, device=0))[0]


def open_cache(prepared: Prepared, folder: Path) -> AutoCache:
    """The cache of this node, known to all feeds."""
    node = Node.here()
    size, dtype = prepared.train.hidden_size, prepared.precision.weights
    cache = AutoCache(folder, size, dtype, node.worker, node.num_workers, dist.barrier)
    for feed in (prepared.train, *prepared.evaluation):
        feed.cache = cache
    return cache
