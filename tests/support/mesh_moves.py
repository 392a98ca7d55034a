"""What transitions between meshes move, as the runtime counts it and by the boxes of the ranks."""

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.autodp.topology import Topology
from pipetransformer.autodp.transition import Move, Transition
from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import Box, StageMesh, Style, area, intersection
from pipetransformer.models.split import parts_of
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime import engine, piece_transfer
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.piece_transfer import Entry, Key, _Change
from pipetransformer.runtime.resident import ResidentLayers
from support.cases import Case
from support.mesh_plans import plan_on
from support.trainings import Plans, build, go, ids_of, rate, train_elastic


def bytes_of_transitions(case: Case, plans: tuple[Plan, ...], folder: str) -> list[int]:
    """Takes a step under each plan, and returns the bytes of each transition between them; every rank calls it."""
    runtime, loader, groups = build(case, folder)
    moved: list[int] = []
    for step, plan in enumerate(plans):
        report = go(runtime, loader, plan, step)
        if step:
            moved.append(report.bytes_moved)
        runtime.train_step(loader, ids_of(case, step), step, rate(step))
    loader.cache_session.release()
    loader.close()
    groups.close()
    return moved


def bytes_lacking(case: Case, old: Plan, new: Plan, last: Transition | None = None) -> int:
    """What the ranks of a plan lack of its layers, with two moments of each weight that goes on training or is parked.

    Args:
        last: To the old plan; tells where the layers are that it does not run.
    """
    stack, num_bytes = case.stack(), 0.0
    for layer in range(new.first_layer, new.num_layers):
        copies = 3 if case.parks or layer >= new.first_active_layer else 1
        parts = parts_of(stack[layer], is_head=layer == new.num_layers - 1)
        for name, parameter in stack[layer].by_name().items():
            share = 0.0
            for rank in range(new.num_devices):
                wanted, held = _box(new, layer, rank, parts[name].style), _box(old, layer, rank, parts[name].style)
                if last is not None and layer < old.first_layer and rank in last.placement[layer]:
                    mesh = last.meshes[layer]
                    held = mesh.box(parts[name].style, rank % mesh.num_ranks)
                if wanted is not None:
                    common = None if held is None else intersection(wanted, held)
                    share += float(area(wanted) - (0 if common is None else area(common)))
            num_bytes += share * copies * parameter.numel() * torch.float64.itemsize
    return round(num_bytes)


def _box(plan: Plan, layer: int, rank: int, style: Style) -> Box | None:
    """Returns what a rank has of the parameters of a style; ``None`` where it does not run the layer."""
    topology = Topology(plan, rank)
    if topology.is_idle or layer not in topology.layers:
        return None
    return plan.mesh.box(style, topology.mesh_rank)


class WithScalar(Case):
    """A model whose layers have a buffer without dimensions."""

    def stack(self) -> LayerStack:
        stack = super().stack()
        for index in range(len(stack)):
            stack[index].module.register_buffer("number", torch.tensor(float(index)))
        return stack


def scalars_after(case: WithScalar, plans: tuple[Plan, ...], folder: str) -> dict[int, float]:
    """Goes from plan to plan, and returns the number in each layer that this rank has; every rank calls it."""
    runtime, loader, groups = build(case, folder)
    for step, plan in enumerate(plans):
        go(runtime, loader, plan, step)
    found = {layer: dict(runtime.resident.stack[layer].module.named_buffers())["number"].item()
             for layer in (runtime.topology.layers if runtime.topology is not None else ())}  # fmt: skip
    loader.cache_session.release()
    loader.close()
    groups.close()
    return found


def held_open(case: Case, plans: tuple[Plan, ...], num_steps: int, every: int, folder: str) -> tuple[list[int], bool]:
    """Goes round the plans, a transition each so many steps; every rank calls it.

    Returns:
        Groups, threads and file descriptors of this rank together each time it comes back to the first plan, and
        whether all copies of a number were equal bit for bit at the end of each plan.
    """
    runtime, loader, groups = build(case, folder)
    counts, equal = list[int](), True
    for step in range(num_steps):
        index, is_transition = step // every % len(plans), step % every == 0
        if is_transition:
            equal = equal and (not step or _copies_are_equal(runtime))
            go(runtime, loader, plans[index], step)
            if index == 0:
                counts.append(len(groups) + threading.active_count() + len(os.listdir("/proc/self/fd")))
        runtime.train_step(loader, ids_of(case, step), step, rate(step))
    equal = equal and _copies_are_equal(runtime)
    loader.cache_session.release()
    loader.close()
    groups.close()
    return counts, equal


def _copies_are_equal(runtime: ElasticRuntime) -> bool:
    """Compares what ranks have of the same box of a parameter and its moments, bit for bit."""
    plan, rank, own = runtime.plan, dist.get_rank(), dict[tuple[object, ...], list[bytes]]()
    assert plan is not None
    state = {} if runtime.optimizer is None else runtime.optimizer.state
    for layer in runtime.topology.layers if runtime.topology is not None else ():
        module = runtime.resident.stack[layer]
        for name, parameter in module.by_name().items():
            style = runtime.resident.cuts.parts(layer)[name][0].style
            box = plan.mesh.box(style, rank % plan.mesh.num_ranks)
            moments = [value for key, value in sorted(state.get(parameter, {}).items()) if value.ndim]
            own[name, box] = [tensor.detach().numpy().tobytes() for tensor in (parameter, *moments)]
    gathered: list[dict[tuple[object, ...], list[bytes]]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, own)
    return all(
        numbers == part[key]
        for key, numbers in own.items()
        for part in gathered
        if key in part and len(numbers) == len(part[key])
    )


_put_together, _entries = _Change._put_together, piece_transfer._entries


def _without_moments(self: _Change, old: Mapping[Key, Tensor], received: Mapping[Move, Tensor]) -> None:
    _put_together(self, old, received)
    self.resident.optimizer_state.pop(self.layer, None)


def _unpacked(resident: ResidentLayers, layer: int) -> Iterator[Entry]:
    """Takes queries, keys and values for one matrix."""
    for entry in _entries(resident, layer):
        yield entry._replace(part=replace(entry.part, groups=1))


def _no_sum(parameters: Iterable[nn.Parameter], replicas: ProcessGroup) -> None:
    """Leaves each replica the gradients of its own samples."""


CHANGED: Plans = {0: plan_on(StageMesh(tp=2)), 2: plan_on(StageMesh(dp_shard=2))}
MUTATIONS: dict[str, tuple[Plans, tuple[object, str, object]]] = {
    "moments are left behind": (CHANGED, (_Change, "_put_together", _without_moments)),
    "packed matrices move as one": (CHANGED, (piece_transfer, "_entries", _unpacked)),
    "2.5d without the sum over replicas": (
        {0: plan_on(StageMesh(tp=2, algorithm="2d"), replicas=2)},
        (engine, "all_reduce_gradients", _no_sum),
    ),
}


def losses_when_mutated(case: Case, name: str, folder: str) -> list[float]:
    """Every rank calls it."""
    plans, broken = MUTATIONS[name]
    with mock.patch.object(*broken):
        return train_elastic(case, plans, folder).losses
