"""What the features of a run depend on, but for the weights of the frozen layers."""

import importlib.metadata
from hashlib import blake2b
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.config.options import Config
from pipetransformer.models.stack import LayerStack
from pipetransformer.training.loader import BatchLoader

LIBRARIES = ("timm", "transformers")
OF_THE_HEAD = {"id2label", "label2id", "num_labels", "problem_type", "num_classes"}


def identity_of(
    config: Config, stack: LayerStack, loader: BatchLoader, device: torch.device, kind: FeatureFormat
) -> StoreFingerprint:
    outline = blake2b(_outline(stack).encode(), digest_size=8).hexdigest()
    versions = " ".join(f"{name}={importlib.metadata.version(name)}" for name in LIBRARIES)
    return StoreFingerprint(
        split_name=loader.split.name,
        split_identity=loader.split.identity(),
        num_samples=len(loader.source.lengths),
        num_tokens=int(loader.source.lengths.sum()),
        hidden_size=kind.hidden_size,
        storage_type=kind.storage,
        precision=config.precision,
        capacity=f"{config.cache.memory_gib:g} GiB memory, {config.cache.disk_gib:g} GiB disk",
        model=f"{config.model.name} {outline} {versions}",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
    )


def _outline(stack: LayerStack) -> str:
    """All below the head that weights do not tell, whatever family the model is of."""
    layers = [stack[layer] for layer in range(len(stack) - 1)]
    parts = [part for layer in layers for part in layer.modules()]
    return f"{layers} {[_settings(part) for part in parts]}"


def _settings(part: nn.Module) -> dict[str, Any]:
    """Numbers, words, functions and configurations that a part of the model keeps, such as its number of heads."""
    found = {name: _plain(value) for name, value in vars(part).items() if name != "training"}
    return {name: found[name] for name in sorted(found.keys() - OF_THE_HEAD) if found[name] is not None}


def _plain(value: object) -> object:
    """``None`` where it is something else."""
    if isinstance(value, bool | int | float | str | torch.Size):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__qualname__
    if hasattr(value, "to_dict"):  # transformers' configuration, which leaves out how attention is computed
        config = value.to_dict() | {"attention": getattr(value, "_attn_implementation", "")}
        return {name: config[name] for name in sorted(config) if name not in OF_THE_HEAD}
    return None
