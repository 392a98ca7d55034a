"""The stage of a plan in its kind: plain, sharded, on a mesh, or of layers that come from the host."""

from __future__ import annotations

from torch import nn

from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import UserError
from pipetransformer.runtime.chunks import ChunkedStage, Chunks
from pipetransformer.runtime.compiled import BlockCompiler
from pipetransformer.runtime.fsdp import FsdpLayers, ShardedStage
from pipetransformer.runtime.groups import RankContext
from pipetransformer.runtime.mesh_layers import MeshLayers
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.rng import make_randomness
from pipetransformer.runtime.stage import ParametersByLayer, Stage


def make_stage(
    plan: Plan, index: int, resident: ResidentLayers, context: RankContext, compiler: BlockCompiler | None,
    shards: FsdpLayers | None, mesh: MeshLayers | None,
) -> Stage:  # fmt: skip
    """Returns a stage of a plan.

    Args:
        index: Of the stage.
        resident: Has its layers, in their form under the plan.
        compiler: Compiles blocks of plain stages.
        shards: The layers under FSDP; ``None`` without.
        mesh: The layers on a mesh; ``None`` without.

    Raises:
        UserError: The layers come from the host, and the devices cannot sum gradients that lie there.
    """
    stack, first_active, precision = resident.stack, plan.first_active_layer, context.precision
    layers: dict[int, nn.Module] = {layer: stack[layer] for layer in plan.stage_layers(index)}
    active = {layer: stack.trainable(layer, first_active) for layer in layers if layer >= first_active}
    randomness = make_randomness(context.randomness, context.device)
    if shards is not None:
        return ShardedStage(layers, active, precision, plan.recompute, randomness, shards=shards)
    if mesh is not None:
        reads_features = index == 0 and plan.first_layer > 0
        return mesh.stage(layers, active, precision, plan.recompute, reads_features)
    if plan.chunk_bytes:
        chunks = _chunks(plan, layers, active, resident, context)
        return ChunkedStage(layers, active, precision, randomness, chunks)
    return Stage(layers, active, precision, plan.recompute, randomness, compiler)


def _chunks(
    plan: Plan, layers: dict[int, nn.Module], active: ParametersByLayer, resident: ResidentLayers, context: RankContext
) -> Chunks:
    if context.device.type != "cpu" and plan.num_devices > 1:
        raise UserError(
            f"parallel.device_chunk_gib has the gradients of each rank in host memory, and the {plan.num_devices} GPUs "
            "of this plan sum theirs on the device; take parallel=single, or parallel=sharded for several"
        )
    own = {layer: resident.stack[layer] for layer in layers}
    idle = {id(parameter) for layer in layers for parameter in resident.stack.idle_parameters(layer)}
    used = {layer: [each for each in own if id(each) not in idle] for layer, own in active.items()}  # take a gradient
    return Chunks(own, used, plan.chunk_bytes, context.device, context.offload_folder)
