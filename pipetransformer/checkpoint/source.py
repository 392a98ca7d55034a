"""Layers of a checkpoint as the stack and the runtime take them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from pipetransformer.autopipe.plan import layer_above
from pipetransformer.checkpoint.folder import read_file
from pipetransformer.checkpoint.manifest import Manifest
from pipetransformer.errors import DamagedCheckpoint, UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.optim.averaging import AVERAGE
from pipetransformer.runtime.resident import OptimizerState
from pipetransformer.runtime.snapshot import OPTIMIZER, WEIGHTS, to_own_names


class CheckpointLayers:
    """Weights and optimizer state of a checkpoint.

    Args:
        folder: The published checkpoint.
        manifest: Its manifest.
        stack: The model that they belong to.

    Raises:
        UserError: The model has another number of layers.
    """

    def __init__(self, folder: Path, manifest: Manifest, stack: LayerStack) -> None:
        if len(manifest.layers) != len(stack):
            raise UserError(
                f"{folder} has {len(manifest.layers)} layers and the model has {len(stack)}; give its model"
            )
        self._folder, self._manifest, self._stack = folder, manifest, stack
        self._names = stack.names()

    def weights(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a layer by their original names, without those that belong to a lower layer.

        Raises:
            DamagedCheckpoint: The file is not what was written, or is of another model.
        """
        tensors, shapes = _of_kind(self._read(layer), WEIGHTS), self._stack[layer].shapes()
        for name in self._names[layer]:
            if name not in tensors or tensors[name].shape != shapes[name]:
                found = tuple(tensors[name].shape) if name in tensors else "nothing"
                raise DamagedCheckpoint(
                    f"{self._folder}: layer {layer} has {found} for {name}, and the model has {tuple(shapes[name])}"
                )
            yield name, tensors[name]

    def averages(self, layer: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the tensors of a layer as :meth:`weights`, with the average of each weight that has one in its place.

        A frozen layer has none: what is parked for it is where its average goes on when it trains again.

        Raises:
            DamagedCheckpoint: As :meth:`weights`.
        """
        is_frozen = layer < layer_above(self._manifest.train.get("num_frozen", 0))
        state = {} if is_frozen else self._original_state(layer, self._read(layer))
        return ((name, state.get(name, {}).get(AVERAGE, tensor)) for name, tensor in self.weights(layer))

    def tensors(self) -> tuple[dict[str, Tensor], OptimizerState]:
        """Returns all weights and the optimizer's tensors, both by original names.

        Raises:
            DamagedCheckpoint: A file is not what was written, or is of another model.
        """
        weights: dict[str, Tensor] = {}
        state: OptimizerState = {}
        for layer in range(len(self._stack)):
            tensors = self._read(layer)
            weights |= _of_kind(tensors, WEIGHTS)
            state |= self._original_state(layer, tensors)
        return weights, state

    def optimizer_state(self, layer: int) -> OptimizerState:
        """Returns the optimizer's tensors by the names of the layer's own parameters and by key.

        Raises:
            DamagedCheckpoint: The file is not what was written, or is of another model.
        """
        return to_own_names(self._stack[layer], self._original_state(layer, self._read(layer)))

    def _original_state(self, layer: int, tensors: Mapping[str, Tensor]) -> OptimizerState:
        """Returns the optimizer's tensors of a layer, by the original names of its parameters and by key.

        What had the type of its weight gets the one that the weight has now: the run may go on in another precision.
        """
        state: OptimizerState = {}
        shapes, types = self._stack[layer].shapes(), self._stack[layer].types()
        for path, tensor in _of_kind(tensors, OPTIMIZER).items():
            name, _, key = path.rpartition("/")
            if name not in shapes or not _may_belong(tensor.shape, shapes[name]):
                raise DamagedCheckpoint(
                    f"{self._folder}: layer {layer} has {key} of shape {tuple(tensor.shape)} for {name}, and the model "
                    f"has {tuple(shapes[name]) if name in shapes else 'no such parameter'}"
                )
            weight = tensors.get(WEIGHTS + name)
            follows = tensor.ndim and weight is not None and tensor.dtype == weight.dtype  # a counter has no sizes
            state.setdefault(name, {})[key] = tensor.to(types[name]) if follows else tensor
        return state

    def _read(self, layer: int) -> dict[str, Tensor]:
        file = self._manifest.layers[layer]
        try:
            return load(read_file(self._folder, file))
        except SafetensorError as error:
            raise DamagedCheckpoint(f"{self._folder / file.name} is damaged ({error})") from None


def _may_belong(state: torch.Size, parameter: torch.Size) -> bool:
    """Returns whether optimizer state may be that of a parameter: it has no sizes but 1 and those of the parameter.

    Factored moments have a part of them.
    """
    return not Counter(size for size in state if size != 1) - Counter(parameter)


def _of_kind(tensors: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Returns the tensors whose path begins with a kind, without it."""
    return {path.removeprefix(kind): tensor for path, tensor in tensors.items() if path.startswith(kind)}
