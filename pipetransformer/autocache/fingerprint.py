"""Everything that stored features depend on: a key of the frozen weights for each level, and the rest as one value."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from hashlib import blake2b
from typing import TYPE_CHECKING, get_type_hints

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT_VERSION = 1  # to be raised whenever the bytes of a store change their meaning
KEY_BYTES = 8
MAX_SHOWN = 40  # characters of a value in a message


def level_key(below: int, layers: Iterable[Mapping[str, Tensor]]) -> int:
    """Returns the key of the level whose blocks are those of the level below and ``layers``.

    The key is chained layer by layer, so that a prefix has one key however many freezes led to it:
    ``level_key(0, [a, b]) == level_key(level_key(0, [a]), [b])``.

    Args:
        below: Key of the level below; 0 for the model's input.
        layers: Parameters and buffers of each newly frozen layer by name, the ones that are not saved included; from
            the bottom up, at least one layer. Name, type, shape and bytes count; order and device do not.

    Returns:
        64 bits, never 0.
    """
    key = below
    for layer in layers:
        key = _layer_key(key, layer)
    assert key != 0, "a level has at least one layer"
    return key


def _layer_key(below: int, layer: Mapping[str, Tensor]) -> int:
    digest = blake2b(below.to_bytes(KEY_BYTES, "little"), digest_size=KEY_BYTES)
    for name, tensor in sorted(layer.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode() + b"\n")
        digest.update(raw_bytes(tensor))
    return int.from_bytes(digest.digest(), "little") or 1


def raw_bytes(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor in host memory; a view where it is contiguous there."""
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@dataclass(frozen=True, kw_only=True)
class StoreFingerprint:
    """Everything besides the frozen weights that the features of a split and their offsets in the files depend on.

    The weights are not included, because one store holds level after level, each under its :func:`level_key`. Neither
    are labels and head, so that a sweep over heads, rates or seeds reuses the first run's features, nor the number of
    processes of a node and the plan, which do not change what a frozen layer computes beyond rounding.

    Attributes:
        split_name: For example ``train``.
        split_identity: ``Split.identity()``.
        num_samples: N of the split.
        num_tokens: Tokens of all samples together at the layer boundary.
        hidden_size: Width of a row, D.
        capacity: Budgets of the split and, of several nodes, the samples that a node stores first: they decide the
            offsets of the samples.
        storage_type: Name of the codec, for example ``float32``.
        precision: Types of weights and products: the ``precision`` of the run.
        model: First word: a readable name. Then everything about the model that its weights do not tell: classes of
            the layers, number of heads, activation, eps, attention implementation, and the versions of the packages
            that its modules come from.
        device: ``cpu`` or the name of the GPU. Their matrix products round differently, with TF32 by far.
        torch_version: Its kernels compute the features, and resize pictures.
        format_version: Of the files.
    """

    split_name: str
    split_identity: str
    num_samples: int
    num_tokens: int
    hidden_size: int
    capacity: str
    storage_type: str
    precision: str
    model: str
    device: str
    torch_version: str
    format_version: int = FORMAT_VERSION

    def digest(self) -> str:
        """Returns 64 bits in hexadecimal digits, the same in every process."""
        return blake2b(self.to_json().encode(), digest_size=8).hexdigest()

    def explain_difference(self, other: StoreFingerprint) -> str:
        """Lists the fields in which ``other`` differs, each as ``name (its value, here ours)``; empty if equal."""
        ours, theirs = asdict(self), asdict(other)
        changed = [name for name in ours if ours[name] != theirs[name]]
        shown = ((name, *_around_change(str(theirs[name]), str(ours[name]))) for name in changed)
        return ", ".join(f"{name.replace('_', ' ')} ({its}, here {own})" for name, its, own in shown)

    def to_json(self) -> str:
        """Serializes for :meth:`from_json`; equal for equal fingerprints."""
        return json.dumps(asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> StoreFingerprint:
        """Reads a fingerprint.

        Raises:
            UserError: The text is damaged, or from a version with other fields.
        """
        try:
            values, types = json.loads(text), get_type_hints(cls)
        except RecursionError:
            raise UserError("it is nested more deeply than any that a run writes") from None
        if not isinstance(values, dict):
            raise UserError(f"it is a {type(values).__name__}, not an object with names")
        names = [field.name for field in fields(cls)]
        if wrong := sorted({*names} ^ {*values}):
            raise UserError(f"it is from another version: only one of both knows {', '.join(wrong)}")
        for name, value in values.items():
            if type(value) is not types[name]:
                raise UserError(f"{name} is {value!r}, not of type {types[name].__name__}")
        return cls(**values)


def _around_change(one: str, two: str) -> list[str]:
    """Returns both values; long ones from shortly before their first difference on."""
    if max(len(one), len(two)) <= MAX_SHOWN:
        return [one, two]
    common = next(
        (index for index, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two))
    )
    start = max(0, common - MAX_SHOWN // 4)
    return [("..." if start else "") + text[start : start + MAX_SHOWN] for text in (one, two)]
