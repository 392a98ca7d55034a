"""LoRA in the layers of a stack, by peft, and in peft's files.

peft replaces a linear layer by one that has it as ``base_layer``, beside the two factors of the adapter::

    original    encoder.layer.0.attention.self.query.weight
    stack       encoder.layer.0.attention.self.query.base_layer.weight
                encoder.layer.0.attention.self.query.lora_A.default.weight       (r, in)
                encoder.layer.0.attention.self.query.lora_B.default.weight       (out, r), zero to begin with
    file        base_model.model.encoder.layer.0.attention.self.query.lora_A.weight
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipetransformer.errors import UserError
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack, ParamRef, WeightSource

if TYPE_CHECKING:
    from pipetransformer.models.adapters import Lora

ALL = "all-linear"
WEIGHTS = "adapter_model.safetensors"
_FILE_PREFIX, _ADAPTER, _BASE = "base_model.model.", ".default", ".base_layer"


def inject(spec: Lora, stack: LayerStack, seed: int) -> None:
    """Puts adapters into the blocks of a stack, and fixes the weights of embedding and blocks.

    Raises:
        UserError: No block has a linear layer of one of the names that were given.
    """
    blocks = [stack[index] for index in range(1, len(stack) - 1)]
    wanted = list(spec.target_modules) or _of_family(stack)
    targets = [[name for name in _linear_layers(block) if _is_wanted(name, wanted)] for block in blocks]
    known = sorted({name for block in blocks for name in _linear_layers(block)})
    unknown = [each for each in spec.target_modules if not any(_is_wanted(name, [each]) for name in known)]
    if unknown or not any(targets):  # peft has more names for a family than a model may have
        raise UserError(
            f"peft.target_modules={wanted}: no block has a linear layer {' or '.join(unknown or wanted)}; it has "
            f"{', '.join(known)}, or give [{ALL}]"
        )
    base = stack.source
    for block, names in zip(blocks, targets, strict=True):
        if names:
            _inject(spec, block, names)
    stack.source = None if base is None else AdaptedWeights(stack, base, seed)
    stack.fixed = frozenset(_fixed(spec, stack))
    for block in blocks:
        if block.has_storage:  # a model that a script has made
            own = dict(block.tensors())
            for name in filter(_is_adapter, own):
                own[name].data.copy_(draw(name, own[name], seed))


def _of_family(stack: LayerStack) -> list[str]:
    """Returns the names that peft has for a model of transformers, or all linear layers."""
    config = stack.config[1] if isinstance(stack.config, tuple) else None
    names: Any = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(getattr(config, "model_type", ""), [ALL])
    return list(names) if isinstance(names, list | tuple) else [ALL]


def _linear_layers(block: Layer) -> list[str]:
    named = dict(block.module.named_modules())
    only_read = {f"{name}.qkv" for name, module in named.items() if _reads_qkv(module)}
    linear = (name for name, module in named.items() if isinstance(module, nn.Linear) or _is_conv1d(module))
    return [name for name in linear if name not in only_read]


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _reads_qkv(attention: nn.Module) -> bool:
    """Returns whether an attention multiplies with the weight of its ``qkv`` itself, past an adapter beside it.

    timm's EVA does where the bias has a part for queries and one for values.
    """
    return getattr(attention, "q_bias", None) is not None and not getattr(attention, "qkv_bias_separate", False)


def _is_wanted(name: str, wanted: list[str]) -> bool:
    return ALL in wanted or any(f".{name}".endswith(f".{each}") for each in wanted)


def _inject(spec: Lora, block: Layer, names: list[str]) -> None:
    on_meta = not block.has_storage
    is_transposed = _is_conv1d(block.module.get_submodule(names[0]))
    config = _config(spec, names, fan_in_fan_out=is_transposed)
    inject_adapter_in_model(config, block.module, low_cpu_mem_usage=on_meta)
    block.refresh_aliases()


def _config(spec: Lora, names: list[str], **options: Any) -> LoraConfig:
    given: dict[str, Any] = {
        "lora_alpha": spec.alpha,
        "bias": spec.bias,
    }  # typed too narrowly
    return LoraConfig(r=spec.r, lora_dropout=spec.dropout, target_modules=names, **given, **options)


def _fixed(spec: Lora, stack: LayerStack) -> Iterator[ParamRef]:
    """Yields the parameters of embedding and blocks that do not train."""
    for index in range(len(stack) - 1):
        for name in stack[index].by_name():
            is_bias = name.endswith(".bias") and (spec.bias == "all" or (spec.bias == "lora_only" and _BASE in name))
            if not (_is_adapter(name) or is_bias):
                yield ParamRef(index, name)


def _is_adapter(name: str) -> bool:
    return ".lora_" in name


class AdaptedWeights:
    """Initial tensors of layers with adapters.

    Args:
        stack: With the adapters.
        base: Gives the tensors without them, by their original names.
        seed: Of the adapters.
    """

    def __init__(self, stack: LayerStack, base: WeightSource, seed: int) -> None:
        self._stack, self._base, self._seed = stack, base, seed
        self._names = stack.names()

    def __call__(self, index: int) -> Iterator[tuple[str, Tensor]]:
        names = {_original(name): name for name in self._names[index] if not _is_adapter(name)}
        yield from ((names[name], tensor) for name, tensor in self._base(index))
        own = dict(self._stack[index].tensors())
        yield from ((name, draw(name, own[name], self._seed)) for name in self._names[index] if _is_adapter(name))


def draw(name: str, like: Tensor, seed: int) -> Tensor:
    """Draws a factor of an adapter as peft does, from a stream of its own.

    Args:
        name: Of the tensor; with the seed it decides the numbers.
        like: Has the shape and type.
    """
    drawn = torch.zeros(like.shape)
    if ".lora_A." in name:
        digest = blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
    return drawn.to(like.dtype)


def _original(name: str) -> str:
    return name.replace(f"{_BASE}.", ".")


def save(spec: Lora, stack: LayerStack, state: dict[str, Tensor], base: str, folder: Path) -> None:
    """Writes adapters and head as peft loads them beside the base model.

    Args:
        state: All tensors by the names of the stack.
        base: Name of the base model, for the record.
    """
    head = head_modules(stack)
    targets = sorted({name.partition(".lora_")[0] for name in state if _is_adapter(name)})
    layers = [module for index in range(len(stack)) for _, module in _lora_layers(stack[index])]
    is_transposed = any(vars(layer)["fan_in_fan_out"] for layer in layers)
    config = _config(
        spec, targets, modules_to_save=head, base_model_name_or_path=base, inference_mode=True,
        fan_in_fan_out=is_transposed,
    )  # fmt: skip
    trained = {ref.name for ref in _trained(stack)}
    in_head = tuple(f"{module}." for module in head)
    kept = {name: tensor for name, tensor in state.items() if name in trained or name.startswith(in_head)}
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(str(folder))
    tensors = {_FILE_PREFIX + name.replace(f"{_ADAPTER}.", "."): tensor.contiguous() for name, tensor in kept.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def _trained(stack: LayerStack) -> Iterator[ParamRef]:
    """Yields the parameters that train; a weight that is shared with a fixed one does not."""
    for index in range(len(stack)):
        trained = {*map(id, stack.trainable(index, 0))}
        yield from (ParamRef(index, name) for name, own in stack[index].by_name().items() if id(own) in trained)


def head_modules(stack: LayerStack) -> list[str]:
    """Returns the paths of the head's modules that train, each the shortest that holds no part of another layer.

    Raises:
        UserError: A parameter of the head is in no module of its own.
    """
    others = [name for index in range(len(stack) - 1) for name, _ in stack[index].tensors()]
    found: dict[str, None] = {}
    for name in (ref.name for ref in _trained(stack) if ref.layer == len(stack) - 1):
        parts = name.split(".")[:-1]
        paths = (".".join(parts[: end + 1]) for end in range(len(parts)))
        path = next((path for path in paths if not any(other.startswith(f"{path}.") for other in others)), None)
        if path is None:
            raise UserError(f"peft=lora cannot save {name} of the head: peft saves whole modules; take another head")
        found[path] = None
    return list(found)


def load_saved(stack: LayerStack, folder: Path) -> None:
    """Puts a folder's tensors over those of the base model."""
    assert stack.source is not None
    source: WeightSource = stack.source
    given = {
        (name.replace(".weight", f"{_ADAPTER}.weight") if _is_adapter(name) else name): tensor
        for name, tensor in ((key.removeprefix(_FILE_PREFIX), t) for key, t in load_file(folder / WEIGHTS).items())
    }

    def overlaid(index: int) -> Iterator[tuple[str, Tensor]]:
        return ((name, given.get(name, tensor)) for name, tensor in source(index))

    stack.source = overlaid


@torch.no_grad()
def merge(stack: LayerStack, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights with the adapters added, by the original names."""
    merged = {_original(name): tensor for name, tensor in state.items() if not _is_adapter(name)}
    for index in range(len(stack)):
        for path, module in _lora_layers(stack[index]):
            name = stack[index].prefix + path
            down, up = (state[f"{name}.lora_{part}{_ADAPTER}.weight"] for part in ("A", "B"))
            product = module.scaling["default"] * (up @ down)  # (out, in)
            merged[f"{name}.weight"] = merged[f"{name}.weight"] + (
                product.T if vars(module)["fan_in_fan_out"] else product
            )
    return merged


def _lora_layers(layer: Layer) -> list[tuple[str, LoraLayer]]:
    return [(path, module) for path, module in layer.module.named_modules() if isinstance(module, LoraLayer)]
