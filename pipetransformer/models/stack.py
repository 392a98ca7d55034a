"""A model as a flat list of layers, with the original names of its parameters and those that layers share."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pipetransformer.errors import UserError
from pipetransformer.models.checks import beside_weights, check_layers
from pipetransformer.models.layer import Layer, Module, deep_copy, shallow_copy

_NUMBER = re.compile(r"\d+")
WeightSource = Callable[[int], Iterable[tuple[str, Tensor]]]
"""Yields the initial tensors of a layer with their original names; the same in every process."""


class LayerStack(nn.Module):
    """Embedding, blocks, head, in the order in which they run.

    Layers may end up on different devices, so each gets its own copy of a shared parameter
    (:func:`untie`). The copies train as one parameter, which belongs to the lowest layer
    and freezes with it.

    Args:
        layers: All layers.
        hidden_shape: Maps the input batch to the shape (B, T, D) of the tensor between layers.
        config: Kept for the adapter that saves the model.

    Attributes:
        source: Gives layers without storage their initial weights; a family's ``build_meta`` sets it.
        ties: The copies of each shared parameter.
        fixed: Parameters that never train, such as the base weights of adapters.
        idle: Original names of parameters that take no part in a pass, see :meth:`note_idle`.
        padding_counts_in: The first layer that sees the padding of a text; ``None``: none is known to.

    Raises:
        UserError: There is no block, or a layer has no parameter of its own.
    """

    source: WeightSource | None = None
    fixed: "frozenset[ParamRef]" = frozenset()
    idle: frozenset[str] = frozenset()
    padding_counts_in: str | None = None

    def __init__(self, layers: list[Layer], hidden_shape: Callable[[Tensor], torch.Size], config: Any = None) -> None:
        super().__init__()
        if len(layers) < 3:
            raise UserError(f"the model has {len(layers) - 2} blocks; it takes at least one between embedding and head")
        self.ties = untie(layers)
        self._lowest = {place: tie[0] for tie in self.ties for place in tie[1:]}
        self.layers = nn.ModuleList(layers)
        self.hidden_shape = hidden_shape
        self.config = config

    @classmethod
    def from_sequential(
        cls,
        modules: nn.Sequential,
        example: Tensor | None = None,
        hidden_shape: Callable[[Tensor], torch.Size] | None = None,
    ) -> Self:
        """Makes a stack of a copy of an ``nn.Sequential``: the embedding, at least one block, the head.

        Args:
            modules: All layers. Between them every tensor has the shape (B, T, D), the same everywhere.
            example: At least two samples as the dataset gives them; with it the layers are checked at once.
            hidden_shape: Maps an input batch to (B, T, D); by default the embedding runs on the meta device.

        Raises:
            UserError: There is no block, or with an example: a layer gives another shape, changes a buffer in
                training or mixes the samples of a batch.
        """
        layers = [Layer(module, _call, f"{name}.") for name, module in _entries(modules)]
        if not layers:
            raise UserError("it has no layers; give an embedding, at least one block and a head")
        stack = cls(layers, hidden_shape or _OutputShape(layers[0].module))
        if example is not None:
            stack.note_idle(stack.check(example))
        return stack

    def check(self, inputs: Tensor, **context: Tensor) -> set[str]:
        """Checks on a few samples that all layers give (B, T, D) and may run in micro-batches and on replicas.

        Args:
            inputs: At least two samples, images (B, C, H, W) or token ids (B, T).
            context: Tensors (B, ...) for every layer.

        Returns:
            The original names of parameters that get no gradient, for :meth:`note_idle`.

        Raises:
            UserError: As :func:`pipetransformer.models.checks.check_layers`.
        """
        inputs, context = beside_weights(self, inputs, context)
        return check_layers([self[index] for index in range(len(self))], self.hidden_shape(inputs), inputs, context)

    def note_idle(self, names: Iterable[str]) -> None:
        """Notes parameters that take no part in a pass, so that replicas do not wait for their gradients.

        Args:
            names: Of this model, or of a smaller one of its kind, whose blocks have other numbers.
        """
        idle = {_NUMBER.sub("#", name) for name in names}
        own = (name for index in range(len(self)) for name in self[index].by_name())
        self.idle = frozenset(name for name in own if _NUMBER.sub("#", name) in idle)

    def idle_parameters(self, index: int) -> list[nn.Parameter]:
        """Returns the parameters of a layer that take no part in a pass, as far as that is known."""
        return [parameter for name, parameter in self[index].by_name().items() if name in self.idle]

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
        """Number of parameters; a shared one counts once."""
        return sum(p.numel() for index in range(len(self)) for p in self.own_parameters(index))

    def own_parameters(self, index: int) -> list[nn.Parameter]:
        """Returns a layer's parameters without those that belong to a lower layer."""
        return [p for name, p in self[index].by_name().items() if (index, name) not in self._lowest]

    def owners(self, index: int) -> dict[nn.Parameter, int]:
        """Returns for each parameter of a layer the layer that it belongs to: the lowest of those that share it."""
        named, own = self[index].by_name().items(), ParamRef(index, "")
        return {p: self._lowest.get(ParamRef(index, name), own).layer for name, p in named}

    def trainable(self, index: int, first_active: int) -> list[nn.Parameter]:
        """Returns a layer's parameters that train while the layers below ``first_active`` are frozen."""
        refs = ((p, ParamRef(index, name)) for name, p in self[index].by_name().items())
        owned = ((p, self._lowest.get(ref, ref)) for p, ref in refs)
        return [p for p, ref in owned if ref.layer >= first_active and ref not in self.fixed]

    def first_trained(self, first_active: int) -> int:
        """Returns the lowest layer with a parameter that trains while the layers below ``first_active`` are frozen."""
        layers = range(first_active, len(self))
        return next((index for index in layers if self.trainable(index, first_active)), len(self))

    def load(self, index: int, device: torch.device | str = "cpu") -> None:
        """Loads a layer's initial weights unless it has storage."""
        if not self[index].has_storage:
            self[index].fill(self._initial(index), device)

    def load_again(self, index: int) -> None:
        """Copies a layer's tensors from its source into a layer that has storage."""
        self[index].copy_from(self._initial(index))

    def loaded_copy(self, index: int, device: torch.device | str) -> Layer:
        """Returns a copy of a layer with weights; the stack's own layer stays as it is."""
        twin = deep_copy(self[index])
        if twin.has_storage:
            return twin.to(device)
        twin.fill(self._initial(index), device)
        return twin

    def separate(self) -> None:
        """Makes each copy of a shared parameter one of its own, which starts as the shared one."""
        if self.source is not None:
            self.source = _Separated(self.source, self._lowest)
        self.ties, self._lowest = (), {}

    def _initial(self, index: int) -> Iterator[tuple[str, Tensor]]:
        """Yields a layer's initial tensors; a shared one comes from the layer that it belongs to."""
        if self.source is None:
            raise UserError(
                f"layer {index} of {len(self)} has no initial weights, as the model's stack has no source; set "
                "stack.source to a function that yields a layer's tensors, those of stack.names()[index], or make the "
                "layers with weights"
            )
        return _Separated(self.source, self._lowest)(index)

    def names(self) -> list[list[str]]:
        """Returns for each layer the original names of the tensors that its source yields."""
        return [
            [name for name, _ in self[index].tensors() if (index, name) not in self._lowest]
            for index in range(len(self))
        ]

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        """Runs every layer on ``x``, images (B, C, H, W) or token ids (B, T); returns the head's output."""
        for layer in self.layers:
            x = layer(x, **context)
        return x


class _Separated:
    """Gives each layer its initial tensors, a copy of a shared one included.

    Args:
        source: Gives a shared tensor with the lowest layer alone.
        lowest: For each copy the tensor that it starts as.
    """

    def __init__(self, source: WeightSource, lowest: dict["ParamRef", "ParamRef"]) -> None:
        self._source, self._lowest = source, lowest

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        yield from self._source(index)
        for (layer, name), lowest in self._lowest.items():
            if layer == index:
                yield name, next(tensor for other, tensor in self._source(lowest.layer) if other == lowest.name)


def _entries(modules: nn.Sequential) -> Iterator[tuple[str, nn.Module]]:
    """Yields copies of the modules in the order in which they run, which share the parameters that those share.

    Raises:
        UserError: The whole does more than to run one after the other, or a module with parameters comes twice.
    """
    if type(modules).forward is not nn.Sequential.forward or modules._forward_hooks or modules._forward_pre_hooks:
        raise UserError(
            f"{type(modules).__name__} has a forward or hooks of its own, and its layers run one after the other; put "
            "what it does into a layer"
        )
    seen: dict[int, str] = {}
    for name, module in deep_copy(modules)._modules.items():
        assert module is not None, "a Sequential runs each"
        if id(module) in seen and any(True for _ in module.parameters()):
            raise UserError(
                f"layer {name} is layer {seen[id(module)]} once more, with the same weights; give each layer a module "
                "of its own"
            )
        own = deep_copy(module) if id(module) in seen else module
        if getattr(own, "inplace", False):  # the stage below still needs what it gets
            own = shallow_copy(own)
            own.__dict__["inplace"] = False
        yield name, own
        seen[id(module)] = name


def _call(module: nn.Module, x: Tensor, **_: Any) -> Tensor:
    return module(x)


class _OutputShape:
    """Shape of a module's output, by a forward pass on the meta device."""

    def __init__(self, module: nn.Module) -> None:
        self._module = without_storage(module)

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> torch.Size:
        shape = self._module(beside_weights(self._module, inputs.to("meta"))[0]).shape
        if len(shape) != 3:
            raise UserError(
                f"the embedding gives {tuple(shape)}; between layers every tensor is (batch, tokens, width)"
            )
        return shape


def without_storage(module: Module) -> Module:
    """Returns a copy on the meta device; the original stays as it is."""
    twins: dict[int, Any] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        twin = torch.empty_like(tensor, device="meta")
        twins[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
    return deep_copy(module, twins)


class WithoutFilling(TorchFunctionMode):
    """Leaves tensors without storage alone where they would be filled, which takes torch a millisecond each."""

    NAMES = frozenset({
        "add_", "clamp_", "constant_", "div_", "erfinv_", "fill_", "kaiming_normal_", "kaiming_uniform_", "mul_",
        "normal_", "ones_", "orthogonal_", "sub_", "trunc_normal_", "uniform_", "xavier_normal_", "xavier_uniform_",
        "zero_", "zeros_",
    })  # fmt: skip

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in self.NAMES:
            tensor = args[0] if args else kwargs["tensor"]  # as nn.init names it
            if tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds the CPU's generator inside and restores it at the end; device generators stay as they are."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


class ParamRef(NamedTuple):
    """A layer's index and the original name of one of its parameters."""

    layer: int
    name: str


Tie = tuple[ParamRef, ...]
"""The copies of a shared parameter, the lowest layer first."""


def untie(layers: Sequence[Layer]) -> tuple[Tie, ...]:
    """Replaces each parameter that a lower layer also has by a copy.

    Layers that share a parameter, such as an output matrix that is the word embeddings, may end up on different
    devices. So each gets its own copy. The copies start equal, and the runtime keeps them equal::

        original     embeddings.weight   is   decoder.weight
        stack        layer 0             =    layer L + 1

    Returns:
        The copies of each shared parameter.

    Raises:
        UserError: A layer shares all its parameters, so nothing of it could train while the lower layer is frozen.
    """
    places: dict[nn.Parameter, list[ParamRef]] = {}
    for index, layer in enumerate(layers):
        own = dict(layer.module.named_parameters())
        copies = {p: nn.Parameter(p.detach().clone(), p.requires_grad) for p in own.values() if p in places}
        if copies and len(copies) == len(own):
            raise UserError(
                f"layer {index} of {len(layers)} shares all its {len(own)} parameters with lower layers; supported are "
                "models whose layers share a part of their parameters"
            )
        for name, parameter in own.items():
            places.setdefault(parameter, []).append(ParamRef(index, layer.prefix + name))
        if copies:
            layer.module = _with_copies(layer.module, copies)
    return tuple(tuple(tie) for tie in places.values() if len(tie) > 1)


def _with_copies(module: Module, copies: dict[nn.Parameter, nn.Parameter]) -> Module:
    """Returns a shallow copy with other parameters, its children too: they may belong to another layer as well."""
    twin = shallow_copy(module)
    twin._parameters.update({name: copies.get(p, p) for name, p in twin._parameters.items() if p is not None})
    for name, child in module._modules.items():
        if child is not None and not copies.keys().isdisjoint(child.parameters()):
            twin._modules[name] = _with_copies(child, copies)
    return twin
