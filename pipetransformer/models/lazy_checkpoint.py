"""Tensors of a checkpoint, read one by one from safetensors files.

The model's library decides which of them becomes which tensor of the model: names and shapes have changed over the
years. So the library loads a checkpoint of placeholders, which take no memory. The tensor of a placeholder is read
where the placeholder ended up::

    file      embeddings.LayerNorm.gamma   encoder.layer.0....   cls.predictions.bias
    number             #0                          #1                     #2
    library   ───────── renames, resizes, drops, initializes what is missing ─────────
    model     bert.embeddings.LayerNorm.weight #0    bert.encoder.layer.0.... #1    classifier.weight (drawn)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


class Checkpoint:
    """Tensors of safetensors files, read on demand.

    Args:
        files: All files of the checkpoint.

    Raises:
        SafetensorError: A file is damaged.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._placeholders: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - a file is no dictionary
                    part = opened.get_slice(key)
                    dtype = torch.float32 if "F" in part.get_dtype() else torch.int64
                    self._placeholders[key] = placeholder(len(self._files), part.get_shape(), dtype)
                    self._files[key] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def placeholders(self) -> dict[str, Tensor]:
        """Returns a state dict with a placeholder for each tensor."""
        return dict(self._placeholders)

    def origins(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Finds placeholders among a model's tensors.

        Returns:
            For each tensor that the library took over unchanged its key in the checkpoint.
        """
        keys = list(self._files)
        numbers = {name: number for name, tensor in tensors if (number := _number(tensor)) is not None}
        return {name: keys[number] for name, number in numbers.items()}

    def read(self, keys: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
        """Reads the tensors under ``keys[name]``, one at a time; yields ``(name, tensor)``."""
        opened: dict[Path, Any] = {}
        with ExitStack() as stack:
            for name, key in keys.items():
                file = self._files[key]
                if file not in opened:
                    opened[file] = stack.enter_context(safe_open(file, "pt"))
                yield name, opened[file].get_tensor(key)


def placeholder(number: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns a tensor of any shape in a few kilobytes, whose rows overlap and which holds ``number``.

    A tensor computed from it, or a view, has other strides, so only the placeholder itself is recognized.
    """
    strides = _strides(len(shape))
    extent = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.full((extent,), number, dtype=dtype).as_strided(tuple(shape), strides)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns parameters and buffers, non-persistent ones included."""
    return dict([*model.named_parameters(), *model.named_buffers()])


@contextmanager
def with_storage(model: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Gives tensors of a model storage inside, full of NaN: what is left of it shows which were not initialized."""
    before = {name: tensor for name, tensor in named_tensors(model).items() if name in names}
    try:
        for name, tensor in before.items():
            value = torch.nan if tensor.is_floating_point() else 0
            new = torch.full(tensor.shape, value, dtype=tensor.dtype)
            _set(model, name, nn.Parameter(new) if isinstance(tensor, nn.Parameter) else new)
        yield
    finally:
        for name, tensor in before.items():
            _set(model, name, tensor)


def _set(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, own = name.rpartition(".")
    setattr(model.get_submodule(path), own, tensor)


def _number(tensor: Tensor) -> int | None:
    """Returns the placeholder's number, or ``None`` for any other tensor."""
    if tensor.is_meta or not tensor.dim() or not tensor.numel() or tensor.stride() != _strides(tensor.dim()):
        return None
    return int(tensor.detach()[(0,) * tensor.dim()])


def _strides(num_dims: int) -> tuple[int, ...]:
    return tuple(range(num_dims + 1, 1, -1))
