"""A model as a flat list of layers, with the original names of its parameters."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor, nn

from pipetransformer.models.sharing import Place, aliases, separate

Run = Callable[..., Tensor]
Source = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Gives the initial tensors of a layer one by one, with their original names; the same on every process."""


class Layer(nn.Module):
    """One entry of a stack: the original module and how to call it.

    Args:
        module: The original module, or a shallow copy of the original model reduced to this layer's part.
        run: Calls it: ``run(module, x, **context) -> Tensor``. Takes what it needs of the context, ignores the rest.
        prefix: The module's place in the original model, with a trailing dot, or empty.
    """

    def __init__(self, module: nn.Module, run: Run, prefix: str = "") -> None:
        super().__init__()
        self.module = module
        self.prefix = prefix
        self._run = run
        self._aliases = aliases(module)

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self._run(self.module, x, **context)

    def by_name(self) -> dict[str, nn.Parameter]:
        """Parameters by their original names."""
        return {self.prefix + name: parameter for name, parameter in self.module.named_parameters()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters and buffers (also those that are not saved) under their original names."""
        yield from self.by_name().items()
        for name, buffer in self.module.named_buffers():
            yield self.prefix + name, buffer

    @property
    def has_storage(self) -> bool:
        return all(not tensor.is_meta for _, tensor in self.tensors())

    @torch.no_grad()
    def fill(self, values: Iterable[tuple[str, Tensor]], device: torch.device | str) -> None:
        """Gives a layer without storage its tensors, in the types that it has."""
        self.to_empty(device=device)
        left = dict(self.tensors())
        for name, value in values:
            left.pop(name).copy_(value)
        assert not left, f"no initial weights for {sorted(left)}"

    def original_state(self) -> dict[str, Tensor]:
        """What the original model's ``state_dict`` holds of this layer."""
        return {self.prefix + name: tensor for name, tensor in self.module.state_dict().items()}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """To and from the meta device torch makes new parameters, one for each name; what was one stays one."""
        super()._apply(fn, recurse)
        for first, *others in self._aliases:
            for path, _, name in (other.rpartition(".") for other in others):
                setattr(self.module.get_submodule(path), name, self.module.get_parameter(first))
        return self


class LayerStack(nn.Module):
    """Embedding, blocks, head, in the order in which they run.

    A parameter that several layers share becomes one of each layer's own (:mod:`pipetransformer.models.sharing`); it
    belongs to the lowest of them and freezes with it.

    Args:
        layers: All layers.
        hidden_shape: Maps the input batch to the shape (B, T, D) of the tensor between layers.
        config: What the adapter needs again to save the model.

    Attributes:
        source: Where layers that have no storage yet get their initial weights from.
        ties: Where the shared parameters are.

    Raises:
        ValueError: There is no block, or a layer has nothing of its own.
    """

    source: Source | None = None

    def __init__(self, layers: list[Layer], hidden_shape: Callable[[Tensor], torch.Size], config: Any = None) -> None:
        super().__init__()
        if len(layers) < 3:
            raise ValueError(
                f"the model has {len(layers) - 2} blocks; it takes at least one between embedding and head"
            )
        self.ties = separate(layers)
        self._lowest = {place: tie[0] for tie in self.ties for place in tie[1:]}
        self.layers = nn.ModuleList(layers)
        self.hidden_shape = hidden_shape
        self.config = config

    @property
    def num_blocks(self) -> int:
        return len(self.layers) - 2

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    @property
    def num_parameters(self) -> int:
        """A shared one counts once."""
        return sum(p.numel() for index in range(len(self)) for p in self.own_parameters(index))

    def own_parameters(self, index: int) -> list[nn.Parameter]:
        """A layer's parameters without those that belong to a lower layer."""
        return [p for name, p in self[index].by_name().items() if (index, name) not in self._lowest]

    def trainable(self, index: int, first_active: int) -> list[nn.Parameter]:
        """A layer's parameters that train while the layers below ``first_active`` are frozen."""
        named, own = self[index].by_name().items(), Place(index, "")
        return [p for name, p in named if self._lowest.get(Place(index, name), own).layer >= first_active]

    def load(self, index: int, device: torch.device | str = "cpu") -> None:
        """Gives a layer its initial weights, where it has none yet."""
        if not self[index].has_storage:
            self[index].fill(self._initial(index), device)

    def loaded_copy(self, index: int, device: torch.device | str) -> Layer:
        """A copy of a layer with weights; the stack's own stays as it is."""
        twin = copy.deepcopy(self[index])
        if twin.has_storage:
            return twin.to(device)
        twin.fill(self._initial(index), device)
        return twin

    def _initial(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """A layer's initial tensors; a shared one is what the layer gets that it belongs to."""
        assert self.source is not None
        yield from self.source(index)
        for (layer, name), lowest in self._lowest.items():
            if layer == index:
                yield name, next(tensor for other, tensor in self.source(lowest.layer) if other == lowest.name)

    def names(self) -> list[list[str]]:
        """For each layer the original names of the tensors that its source gives."""
        return [
            [name for name, _ in self[index].tensors() if (index, name) not in self._lowest]
            for index in range(len(self))
        ]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Runs every layer. ``x``: (B, C, H, W) or token ids (B, T); returns what the head returns."""
        for layer in self.layers:
            x = layer(x, **context)
        return x


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws on the CPU follow ``seed`` inside and are left as they were outside, devices untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
