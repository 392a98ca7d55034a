"""What transitions between meshes move, as the runtime counts it and by the boxes of the ranks."""

import torch

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.mesh import Box, Style, area, intersection
from pipetransformer.models.split import parts_of
from support.cases import Case
from support.trainings import build, go, ids_of, rate


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


def bytes_lacking(case: Case, old: Plan, new: Plan) -> int:
    """What the ranks of a plan lack of its layers, with two moments of each weight that goes on training."""
    stack, num_bytes = case.stack(), 0.0
    for layer in range(new.first_layer, new.num_layers):
        copies = 3 if layer >= new.first_active_layer else 1
        parts = parts_of(stack[layer], is_head=layer == new.num_layers - 1)
        for name, parameter in stack[layer].by_name().items():
            share = 0.0
            for rank in range(new.num_devices):
                wanted, held = _box(new, layer, rank, parts[name].style), _box(old, layer, rank, parts[name].style)
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
