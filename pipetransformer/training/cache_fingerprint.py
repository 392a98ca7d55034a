"""The fingerprint of a run's features: everything that they depend on, except the weights of the frozen layers."""

import sys
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import nn

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autocache.source import SampleSource
from pipetransformer.config.schema import Config
from pipetransformer.data.base import Split
from pipetransformer.models.stack import LayerStack
from pipetransformer.training.own_code import OF_THE_HEAD, describe, installed_version, own_code, package_of

OF_TORCH = vars(nn.Module()).keys()  # parameters and buffers, which the level's key has, hooks, and the mode


def fingerprint(
    config: Config, stack: LayerStack, split: Split, source: SampleSource, feature_format: FeatureFormat,
    budgets: Budgets, device: torch.device,
) -> StoreFingerprint:  # fmt: skip
    """Returns everything besides the frozen weights that the features of a split, and their places, depend on.

    Args:
        budgets: Of the split, in which those of the node and the sizes of the other splits have their share.

    Raises:
        StaleStore: The source of a module's class cannot be read, so that a change of it would go unnoticed.
    """
    modules = [module for layer in range(len(stack) - 1) for module in stack[layer].modules()]
    outline = f"{[stack[layer] for layer in range(len(stack) - 1)]} {[settings_of(module) for module in modules]}"
    digest = blake2b(outline.encode(), digest_size=8).hexdigest()
    return StoreFingerprint(
        split_name=split.name,
        split_identity=split.identity() + " flip_pair" * (source.draws is not None),
        num_samples=len(source.lengths),
        num_tokens=int(source.lengths.sum()),
        hidden_size=feature_format.hidden_size,
        storage_type=feature_format.storage,
        precision=config.precision,
        capacity=f"{budgets.memory_bytes} bytes of memory, {budgets.disk_bytes} of disk{of_node(source)}",
        model=" ".join([config.model.name, digest, *code_versions(modules)]),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
    )


def of_node(source: SampleSource) -> str:
    """Describes the samples that a node of several stores before the others; empty for one node, which has them all."""
    if source.is_local is None or source.is_local.all():
        return ""
    digest = blake2b(np.packbits(source.is_local).tobytes(), digest_size=4).hexdigest()
    return f", {np.count_nonzero(source.is_local)} of its node first ({digest})"


def settings_of(module: nn.Module) -> dict[str, Any]:
    """Collects the values of a module that can be described, such as its number of heads, by name."""
    found = {name: describe(value) for name, value in vars(module).items() if name not in OF_TORCH | OF_THE_HEAD}
    return {name: found[name] for name in sorted(found) if found[name] is not None}


def code_versions(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yields the version of each installed package that has a module's class, and a digest of the other classes' code.

    Their bases count, too. Torch has a field of its own in the fingerprint.
    """
    classes = {base for module in modules for base in type(module).__mro__[: -len(nn.Module.__mro__)]}
    packages = {package_of(one) for one in classes} - sys.stdlib_module_names - {"torch"}
    versions = {package: installed_version(package) for package in sorted(packages)}
    own_classes = (one for one in classes if package_of(one) in packages and versions[package_of(one)] is None)
    digest = blake2b("\n".join(own_code(own_classes)).encode(), digest_size=8).hexdigest()
    yield from (f"{package}={version}" for package, version in versions.items() if version is not None)
    yield f"code={digest}"
