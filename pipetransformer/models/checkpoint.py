"""A checkpoint's tensors, read one by one from safetensors files.

Which of them becomes which tensor of a model is the library's business: names and shapes have changed over the years.
So the library loads a checkpoint of tags instead, which cost no memory, and where a tag comes out, its tensor goes::

    file      embeddings.LayerNorm.gamma   encoder.layer.0....   cls.predictions.bias
    tags               #0                          #1                     #2
    library   ───────── renames, resizes, leaves out, draws what is not there ─────────
    model     bert.embeddings.LayerNorm.weight #0    bert.encoder.layer.0.... #1    classifier.weight (drawn)
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn


class Checkpoint:
    """The tensors of safetensors files; none is read before it is asked for.

    Args:
        files: All files of the checkpoint.

    Raises:
        SafetensorError: A file is not whole.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._files: dict[str, Path] = {}
        self._tags: dict[str, Tensor] = {}
        for file in files:
            with safe_open(file, "pt") as opened:
                for key in opened.keys():  # noqa: SIM118 - a file is no dictionary
                    part = opened.get_slice(key)
                    dtype = torch.float32 if "F" in part.get_dtype() else torch.int64
                    self._tags[key] = tag(len(self._files), part.get_shape(), dtype)
                    self._files[key] = file

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def tags(self) -> dict[str, Tensor]:
        """The checkpoint as the library wants it, with a tag for each tensor."""
        return dict(self._tags)

    def origins(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """Of a model loaded from the tags: the key of every tensor that is one of the checkpoint's, unchanged."""
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


def tag(number: int, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor of any shape in a few kilobytes: its rows overlap.

    Whatever computes with it or turns it around gives other strides, so that only the tag itself passes for one.
    """
    strides = _strides(len(shape))
    extent = 1 + sum(max(size - 1, 0) * stride for size, stride in zip(shape, strides, strict=True))
    return torch.full((extent,), number, dtype=dtype).as_strided(tuple(shape), strides)


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that are not saved."""
    return dict([*model.named_parameters(), *model.named_buffers()])


def _number(tensor: Tensor) -> int | None:
    """The tag's number, or ``None`` where the tensor is none."""
    if tensor.is_meta or not tensor.dim() or not tensor.numel() or tensor.stride() != _strides(tensor.dim()):
        return None
    return int(tensor.detach()[(0,) * tensor.dim()])


def _strides(num_dims: int) -> tuple[int, ...]:
    return tuple(range(num_dims + 1, 1, -1))
