"""Measures the part of each layer that a rank of a mesh has, before any mesh is formed.

The rank computes what rank 0 of the mesh would, with exchanges that are pretended, and whose bytes are counted
(:mod:`~pipetransformer.profiling.pretended`); :mod:`pipetransformer.autopipe.meshes` turns them into seconds.

A link is measured while both of its ends are ready. In a step an exchange waits for the rank that computes longest, and
begins on cores that have just computed. So a block runs once more with a real exchange at each pretended one, and
without, in turns. What the exchanges add, without their bytes over the link, is what each of them takes besides::

    rank 0    [ part of a block ]      waits      [sum][ part of a block ][sum]
    rank 1    [ part of a block, a little longer ][sum][ part of a block ][sum]
"""

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.autopipe.cluster import Cluster
from pipetransformer.autopipe.profile import AffineTime, LayerShard, MeshProfile, Traffic, Volume
from pipetransformer.mesh import StageMesh
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.profiling.layers import (
    Batches,
    kinds_of_layers,
    layer_profile,
    of_each_kind,
    with_untouched_bytes,
)
from pipetransformer.profiling.network import FEW_BYTES, destroyed
from pipetransformer.profiling.passes import has_input_grad, loss_of_rows, trainable
from pipetransformer.profiling.pretended import Meet, PretendedMesh, Tally, nothing
from pipetransformer.profiling.timing import ENOUGH_S, added_seconds
from pipetransformer.profiling.update import measure_idle_update
from pipetransformer.runtime.batch import Batch, SampleLoss
from pipetransformer.runtime.embedding_gradients import embedding_weights
from pipetransformer.runtime.groups import batch_scheduled
from pipetransformer.runtime.mesh_stage import MeshStage
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.tensor_parallel import shard_layer

FEWEST_ROUNDS, MOST_ROUNDS, EXCHANGES_OF_A_ROUND = 5, 25, 12


class ShardedLayer:
    """The part of a layer that a rank of a mesh has, as it runs in a step.

    Args:
        layer: With storage, sharded.
        index: In the model.
        num_layers: Of the model.
        loss: Of the head; ``None`` for a layer below.
    """

    draws_by_sample = True

    def __init__(
        self, layer: Layer, index: int, num_layers: int, mesh: PretendedMesh, precision: Precision,
        loss: SampleLoss | None,
    ) -> None:  # fmt: skip
        self.module: nn.Module = MeshStage(
            {index: layer}, {index: trainable(layer)}, precision, False, mesh, num_layers
        )
        self.mesh, self.loss = mesh, None if loss is None else partial(loss_of_rows, loss, mesh.rows)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        self.mesh.num_tokens = batch.hidden_shape[1]
        return self.module(x, keys=batch.keys, **batch.context)


def profile_mesh(
    stack: LayerStack, loss: SampleLoss, mesh: StageMesh, batches: Batches, optimizer: OptimizerSpec,
    device: torch.device, precision: Precision, cluster: Cluster,
) -> MeshProfile:  # fmt: skip
    """Measures the layers on a mesh, as :func:`~pipetransformer.profiling.layers.profile` does. All ranks call it.

    Args:
        stack: The model, whole.
        loss: Of the head's output.
        batches: Of the rows that the ranks of the mesh split no further than by :attr:`StageMesh.rows_multiple`.
        cluster: Has the links, by which the bytes of exchanges are counted.

    Raises:
        UserError: A layer cannot be split.
    """
    known: dict[object, LayerShard] = {}
    exchange: AffineTime | None = None
    kinds, pretended, idle = (
        kinds_of_layers(stack),
        PretendedMesh(mesh),
        measure_idle_update(optimizer, device, has_parts=True),
    )
    sizes = [len(batch.ids) // mesh.rows_multiple for batch in batches]
    xs = [batch.inputs for batch in batches if batch.inputs is not None]
    for index, layer in of_each_kind(stack, device):
        is_head = index == len(stack) - 1
        shard_layer(layer, pretended, is_head)
        runs = ShardedLayer(layer, index, len(stack), pretended, precision, loss if is_head else None)
        measured = layer_profile(runs, index, xs, batches, sizes, optimizer, precision, idle, has_parts=True)
        # each rank may touch other rows
        embeddings, num_shares = embedding_weights(stack, index, layer), max(mesh.num_ranks, dist.get_world_size())
        measured = with_untouched_bytes(measured, runs, xs[1], batches[1], embeddings, num_shares)
        counted = [_traffic(runs, index, x, batch) for x, batch in zip(xs[:2], batches[:2], strict=True)]
        passes = [_between((sizes[0], sizes[1]), *tallies) for tallies in zip(*counted, strict=True)]
        known[kinds[index]] = LayerShard(
            measured, *passes, copied_bytes=_copied_bytes(layer, mesh, measured.untouched_bytes)
        )
        if index == 1:
            block = _Exchanges(runs, index, device, cluster)
            pairs = zip(xs[:2], batches[:2], map(measured.seconds, sizes[:2]), strict=True)
            small_s, large_s = (block.seconds(*pair) for pair in pairs)
            exchange = AffineTime.through((sizes[0], sizes[1]), (small_s, large_s)) if large_s else None
        with torch.no_grad():
            runs.module.eval()
            xs = [runs(x, batch) for x, batch in zip(xs, batches, strict=True)]
        del layer, runs  # one at a time, as of_each_kind asks
    return MeshProfile(mesh, tuple(known[kind] for kind in kinds), exchange)


class _Exchanges:
    """Measures what each exchange of a block takes besides its bytes. All ranks make the same calls.

    The first ranks of the world meet, as many as a mesh has, while all compute.

    Args:
        runs: The block.
        index: In the model.
        cluster: Has the links.
    """

    def __init__(self, runs: ShardedLayer, index: int, device: torch.device, cluster: Cluster) -> None:
        self._runs, self._index, self._device = runs, index, device
        self._link, self._sum_link = cluster.link, cluster.allreduce_link or cluster.link

    def seconds(self, x: Tensor, batch: Batch, pass_s: float) -> float:
        """Measures the exchanges of a batch.

        Args:
            pass_s: Seconds of the block forward and backward, equal on every rank.

        Returns:
            Seconds of an exchange without its bytes, the mean over the ranks that meet, equal on every rank; zero where
            the world has too few of them, or the block has no exchange.
        """
        num_ranks = self._runs.mesh.mesh.num_ranks
        once = partial(_passes, self._runs, x, batch, has_input_grad(x, self._index))
        tally = sum(once(), Counter[str]())
        number = tally["collectives"] + tally["messages"]
        if dist.get_world_size() < num_ranks or number == 0:
            return 0.0
        num_passes, num_rounds = _repeats(pass_s, number)

        def passes() -> None:
            for _ in range(num_passes):
                once()

        added_s = self._added_seconds(passes, num_ranks, num_rounds) / num_passes - self._link_seconds(tally)
        self._runs.module.zero_grad(set_to_none=True)
        mean = torch.tensor(added_s if dist.get_rank() < num_ranks else 0.0, dtype=torch.float64, device=self._device)
        dist.all_reduce(mean)
        return max(0.0, mean.item() / num_ranks / number)

    def _added_seconds(self, passes: Callable[[], None], num_ranks: int, num_rounds: int) -> float:
        """Returns the seconds that passes take more with exchanges than without."""
        exchanges = self._runs.mesh.exchanges
        with batch_scheduled(self._device.type):
            group = dist.new_group(range(num_ranks))
        with ExitStack() as closing:
            meet: Meet = nothing
            if dist.get_rank() < num_ranks:
                assert isinstance(group, ProcessGroup)
                closing.enter_context(destroyed(group))
                meet = partial(_meet, group)
            closing.callback(setattr, exchanges, "meet", nothing)

            def passes_that_meet() -> None:
                exchanges.meet = meet
                passes()
                exchanges.meet = nothing

            begin = partial(meet, "all_reduce", 1, torch.zeros((), device=self._device))
            return added_seconds(passes, passes_that_meet, begin, num_rounds, self._device)

    def _link_seconds(self, tally: Tally) -> float:
        collective_s = tally["collectives_bytes"] / self._sum_link.bandwidth_bytes_per_s
        return collective_s + tally["messages_bytes"] / self._link.bandwidth_bytes_per_s


def _repeats(pass_s: float, number: int) -> tuple[int, int]:
    """Returns the passes of a round, for several exchanges in it, and the rounds, as many as take about a second.

    Args:
        number: Of the exchanges of a pass.
    """
    affordable = ENOUGH_S / max(pass_s, 1e-6)  # each is done twice
    num_passes = int(min(-(-EXCHANGES_OF_A_ROUND // number), max(1, affordable // FEWEST_ROUNDS)))
    return num_passes, int(min(MOST_ROUNDS, max(FEWEST_ROUNDS, affordable // num_passes)))


def _meet(group: ProcessGroup, name: str, num_ranks: int, own: Tensor) -> None:
    """Makes a pretended exchange, or a small one in its place where its axis is not all ranks, or a ring."""
    if name == "rotate" or num_ranks != group.size():
        dist.all_reduce(own.new_zeros(FEW_BYTES // own.element_size()), group=group)
    elif name == "all_gather":
        dist.all_gather_into_tensor(own.new_empty(num_ranks * own.numel()), own.contiguous().flatten(), group=group)
    elif name == "reduce_scatter":
        flat = own.contiguous().flatten()
        dist.reduce_scatter_tensor(flat.new_empty(flat.numel() // num_ranks), flat, group=group)
    else:
        dist.all_reduce(own.detach().clone(), group=group)


def _traffic(runs: ShardedLayer, index: int, x: Tensor, batch: Batch) -> tuple[Tally, Tally, Tally, Tally]:
    """Counts the exchanges of a layer's forward pass, of its input's gradient, of its weights' gradient, and of its
    backward pass where the input takes no gradient."""
    weights, wants_grad = trainable(runs.module), has_input_grad(x, index)
    lowest = _passes(runs, x, batch, wants_grad=False)[1]
    forward, backward = _passes(runs, x, batch, wants_grad)
    for weight in weights:
        weight.requires_grad_(False)
    of_input = _passes(runs, x, batch, wants_grad)[1]
    for weight in weights:
        weight.requires_grad_(True)
    runs.module.zero_grad(set_to_none=True)
    return forward, of_input, backward - of_input, lowest


def _passes(runs: ShardedLayer, x: Tensor, batch: Batch, wants_grad: bool) -> tuple[Tally, Tally]:
    tally = runs.mesh.exchanges.tally
    tally.clear()
    output = runs(x.detach().requires_grad_(wants_grad), batch)
    forward = Counter(tally)
    tally.clear()
    if output.requires_grad:
        output.sum().backward()
    return forward, Counter(tally)


def _between(sizes: tuple[int, int], small: Tally, large: Tally) -> Traffic:
    """Returns the line through the exchanges of a small and a large batch."""
    return Traffic(*(_volume(kind, sizes, small, large) for kind in ("collectives", "messages")))


def _volume(kind: str, sizes: tuple[int, int], small: Tally, large: Tally) -> Volume:
    small_bytes, large_bytes = small[f"{kind}_bytes"], large[f"{kind}_bytes"]
    per_sample = (large_bytes - small_bytes) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    return Volume(large[kind], large_bytes - per_sample * sizes[1], per_sample)


def _copied_bytes(layer: Layer, mesh: StageMesh, untouched: int) -> tuple[tuple[int, int], ...]:
    """Returns :attr:`LayerShard.copied_bytes`; ``untouched`` bytes of embeddings are not summed."""
    found: Counter[int] = Counter()
    if untouched and mesh.num_copies("embedding") > 1:
        found[mesh.num_copies("embedding")] -= untouched
    for name, parameter in layer.by_name().items():
        ranks = mesh.num_copies(layer.cuts[name][0].style)
        if ranks > 1 and parameter.requires_grad:
            found[ranks] += parameter.nbytes
    return tuple(sorted(found.items()))
