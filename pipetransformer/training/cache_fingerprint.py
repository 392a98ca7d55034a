"""The fingerprint of a run's features: everything that they depend on, except the weights of the frozen layers."""

import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import nn

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.source import SampleSource
from pipetransformer.config.schema import Config
from pipetransformer.data.base import Split
from pipetransformer.errors import StaleStore
from pipetransformer.models.stack import LayerStack

OF_THE_HEAD = {"id2label", "label2id", "num_labels", "problem_type", "num_classes"}


def fingerprint(
    config: Config, stack: LayerStack, split: Split, source: SampleSource, feature_format: FeatureFormat,
    device: torch.device,
) -> StoreFingerprint:  # fmt: skip
    """Returns everything besides the frozen weights that the features of a split depend on.

    Raises:
        StaleStore: The source of a module's class cannot be read, so that a change of it would go unnoticed.
    """
    modules = [module for layer in range(len(stack) - 1) for module in stack[layer].modules()]
    outline = f"{[stack[layer] for layer in range(len(stack) - 1)]} {[_settings(module) for module in modules]}"
    digest = blake2b(outline.encode(), digest_size=8).hexdigest()
    return StoreFingerprint(
        split_name=split.name,
        split_identity=split.identity() + " flip_pair" * (source.draws is not None),
        num_samples=len(source.lengths),
        num_tokens=int(source.lengths.sum()),
        hidden_size=feature_format.hidden_size,
        storage_type=feature_format.storage,
        precision=config.precision,
        capacity=f"{config.cache.memory_gib:g} GiB memory, {config.cache.disk_gib:g} GiB disk",
        model=" ".join([config.model.name, digest, *code_versions(modules)]),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
    )


def _settings(module: nn.Module) -> dict[str, Any]:
    """Collects the numbers, strings, functions and configurations of a module, such as its number of heads."""
    found = {name: _plain(value) for name, value in vars(module).items() if name != "training"}
    return {name: found[name] for name in sorted(found.keys() - OF_THE_HEAD) if found[name] is not None}


def _plain(value: object) -> object:
    """Returns a value that its text describes wholly, or ``None``."""
    if isinstance(value, bool | int | float | str | torch.Size):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, FunctionType | BuiltinFunctionType):
        return value.__qualname__
    if isinstance(value, partial):  # calls a block with more than its input
        return [_plain(value.func), *map(_plain, value.args)]
    if hasattr(value, "to_dict"):  # a configuration of transformers, whose dict lacks the attention implementation
        config = value.to_dict() | {"attention": getattr(value, "_attn_implementation", "")}
        return {name: config[name] for name in sorted(config) if name not in OF_THE_HEAD}
    return None


def code_versions(modules: Iterable[nn.Module]) -> Iterator[str]:
    """Yields the version of each installed package that has a module's class, and a digest of the other classes' code.

    Torch has a field of its own in the fingerprint.
    """
    classes = sorted({type(module) for module in modules}, key=lambda one: (one.__module__, one.__qualname__))
    packages = [one.__module__.partition(".")[0] for one in classes]
    versions = {package: _installed_version(package) for package in sorted({*packages} - {"torch"})}
    own_code = blake2b(digest_size=8)
    for one, package in zip(classes, packages, strict=True):
        if package in versions and versions[package] is None:
            own_code.update(_source_code(one).encode())
    yield from (f"{package}={version}" for package, version in versions.items() if version is not None)
    yield f"code={own_code.hexdigest()}"


def _installed_version(package: str) -> str | None:
    """Returns the version of an installed package; ``None`` for code that changes without its version."""
    module = sys.modules.get(package)
    file, version = getattr(module, "__file__", None), getattr(module, "__version__", None)
    is_installed = file is not None and Path(file).is_relative_to(sysconfig.get_path("purelib"))
    return version if is_installed and isinstance(version, str) else None


def _source_code(one: type) -> str:
    try:
        return inspect.getsource(one)
    except (OSError, TypeError) as error:
        raise StaleStore(
            f"the code of {one.__qualname__} cannot be read ({error}), so that stored features of an older one could "
            "not be told apart: define it in a file, or set `path`=null"
        ) from error
