"""The meshes that the plans of a run may have, by its options, its model and its data."""

from collections.abc import Sequence

from pipetransformer.autocache.source import SampleSource
from pipetransformer.autopipe.meshes import check_num_ranks, mesh_candidates
from pipetransformer.config.schema import Config
from pipetransformer.errors import UserError
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.split import split_widths
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.base import OptimizerSpec
from pipetransformer.runtime.mesh_layers import check_mesh


def choose_meshes(
    config: Config, stack: LayerStack, optimizer: OptimizerSpec, sources: Sequence[SampleSource], num_devices: int,
    node_size: int,
) -> tuple[tuple[StageMesh, ...], list[str]]:  # fmt: skip
    """Returns the meshes, the simplest first, and what the user should know.

    Where the options leave the choice open, a model that no mesh can split is trained without one.

    Args:
        sources: Of all splits.
        num_devices: Ranks of the world.
        node_size: Ranks of a node, which a mesh that is left open does not leave.

    Raises:
        UserError: A mesh that the user asks for cannot be: by the model, the optimizer or the length of a sample.
        InfeasiblePlan: It has more ranks than there are devices.
    """
    parallel = config.parallel
    if not parallel.splits_stages:
        return (SINGLE,), []
    try:
        check_mesh(optimizer, config.compile)
        widths = split_widths(stack)
        parallel.mesh.check(widths)
    except UserError as error:
        if parallel.mesh.num_ranks > 1:
            raise
        return (SINGLE,), [f"every stage runs on one device: {error}"]
    shortest = min(int(source.lengths.min()) for source in sources)
    longest = max(int(source.lengths.max()) for source in sources)
    if parallel.mesh.cp > shortest:
        raise UserError(
            f"parallel.cp={parallel.cp} is more than the {shortest} tokens of the shortest sample; lower parallel.cp"
        )
    check_num_ranks(parallel.mesh, num_devices)
    is_limited = parallel.device_memory_gib is not None
    meshes = mesh_candidates(parallel.mesh_sizes, parallel.mesh, widths, longest, node_size, is_limited)
    return tuple(mesh for mesh in meshes if mesh.cp <= shortest), []
