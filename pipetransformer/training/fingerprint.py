"""What the features of a run depend on, but for the weights of the frozen layers."""

import importlib.metadata
from hashlib import blake2b

import torch

from pipetransformer.autocache.identity import Identity
from pipetransformer.autocache.room import Kind
from pipetransformer.config.options import Config
from pipetransformer.models.stack import LayerStack
from pipetransformer.training.feed import Feed

LIBRARIES = ("timm", "transformers")
OF_THE_HEAD = {"id2label", "label2id", "num_labels", "problem_type", "num_classes"}


def identity_of(config: Config, stack: LayerStack, feed: Feed, device: torch.device, kind: Kind) -> Identity:
    outline = blake2b(_outline(stack).encode(), digest_size=8).hexdigest()
    versions = " ".join(f"{name}={importlib.metadata.version(name)}" for name in LIBRARIES)
    return Identity(
        split_name=feed.split.name,
        split_identity=feed.split.identity(),
        num_samples=len(feed.source.lengths),
        num_tokens=int(feed.source.lengths.sum()),
        hidden_size=kind.hidden_size,
        storage_type=kind.storage,
        precision=config.precision,
        room=f"{config.cache.memory_gib:g} GiB memory, {config.cache.disk_gib:g} GiB disk",
        model=f"{config.model.name} {outline} {versions}",
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        torch_version=torch.__version__,
    )


def _outline(stack: LayerStack) -> str:
    """All below the head that weights do not tell."""
    config = stack.config if isinstance(stack.config, dict) else stack.config.to_dict()
    kept = {name: config[name] for name in sorted(config) if name not in OF_THE_HEAD}
    return f"{[stack[layer] for layer in range(len(stack) - 1)]} {kept}"
