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
from pipetransformer.runtime.tensor_parallel import check_modules


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
        _check_modules(stack, parallel.mesh)
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
    return _runnable(stack, [mesh for mesh in meshes if mesh.cp <= shortest])


def _runnable(stack: LayerStack, meshes: Sequence[StageMesh]) -> tuple[tuple[StageMesh, ...], list[str]]:
    """Returns the meshes on which the modules of a model run, and what keeps them from others."""
    refused: dict[tuple[bool, ...], str] = {}  # by what it depends on
    kinds = [(mesh.num_ranks > 1, mesh.splits_hidden, mesh.cp > 1) for mesh in meshes]
    for mesh, kind in zip(meshes, kinds, strict=True):
        if kind not in refused:
            try:
                _check_modules(stack, mesh)
                refused[kind] = ""
            except UserError as error:
                refused[kind] = f"no stage runs on {mesh}, nor on larger meshes of its kind: {error}"
    runnable = tuple(mesh for mesh, kind in zip(meshes, kinds, strict=True) if not refused[kind])
    return runnable, [note for note in refused.values() if note]


def _check_modules(stack: LayerStack, mesh: StageMesh) -> None:
    for index in range(len(stack) - 1 if mesh.num_ranks > 1 else 0):
        check_modules(stack[index], mesh)
