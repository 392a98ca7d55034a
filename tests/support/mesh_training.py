"""The training of a case by one mesh: all layers as one stage, of which each rank has its part."""

import copy
import tempfile
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import Axes, StageMesh
from pipetransformer.models.tp_plan import Part
from pipetransformer.runtime.gradients import squared_gradient_norms, unscale_and_clip
from pipetransformer.runtime.mesh import MeshAxis, RankMesh
from pipetransformer.runtime.mesh_gradients import CopiedGradients
from pipetransformer.runtime.mesh_stage import MeshStage
from pipetransformer.runtime.mesh_transfer import pack, unpack
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.rng import sample_keys
from pipetransformer.runtime.tensor_parallel import ShardedLayerNorm, shard_layer
from support.cases import CLIP_NORM, OPTIMIZERS, SEED, Case
from support.comm_meter import comm_meter
from support.trainings import Trace, _divisor, _read, build, go, ids_of, rate

Parts = dict[str, tuple[Part, nn.Parameter]]


class MeshTrainer:
    """One rank of it.

    Args:
        case: In float64.
    """

    def __init__(self, case: Case, mesh: StageMesh, closing: ExitStack) -> None:
        assert mesh.num_ranks == dist.get_world_size()
        self.case, self.mesh, self.checks_copies = case, make_mesh(mesh, closing), True
        self.stack, self.split = case.stack(), case.split()
        self.parts: Parts = {}
        layers: dict[int, nn.Module] = {}
        self.active: dict[int, list[nn.Parameter]] = {}
        for index in range(len(self.stack)):
            layer = layers[index] = self.stack[index]
            shard_layer(layer, self.mesh, is_head=index == len(self.stack) - 1)
            named = {name: (layer.cuts[name][0], parameter) for name, parameter in layer.by_name().items()}
            self.parts |= named
            self.active[index] = [parameter for _, parameter in named.values()]
        self.stage = MeshStage(layers, self.active, PRECISIONS[case.precision], False, self.mesh, len(self.stack))
        self.gradients = CopiedGradients(self.mesh, {parameter: part for part, parameter in self.parts.values()})
        optimizer = OPTIMIZERS[case.optimizer].build([parameter for _, parameter in self.parts.values()])
        assert optimizer is not None
        self.optimizer = optimizer

    def forward(self, step: int) -> Tensor:
        """Computes this rank's part of the loss of the global batch."""
        ids = ids_of(self.case, step)
        rows = np.array_split(ids, self.mesh.mesh.dp_shard)[self._row_part]
        inputs, context, _ = _read(self.split, ids, torch.float64)
        own = np.array([int(np.flatnonzero(ids == row)[0]) for row in rows])
        self.mesh.num_tokens = self.stack.hidden_shape(inputs)[1]
        keys = sample_keys(SEED, step, rows)
        output = self.stage(inputs[own], keys=keys, **{name: t[own] for name, t in context.items()})
        targets = self.mesh.rows(_read(self.split, ids, torch.float64)[2][own])
        return self.case.task.loss(output, targets).sum() / _divisor(self.split, ids) / self.mesh.mesh.loss_copies

    @property
    def _row_part(self) -> int:
        return self.mesh.axes["x" if self.mesh.mesh.algorithm == "3d" else "dp_shard"].index

    def step(self, step: int) -> tuple[float, float]:
        """Takes one; returns the loss and the norm of the gradient."""
        self.optimizer.zero_grad()
        loss = self.forward(step)
        loss.backward()
        self.gradients.all_reduce()
        squared = squared_gradient_norms(self.gradients.counted(self.active), len(self.stack), torch.device("cpu"))
        sums = torch.cat([squared, loss.detach()[None]])
        dist.all_reduce(sums)
        norm = sums[:-1].sum().sqrt().item()
        unscale_and_clip(self.active, norm, CLIP_NORM, 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(step)
        self.optimizer.step()
        return sums[-1].item(), norm

    def whole(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Puts the parts of all ranks together on every rank; asserts that copies are equal bit for bit."""
        original = {name: p.shape for layer in self.case.stack().layers for name, p in layer.by_name().items()}  # type: ignore[operator, union-attr]
        places = {name: self._places(name, original[name]) for name in values}
        packed: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(packed, (pack(places), pack(values)))
        gathered = [(unpack(its_places), unpack(its_values)) for its_places, its_values in packed]
        found: dict[str, Tensor] = {}
        for name in values:
            whole = torch.full((original[name].numel(),), torch.nan, dtype=torch.float64)
            for its_places, its_values in gathered:
                at, value = its_places[name], its_values[name]
                is_first = bool(whole[at].isnan().all())
                is_equal = is_first or torch.equal(whole[at], value.flatten())
                assert is_equal or not self.checks_copies, f"copies of {name} differ"
                whole[at] = value.flatten().double()
            assert not whole.isnan().any(), name
            found[name] = whole.view(original[name])
        return found

    def _places(self, name: str, shape: torch.Size) -> Tensor:
        part, _ = self.parts[name]
        numbers = torch.arange(shape.numel()).view(shape)
        return part.cut(numbers, self.mesh.mesh.box(part.style, self.mesh.rank)).flatten()


def make_mesh(mesh: StageMesh, closing: ExitStack) -> RankMesh:
    rank, groups = dist.get_rank(), dict[Axes, Any]()
    for axes, ranks in mesh.groups():
        group = dist.new_group(list(ranks))
        if rank in ranks:
            groups[axes] = group
            closing.callback(dist.destroy_process_group, group)
    return RankMesh(mesh, rank, groups)


def train_on_mesh(case: Case, mesh: StageMesh, checks_copies: bool = True) -> Trace:
    """Every rank calls it."""
    with ExitStack() as closing:
        trainer, trace = MeshTrainer(case, mesh, closing), Trace()
        trainer.checks_copies = checks_copies
        for step in range(case.num_steps):
            loss, norm = trainer.step(step)
            trace.losses.append(loss)
            trace.norms.append(norm)
        trace.weights = trainer.whole({name: parameter for name, (_, parameter) in trainer.parts.items()})
        states = {
            name: trainer.optimizer.state[p] for name, (_, p) in trainer.parts.items() if p in trainer.optimizer.state
        }
        for key in sorted({key for state in states.values() for key in state}):
            values = {name: torch.as_tensor(state[key]) for name, state in states.items()}
            whole = values if not next(iter(values.values())).ndim else trainer.whole(values)
            trace.moments |= {f"{name}/{key}": value.double() for name, value in whole.items()}
        return trace


def bytes_of_a_step(case: Case, mesh: StageMesh) -> tuple[int, int]:
    """Bytes that this rank receives in forward and backward of one step, without the sums at its end."""
    with ExitStack() as closing, comm_meter() as received:
        trainer = MeshTrainer(case, mesh, closing)
        loss = trainer.forward(0)
        forward = received.num_bytes
        loss.backward()
        return forward, received.num_bytes - forward


def held_fraction(case: Case, mesh: StageMesh) -> float:
    """The share of the blocks' numbers that this rank holds."""
    with ExitStack() as closing:
        trainer, whole = MeshTrainer(case, mesh, closing), case.stack()
        blocks = range(1, len(whole) - 1)
        own, all_ = (
            sum(p.numel() for index in blocks for p in stack[index].parameters()) for stack in (trainer.stack, whole)
        )
        return own / all_


def evaluate_on_mesh(case: Case, plan: Plan, num_samples: int) -> tuple[list[int], Tensor]:
    """The ids and the outputs of all ranks in evaluation, in the order of the ids; every rank calls it."""
    runtime, loader, groups = build(case, tempfile.gettempdir())
    go(runtime, loader, plan)
    own = runtime.evaluate(loader, np.arange(num_samples))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, None if own is None else (own.ids, own.outputs))
    loader.close()
    groups.close()
    ids = np.concatenate([part[0] for part in gathered if part])
    outputs = torch.cat([part[1] for part in gathered if part])
    order = np.argsort(ids, kind="stable")
    return ids[order].tolist(), outputs[order]


@torch.no_grad()
def evaluate_alone(case: Case, num_samples: int) -> Tensor:
    """The same in one process."""
    inputs, context, _ = _read(case.split(), np.arange(num_samples), torch.float64)
    return case.stack().eval()(inputs, **context)


def addend(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank adds: numbers of several magnitudes, so that the order of rounding shows."""
    draws = torch.Generator().manual_seed(rank)
    magnitude = 2.0 ** torch.randint(-4, 4, shape, generator=draws)
    return (torch.randn(shape, generator=draws) * magnitude).to(dtype)


def sums_along_an_axis(
    mesh: StageMesh, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Sums over the only axis of a mesh.

    Returns:
        The sum; this rank's part of it, where the first dimension has parts; and what the rank has added, afterwards.
    """
    with ExitStack() as closing:
        (axis,) = (axis for axis in make_mesh(mesh, closing).axes.values() if axis.size > 1)
        own = addend(dist.get_rank(), shape, dtype)
        part = None if shape[0] % axis.size else axis.reduce_scatter(own, 0)
        return axis.all_reduce(own), part, own


def normed_in_parts(options: dict[str, bool]) -> tuple[list[Tensor], list[Tensor]]:
    """Returns this rank's half of a norm's output and gradients, and that of torch's norm of the whole."""
    torch.manual_seed(0)
    whole = nn.LayerNorm(8, dtype=torch.float64, **options)
    for parameter in whole.parameters():
        nn.init.normal_(parameter)
    x, gradient = torch.randn(2, 3, 4, 8, dtype=torch.float64)
    axis = MeshAxis(2, dist.get_rank(), dist.group.WORLD)
    half = copy.deepcopy(whole)
    for name, parameter in whole.named_parameters():
        setattr(half, name, nn.Parameter(_half(parameter.detach(), axis)))
    parts = ShardedLayerNorm(half, axis)
    return _passes(parts, _half(x, axis), _half(gradient, axis)), [
        _half(tensor, axis) for tensor in _passes(whole, x, gradient)
    ]


def _half(tensor: Tensor, axis: MeshAxis) -> Tensor:
    return tensor.chunk(2, -1)[axis.index].contiguous()


def _passes(norm: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    outputs = norm(x)
    return [outputs.detach(), *torch.autograd.grad(outputs, [x, *norm.parameters()], gradient)]
