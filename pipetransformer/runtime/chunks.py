"""Layers whose weights and gradients lie in host memory or a file, and on the device while a pass uses them.

::

    host      W0 W1 W2 ..   G1 G2 ..   moments      the parameters, between the passes
    device    W1 G1                                 the same parameters, during the backward pass of layer 1

A layer's backward pass runs it again, so that no activation outlives it and no chunk has to stay for it. The update is
on the host, with the moments, which never come to the device. What is on the device when is decided by
:class:`~pipetransformer.autopipe.offload.Residency`.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from pipetransformer.autopipe.offload import Chunk, HostTraffic, Residency, fetch_ahead, leaving
from pipetransformer.errors import UserError
from pipetransformer.host_copies import Fetch, empty_for
from pipetransformer.models.layer import Layer
from pipetransformer.runtime.precision import Precision
from pipetransformer.runtime.rng import MakeRandomness
from pipetransformer.runtime.stage import LayerCall, ParametersByLayer, Stage


class Chunks:
    """The chunks of the layers of a stage.

    Args:
        layers: By their index in the model, in host memory.
        active_parameters: For each layer that takes a gradient the parameters that train.
        budget: Bytes of chunks that the device takes at most.
        device: Computes.
        folder: Of the file in which the chunks lie; ``None``: in host memory, pinned where the device is a GPU.

    Attributes:
        traffic: Of the last step.
    """

    def __init__(
        self, layers: Mapping[int, Layer], active_parameters: ParametersByLayer, budget: int, device: torch.device,
        folder: Path | None = None,
    ) -> None:  # fmt: skip
        self._device, self.traffic = device, HostTraffic()
        self._owners: dict[Chunk, list[nn.Parameter]] = {}
        for index, layer in layers.items():
            if own_weights := list(layer.by_name().values()):
                self._owners[Chunk(index, "weights")] = own_weights
            if active_parameters.get(index):
                self._owners[Chunk(index, "gradient")] = list(active_parameters[index])
            for module in layer.modules():
                for name, buffer in module.named_buffers(recurse=False):
                    module._buffers[name] = buffer.to(device)
        self._homes: dict[Chunk, Tensor] = {}
        for chunk, own in self._owners.items():  # one at a time: a layer leaves its last home before the next one moves
            home = self._homes[chunk] = _home(chunk, own, device, folder)
            if chunk.kind == "weights":
                _fill(home, own)
                self._point(chunk, home)
        self._on_device: dict[Chunk, Tensor] = {}
        self._coming: dict[Chunk, Fetch] = {}
        self._active = min(active_parameters, default=max(layers, default=0) + 1)
        self._in_use: set[int] = set()
        self._written: set[Chunk] = set()  # gradients of this step whose home has numbers
        self._residency = Residency[Chunk]({chunk: home.nbytes for chunk, home in self._homes.items()}, budget)

    @contextmanager
    def on_device(self, layer: int, with_gradient: bool = False) -> Iterator[None]:
        """Keeps a layer's weights on the device inside, and the gradients of its parameters that train if wanted."""
        if layer in self._in_use:
            yield
            return
        wanted = [Chunk(layer, "weights"), *([Chunk(layer, "gradient")] if with_gradient else [])]
        used = list[Chunk]()
        self._in_use.add(layer)
        try:
            for chunk in filter(self._homes.__contains__, wanted):
                self._fetch(chunk)
                used.append(chunk)
            self._fetch_ahead()
            yield
        finally:
            self._in_use.remove(layer)
            for chunk in reversed(used):  # a gradient is where its parameter is, and goes first
                self._residency.end(chunk, changed=chunk.kind == "gradient")
                self._point(chunk, self._homes[chunk] if chunk.kind == "weights" else None)

    def _fetch(self, chunk: Chunk) -> None:
        is_fresh = chunk.kind == "gradient" and chunk not in self._written
        was_there = chunk in self._residency
        for evicted, is_written in self._residency.begin(chunk, is_fresh):
            self._leave(evicted, is_written)
        if not was_there:
            buffer = torch.empty_like(self._homes[chunk], device=self._device)
            self._on_device[chunk] = buffer.zero_() if is_fresh else buffer.copy_(self._homes[chunk], non_blocking=True)
        self._point(chunk, self._arrived(chunk))

    def _fetch_ahead(self) -> None:
        """Begins to fetch the weights that come next, while the device computes with those that are there."""
        coming = fetch_ahead(self._residency)
        if coming is None:
            return
        chunk, evictions = coming
        for evicted, is_written in evictions:
            self._leave(evicted, is_written)
        self._on_device[chunk] = torch.empty_like(self._homes[chunk], device=self._device)
        self._coming[chunk] = Fetch(self._homes[chunk], self._on_device[chunk])

    def _arrived(self, chunk: Chunk) -> Tensor:
        """Returns a chunk on the device; what the device does from here on waits for it, if it is still coming."""
        if chunk in self._coming:
            self._coming.pop(chunk).take()
        return self._on_device[chunk]

    def _leave(self, chunk: Chunk, is_written: bool) -> None:
        buffer = self._arrived(chunk)
        del self._on_device[chunk]
        if is_written:
            self._homes[chunk].copy_(buffer)
            self._written.add(chunk)

    def _point(self, chunk: Chunk, flat: Tensor | None) -> None:
        """Makes parameters, or their gradients, views of a flat tensor; gradients that are nowhere are ``None``."""
        own = self._owners[chunk]
        views = [None] * len(own) if flat is None else _views(flat, own)
        for parameter, view in zip(own, views, strict=True):
            if chunk.kind == "gradient":
                parameter.grad = view
            else:
                assert view is not None
                parameter.data = view

    def expect(self, train: bool) -> None:
        """Expects the uses of the last training step, or of the last evaluation."""
        self._residency.expect("train" if train else "evaluate")

    def end_step(self) -> None:
        """Brings the gradients to the host, where they are those of the parameters, and lets go of active weights."""
        self.traffic = self._residency.traffic
        for evicted, is_written in self._residency.end_step(leaving(self._homes, self._active)):
            self._leave(evicted, is_written)
        for chunk in self._written:
            self._point(chunk, self._homes[chunk])
        self._written.clear()


def _home(chunk: Chunk, parameters: Sequence[nn.Parameter], device: torch.device, folder: Path | None) -> Tensor:
    """Returns a flat tensor for the numbers of a chunk, in host memory or a file that ends with it."""
    types = {parameter.dtype for parameter in parameters}
    if len(types) > 1:
        raise UserError(
            f"layer {chunk.layer} has parameters of {', '.join(sorted(map(str, types)))}, and a chunk has numbers of "
            "one type; drop parallel.device_chunk_gib"
        )
    (dtype,), size = types, sum(parameter.numel() for parameter in parameters)
    if folder is None:
        return empty_for(device, size, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    handle, path = tempfile.mkstemp(prefix=f"{chunk.kind}-{chunk.layer}-", dir=folder)
    try:
        _allocate(handle, size * dtype.itemsize, folder)
        return torch.from_file(path, shared=True, size=size, dtype=dtype)
    finally:
        os.close(handle)
        os.unlink(path)  # the mapping keeps it until nothing refers to it


def _allocate(handle: int, num_bytes: int, folder: Path) -> None:
    """Takes the disk space of a file; without it, writing to its mapping would kill the process."""
    allocate = getattr(os, "posix_fallocate", None)  # macOS has none
    try:
        os.ftruncate(handle, num_bytes) if allocate is None else allocate(handle, 0, num_bytes)
    except OSError as error:
        raise UserError(
            f"the disk of parallel.offload_path={folder} has no room for {num_bytes / 2**30:.3f} GiB of a chunk, and "
            f"{shutil.disk_usage(folder).free / 2**30:.3f} GiB free ({error.strerror}); name a folder of another disk, "
            "or drop it to keep chunks in host memory"
        ) from error


@torch.no_grad()
def _fill(flat: Tensor, parameters: Sequence[nn.Parameter]) -> None:
    for view, parameter in zip(_views(flat, parameters), parameters, strict=True):
        view.copy_(parameter)


def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    parts = flat.split([parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]


class _RunAgain(Function):
    """A layer that keeps its input alone, and runs again in backward with its gradients on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, run: Callable[[Tensor, Tensor | None], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.run = run
        return run(x, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        leaf = x.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            ctx.run(leaf, gradients[0])
        return leaf.grad, None, None


class ChunkedStage(Stage):
    """A stage whose layers come from the host.

    Args:
        layers: The layers by their index in the model.
        active_parameters: For each layer that takes a gradient the parameters that train.
        precision: The types in which the layers compute.
        randomness: Makes the random numbers of a micro-batch.
        chunks: Of these layers.
    """

    def __init__(
        self, layers: dict[int, nn.Module], active_parameters: ParametersByLayer, precision: Precision,
        randomness: MakeRandomness, chunks: Chunks,
    ) -> None:  # fmt: skip
        super().__init__(layers, active_parameters, precision, recompute=True, randomness=randomness)
        self.chunks = chunks
        chunks.expect(train=True)  # as the stage begins
        self._anchor = torch.zeros((), requires_grad=True)  # so that a layer whose input takes no gradient has one

    def _recomputed(self, index: int, x: Tensor, keys: Tensor, context: dict[str, Tensor]) -> Tensor:
        if not (self.active_parameters[index] or x.requires_grad):  # below the lowest adapter
            return self._run([index], x, keys, context)
        return _RunAgain.apply(x, self._anchor, partial(self._once, index, keys, context))

    def _once(self, index: int, keys: Tensor, context: dict[str, Tensor], x: Tensor, gradient: Tensor | None) -> Tensor:
        """Runs an active layer, and given the gradient of its output its backward pass, too."""
        if gradient is None:
            return self._run([index], x, keys, context)
        with self.chunks.on_device(index, with_gradient=True):
            output = self._run([index], x, keys, context)
            torch.autograd.backward(output, gradient)
        return output

    def _run_layer(self, index: int, call: LayerCall, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        with self.chunks.on_device(index):
            return super()._run_layer(index, call, x, context)

    def train(self, mode: bool = True) -> ChunkedStage:
        super().train(mode)
        if hasattr(self, "chunks"):  # torch calls it while the stage is made
            self.chunks.expect(mode)
        return self

    def end_step(self) -> None:
        self.chunks.end_step()
