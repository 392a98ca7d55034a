"""The form of each layer on a rank: whole, or the rank's part of a mesh; it changes with the mesh of the plan.

::

    plan of tp 4             plan of tp 2 x 2 replicas, block 1 cached
    block 1  part 3 of 4     block 1  part 3 of 4      as it was: nothing runs it
    block 2  part 3 of 4     block 2  part 1 of 2      a fresh module, filled with what is held and received
"""

from collections.abc import Sequence

import torch

from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.models.split import parts_of, split_widths
from pipetransformer.models.stack import Layer, LayerStack, without_storage
from pipetransformer.models.tp_plan import Part
from pipetransformer.runtime.mesh import RankMesh
from pipetransformer.runtime.tensor_parallel import shard_layer


class LayerCuts:
    """The forms of a stack's layers on this rank, and of those that the ranks of the world hold.

    Args:
        stack: The whole model, each layer in one piece.

    Attributes:
        mesh: This rank's view of the mesh of the plan in force; ``None`` where it runs its stages alone or is idle.
        held_as: For each layer the mesh of the ranks that hold it, the same on every rank.
    """

    def __init__(self, stack: LayerStack) -> None:
        self._stack = stack
        self.mesh: RankMesh | None = None
        self.held_as: tuple[StageMesh, ...] = (SINGLE,) * len(stack)
        self._forms = [SINGLE] * len(stack)
        self._whole: dict[int, Layer] = {}  # without storage, of the layers that are cut
        self._parts: dict[int, dict[str, tuple[Part, torch.Size]]] = {}
        self._views: dict[StageMesh, RankMesh] = {}
        self._widths: dict[str, int] | None = None

    @property
    def any(self) -> bool:
        """True where ranks hold parts of a layer."""
        return any(mesh.num_ranks > 1 for mesh in self.held_as)

    def enter(self, view: RankMesh | None) -> None:
        """Begins a plan with this rank's view of its mesh; the first view of a mesh stays, since layers refer to it.

        Raises:
            UserError: The model cannot be split, or not by this mesh.
        """
        if view is not None and view.mesh not in self._views:
            if self._widths is None:
                self._widths = split_widths(self._stack)
            view.mesh.check(self._widths)
            self._views[view.mesh] = view
        self.mesh = None if view is None else self._views[view.mesh]

    def cut_first(self, meshes: Sequence[StageMesh]) -> None:
        """Gives every layer the form of the first plan; those with storage keep their part of it."""
        for index, mesh in enumerate(meshes):
            layer = self._stack[index]
            tensors = dict(layer.tensors())
            has_storage = layer.has_storage
            if self.take_form(index, mesh) and has_storage:
                layer.fill(tensors.items(), next(iter(tensors.values())).device)
        self.held_as = tuple(meshes)

    def take_form(self, index: int, mesh: StageMesh) -> bool:
        """Gives a layer the form in which the ranks of a mesh hold it: whole where this rank was never one of them.

        Returns:
            ``True`` where that is another form; then the layer has no storage.
        """
        form = mesh if mesh in self._views else SINGLE
        if form == self._forms[index]:
            return False
        if index not in self._whole:
            self._whole[index] = without_storage(self._stack[index])
        fresh = without_storage(self._whole[index])
        if form != SINGLE:
            shard_layer(fresh, self._views[form], is_head=index == len(self._stack) - 1)
        self._stack[index].take_form(fresh)
        self._forms[index] = form
        return True

    def whole_twin(self, index: int) -> Layer:
        """Returns a layer in one piece, without storage; a copy each time."""
        return without_storage(self._whole.get(index, self._stack[index]))

    def parts(self, index: int) -> dict[str, tuple[Part, torch.Size]]:
        """Returns for each parameter of a layer, by original name, how a mesh splits it, and its whole shape."""
        if index not in self._parts:
            layer = self._whole.get(index, self._stack[index])
            found = parts_of(layer, is_head=index == len(self._stack) - 1)
            self._parts[index] = {name: (found[name], p.shape) for name, p in layer.by_name().items()}
        return self._parts[index]
