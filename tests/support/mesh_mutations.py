"""Features of a mesh, each broken on purpose, to see that the comparison with one process notices."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from pipetransformer.mesh import StageMesh
from pipetransformer.models import tp_plan
from pipetransformer.runtime import mesh_gradients, ring_attention
from pipetransformer.runtime.mesh import MeshAxis, RankMesh
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.mesh_rng import ShardedRng
from pipetransformer.runtime.stage import ParametersByLayer
from support.cases import Case
from support.mesh_training import train_on_mesh
from support.trainings import Trace

_sum, _around, _backward, _scatter, _part, _next_words = (
    mesh_gradients.sum_gradients,
    ring_attention._around,
    ring_attention._Scores.backward,
    ring_attention._scatter_tokens,
    tp_plan._part,
    ShardedRng._next_words,
)
Patch = tuple[Any, str, Any]


def _mean(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    _sum(gradients, group)
    for gradient in gradients:
        gradient /= group.size()


def _every_copy_counts(self: CopiedGradients, parameters: ParametersByLayer) -> ParametersByLayer:
    return parameters


def _cut_contiguously(name: str, parameter: Tensor, rule: Any) -> tp_plan.Part:
    return _part(name, parameter, rule.partition(":")[0] if isinstance(rule, str) else rule)


def _by_rank(self: ShardedRng, shape: torch.Size, device: torch.device) -> Tensor:
    return _next_words(self, shape, device) ^ (dist.get_rank() * 0x1234567)


def _mean_over_the_ring(x: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Tensor:
    return _scatter(x, axis, sizes) / axis.size


def _always_the_first_block(own: Tensor, axis: MeshAxis, sizes: Sequence[int]) -> Iterator[tuple[slice, Tensor]]:
    first: Tensor | None = None
    for columns, block in _around(own, axis, sizes):
        first = block if first is None else first
        yield columns, F.pad(first, (0, 0, 0, block.shape[-2] - first.shape[-2]))  # ranks may have a token more


def _first_keys_in_backward(ctx: Any, *gradients: Any) -> Any:
    with mock.patch.object(ring_attention, "_around", _always_the_first_block):
        return _backward(ctx, *gradients)


def _hidden_rows(self: RankMesh, x: Tensor) -> Tensor:
    return self.rows(x)


def _no_sum(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Leaves each copy its own part of the gradient."""


MUTATIONS: dict[str, tuple[StageMesh, Patch]] = {
    "copies have the mean": (StageMesh(tp=2), (mesh_gradients, "sum_gradients", _mean)),
    "copies have their own part": (StageMesh(tp=2), (mesh_gradients, "sum_gradients", _no_sum)),
    "a copy counts twice": (StageMesh(tp=2), (CopiedGradients, "counted", _every_copy_counts)),
    "the loss is that of one rank": (StageMesh(tp=2), (StageMesh, "loss_copies", 1)),
    "qkv is cut contiguously": (StageMesh(tp=2), (tp_plan, "_part", _cut_contiguously)),
    "masks by rank": (StageMesh(tp=2), (ShardedRng, "_next_words", _by_rank)),
    "ring gradients have the mean": (StageMesh(cp=2), (ring_attention, "_scatter_tokens", _mean_over_the_ring)),
    "the ring stands still": (StageMesh(cp=2), (ring_attention, "_around", _always_the_first_block)),
    "keys of the first hop in backward": (
        StageMesh(cp=2),
        (ring_attention._Scores, "backward", staticmethod(_first_keys_in_backward)),
    ),
    "attention draws for the hidden rows": (
        StageMesh(dp_shard=1, tp=2, algorithm="3d"),
        (RankMesh, "inner_rows", _hidden_rows),
    ),
}


def is_equal_when_mutated(case: Case, name: str, reference: Trace) -> bool:
    """Whether nobody notices; every rank calls it."""
    mesh, (owner, attribute, broken) = MUTATIONS[name]
    with mock.patch.object(owner, attribute, broken):
        trace = train_on_mesh(case, mesh, checks_copies=False)
    pairs = [(torch.tensor(trace.losses), torch.tensor(reference.losses))]
    pairs += [(torch.tensor(trace.norms), torch.tensor(reference.norms))]
    pairs += [(tensor, reference.weights[name]) for name, tensor in trace.weights.items()]
    return all(torch.allclose(one, other, rtol=0, atol=1e-7) for one, other in pairs)


def masks(
    mesh: StageMesh, keys: Tensor, place: str, shape: Callable[[int], tuple[int, ...]], token_sizes: Sequence[int]
) -> list[Tensor]:
    """The mask that each rank of a mesh draws first in a layer; no processes are needed.

    Args:
        shape: Of the mask of a rank with so many tokens, (B, ...).
    """
    drawn: list[Tensor] = []
    for rank in range(mesh.num_ranks):
        own = RankMesh(mesh, rank, {})
        rng = ShardedRng(keys, own, token_sizes)
        rng.layer(3)
        own.place = place
        drawn.append(rng._fill(torch.empty(shape(token_sizes[own.tokens.index]), dtype=torch.float64), 0.7))
    return drawn
