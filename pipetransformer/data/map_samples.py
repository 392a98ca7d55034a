"""Samples of a user's own data set as tensors: what a row holds, and which columns of a table are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

INPUTS, TARGETS = ("input_ids", "pixel_values", "input", "image"), ("labels", "label", "target")
OF_THE_LOSS = ("start_positions", "end_positions")  # which a model takes for a loss of its own
PER_TOKEN = ("attention_mask", "token_type_ids", "position_ids", "task_type_ids")


@dataclass(frozen=True)
class Sample:
    """One sample as tensors.

    Attributes:
        input: The input, (T,) of tokens or of any shape.
        target: What the loss compares with, () or of any shape.
        per_token: Further values of each token, (T,).
        is_tagged: The target has a number for each token, of padding too.
    """

    input: Tensor
    target: Tensor
    per_token: dict[str, Tensor] = field(default_factory=dict)
    is_tagged: bool = False

    @property
    def is_text(self) -> bool:
        return self.input.ndim == 1 and not self.input.is_floating_point()

    @property
    def num_tokens(self) -> int:
        return len(self.input)

    def equals(self, other: Sample) -> bool:
        """Returns whether both have the same input; what is missing (NaN) in both is the same."""
        mine, theirs = self.input, other.input
        if mine.shape != theirs.shape:
            return False
        return bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())


def readable(name: str, dataset: Any) -> Any:
    """Returns the data set, or what is read of a ``datasets.Dataset``.

    Raises:
        UserError: It is no map-style data set.
    """
    if isinstance(dataset, Mapping):
        raise UserError(f"the data set {name} holds several: {', '.join(map(str, dataset))}; give one of them")
    if not hasattr(dataset, "__len__") or not _has_indices(dataset):
        raise UserError(
            f"the data set {name} is a {type(dataset).__name__} without a length or without indices; give a map-style "
            "one, from which samples are read in any order"
        )
    if (columns := _columns(dataset)) is None:
        return dataset
    wanted = [column for column in columns if column in (*INPUTS, *TARGETS, *PER_TOKEN)]
    return dataset.select_columns(wanted) if {*wanted} & {*INPUTS} and {*wanted} & {*TARGETS} else dataset


def _has_indices(dataset: Any) -> bool:
    """Returns whether it reads samples by index; torch's base class has a method for it that only raises an error."""
    from torch.utils.data import Dataset

    return hasattr(dataset, "__getitem__") and getattr(type(dataset), "__getitem__", None) is not Dataset.__getitem__


def _columns(dataset: Any) -> list[str] | None:
    """Returns the columns of a ``datasets.Dataset``; ``None`` of one whose transform may read any, and of others."""
    if not hasattr(dataset, "select_columns") or dataset.format["type"] == "custom":
        return None
    return dataset.column_names


def further_names(dataset: Any) -> list[str]:
    """Returns the names of all columns, or of all that the first sample holds, beside inputs and targets."""
    if (names := _columns(dataset)) is None:
        first = dataset[0] if len(dataset) else ()
        names = [*first] if isinstance(first, Mapping) else []
    return [name for name in names if name not in (*INPUTS, *TARGETS, *OF_THE_LOSS)]


def sample_of(row: Any, index: int, padding_id: int | None = None) -> Sample:
    """Returns a row of a data set as a sample; padding that it brings is cut off.

    Args:
        row: As the data set gives it.
        index: Its place.
        padding_id: Token of which those at the end are padding, masked or not; ``None``: none is.

    Raises:
        UserError: It is of neither form that :class:`~pipetransformer.data.map_style.MapStyleSplit` reads.
    """
    import torch

    if isinstance(row, Mapping):
        given, target = _one_of(row, INPUTS, index), _one_of(row, TARGETS, index)
        others = {key: value for key, value in row.items() if key not in (given, target)}
        pair: tuple[Any, Any] = row[given], row[target]
    elif isinstance(row, tuple | list) and len(row) == 2:
        pair, others = (row[0], row[1]), {}
    else:
        raise UserError(
            f"sample {index} is a {type(row).__name__}; a sample is a pair (input, target), or a dictionary with one "
            f"of {', '.join(INPUTS)} and one of {', '.join(TARGETS)}"
        )
    sample = Sample(*_tensors(pair, index))
    if sample.input.ndim == 1 and not len(sample.input):
        raise UserError(f"sample {index} has no token in its input; leave it out of the data set")
    if not sample.is_text:
        return sample
    per_token: dict[str, Tensor] = {}
    for key, value in others.items():
        try:
            per_token[key] = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"{key} of sample {index} is a {type(value).__name__}; leave it out or give one value per token"
            ) from None
    for key, values in per_token.items():
        if values.shape != sample.input.shape:
            raise UserError(
                f"{key} of sample {index} has shape {tuple(values.shape)}, and its {len(sample.input)} tokens have one "
                "value each; leave it out or give one value per token"
            )
    if {"attention_mask", "position_ids"} <= {*per_token}:
        _check_positions(index, **per_token)
    mask = per_token.pop("attention_mask", torch.ones_like(sample.input)).bool()
    text = mask if padding_id is None else mask & (sample.input != padding_id)
    length = max(1, int(text.nonzero().max()) + 1 if text.any() else 1)
    per_token["attention_mask"] = mask
    per_token = {key: values[:length] for key, values in per_token.items()}
    return Sample(sample.input[:length], sample.target, per_token, sample.target.shape == sample.input.shape)


def _tensors(pair: tuple[Any, Any], index: int) -> tuple[Tensor, Tensor]:
    """Returns input and target as tensors.

    Raises:
        UserError: One of them is none, as a picture, a text or nothing.
    """
    import torch

    try:
        return torch.as_tensor(pair[0]), torch.as_tensor(pair[1])
    except (TypeError, ValueError, RuntimeError) as error:
        kinds = [type(each).__name__ for each in pair]
        raise UserError(
            f"sample {index} has an input of type {kinds[0]} and a target of type {kinds[1]} ({error}); give tensors, "
            "arrays or numbers, a picture through torchvision's ToTensor or with_transform of datasets"
        ) from None


def _check_positions(index: int, attention_mask: Tensor, position_ids: Tensor, **_: Tensor) -> None:
    """Refuses positions that begin anew beside a mask: they divide a decoder's row into texts, and the mask does not.

    Raises:
        UserError: With the token.
    """
    seen = attention_mask.bool()
    anew = seen[1:] & seen[:-1] & (position_ids.diff() != 1)
    if anew.any():
        raise UserError(
            f"position_ids of sample {index} begin anew at token {int(anew.nonzero()[0]) + 1}, and its attention_mask "
            "makes all its tokens one text; leave attention_mask and padding out where a row holds several"
        )


def _one_of(row: Mapping[str, Any], names: tuple[str, ...], index: int) -> str:
    found = [name for name in names if name in row]
    if len(found) != 1:
        raise UserError(f"sample {index} has the keys {', '.join(row)}; give exactly one of {', '.join(names)}")
    return found[0]
