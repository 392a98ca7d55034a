"""A user's own data sets: map-style, as ``torch.utils.data.DataLoader`` takes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipetransformer.data.base import NUM_PROBED, Data, DatasetSpec, ImageFormat, Split, TextFormat, evenly_spaced
from pipetransformer.data.map_samples import Sample, readable, sample_of
from pipetransformer.data.tasks import Task, check_losses
from pipetransformer.errors import StaleStore, UserError
from pipetransformer.metric import plain_metrics
from pipetransformer.models.base import Head

if TYPE_CHECKING:
    from torch import Tensor

Loss = Callable[..., Any]
"""Loss of each sample: ``loss(output, target) -> (B,)``; targets have the shape (B, ...) that the data set gives."""
Metrics = Callable[[np.ndarray, np.ndarray], dict[str, float]]
"""Metrics from predictions (N, ...) and targets (N, ...) of all samples in order.

Predictions are classes (N,), or outputs in the model's shape; outputs (N, 1) come as (N,) where targets are (N,).
"""
OutputShape = Callable[[tuple[int, ...]], tuple[int, ...]]

READ_AT_ONCE = 256  # samples, where all are looked at


class MapStyleSplit(Split):
    """Samples of a map-style data set.

    A sample is a pair ``(input, target)``, or a dictionary with one of
    :data:`~pipetransformer.data.map_samples.INPUTS`, one of :data:`~pipetransformer.data.map_samples.TARGETS` and, for
    tokens, further values per token such as ``attention_mask``. Inputs are tensors of one shape, or token ids, 1-D and
    of any length, which are padded on the right and masked. Of a ``datasets.Dataset``, whatever its format, the columns
    with these names are read and no others, as by transformers' trainer; one that changes what the model computes and
    that its layers do not take is refused by :class:`~pipetransformer.ElasticTrainer`, and so are texts of different
    lengths where a layer sees the padding.

    Args:
        name: Name of the split in reports.
        dataset: The data set; ``dataset[i]`` gives the sample with the same values on every rank. Where it has
            ``__getitems__``, batches are read by that, as torch's loader does.
        loss: Loss of each sample.
        metrics: Metrics of predictions and targets; accuracy where outputs are (B, C), C > 1, and targets are integers.
        padding_id: Token of which those at the end of a text are padding, masked or not; ``None``: none is.

    Raises:
        UserError: It is no map-style data set, or its first sample is of neither form.
    """

    def __init__(
        self, name: str, dataset: Any, loss: Loss, metrics: Metrics | None = None, padding_id: int | None = None
    ) -> None:
        self.name, self._dataset, self._loss, self._metrics = name, readable(name, dataset), loss, metrics
        self._padding_id = padding_id
        self._last: tuple[tuple[int, ...], list[Sample]] = ((), [])
        if len(dataset) == 0:
            raise UserError(f"the data set {name} is empty; give at least one sample")
        first = self._read([0])[0]
        self.input_shape = () if first.is_text else tuple(first.input.shape)
        self._target_dtype, self._target_shape = first.target.dtype, tuple(first.target.shape)
        if first.is_text:
            self.lengths = self._lengths()

    def __len__(self) -> int:
        return len(self._dataset)

    def _lengths(self) -> np.ndarray:
        """Returns the tokens of each sample, (N,).

        Raises:
            UserError: Samples have other values per token, or each has a target for each token and they differ in
                length or are padded.
        """
        found = [(sample.num_tokens, sample.is_tagged, {*sample.per_token}) for sample in self._all(range(len(self)))]
        lengths = np.array([num_tokens for num_tokens, *_ in found])
        for index, (*_, names) in enumerate(found):
            if different := names ^ found[0][2]:
                raise UserError(
                    f"of the samples 0 and {index} of {self.name} one has {', '.join(sorted(different))} and the other "
                    "not; give each sample the same keys"
                )
        if all(is_tagged for _, is_tagged, _ in found):
            self._check_one_length(lengths)
        return lengths

    def _check_one_length(self, lengths: np.ndarray) -> None:
        """Refuses texts with a target for each token that differ in length, or have targets for padding."""
        others, num_targets = np.flatnonzero(lengths != lengths[0]), self._target_shape[0]
        if others.size:
            found = f"sample 0 has {lengths[0]} tokens and sample {others[0]} {lengths[others[0]]}"
        elif lengths[0] != num_targets:
            found = f"sample 0 has {num_targets} targets and {lengths[0]} tokens before its padding"
        else:
            return
        raise UserError(
            f"each sample of {self.name} has a target for each token, and {found}; bring all to one length without "
            "padding, or take dataset=tokens or dataset=causal_lm by ElasticTrainer.from_config"
        )

    @cached_property
    def draws_at_random(self) -> bool:
        """True when a sample differs from one read to the next; some are read twice to see it."""
        rows = evenly_spaced(len(self), NUM_PROBED)
        pairs = zip(self._load(rows), self._load(rows), strict=True)
        return any(not one.equals(other) for one, other in pairs)

    def identity(self) -> str:
        """See :meth:`Split.identity`. What draws at random is read with the global generators seeded for it.

        Raises:
            StaleStore: It draws from others, so that no digest tells it from other data.
        """
        if not self.draws_at_random:
            return self._digest(range(len(self)))
        from pipetransformer.data.images.library_rng import kept_generators, seed_generators

        digests = []
        with kept_generators():
            for ids in (evenly_spaced(len(self), NUM_PROBED), evenly_spaced(len(self), NUM_PROBED), range(len(self))):
                seed_generators(0)
                digests.append(self._digest(ids, seeded=True))
        if digests[0] != digests[1]:
            raise StaleStore(
                f"the samples of {self.name} are drawn by generators of their own, so that stored features of other "
                "data could not be told apart: draw from the global ones of Python, NumPy or torch, or set `path`=null"
            )
        return digests[2]

    def _digest(self, ids: Sequence[int], seeded: bool = False) -> str:
        """Returns the digest of samples; of their shapes alone where each read gives other values.

        Args:
            seeded: Reads give the same values.
        """
        import torch

        digest = blake2b(digest_size=16)
        for sample in self._all(ids):
            for name, values in sorted({"": sample.input, **sample.per_token}.items()):
                digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
                if seeded or not self.draws_at_random:
                    digest.update(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def quick_identity(self) -> str:
        """Returns the digest of a few samples and of their number: a user's own data set may take long to read."""
        few = evenly_spaced(len(self), NUM_PROBED)
        return blake2b(f"{len(self)} {self._digest(few)}".encode(), digest_size=16).hexdigest()

    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        import torch

        samples = self._read(ids)
        if num_tokens is not None:
            return torch.stack([_padded(sample.input, num_tokens) for sample in samples])  # (B, T)
        for i, sample in zip(ids, samples, strict=True):
            if tuple(sample.input.shape) != self.input_shape:
                raise UserError(
                    f"sample {i} of {self.name} has shape {tuple(sample.input.shape)} and sample 0 {self.input_shape}; "
                    "bring all samples to one shape"
                )
        return torch.stack([sample.input for sample in samples])

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        import torch

        if num_tokens is None:
            return {}
        samples = self._read(ids)
        names = samples[0].per_token
        return {
            name: torch.stack([_padded(sample.per_token[name], num_tokens) for sample in samples]) for name in names
        }

    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        import torch

        samples = self._read(ids)
        for i, sample in zip(ids, samples, strict=True):
            if tuple(sample.target.shape) != self._target_shape:
                raise UserError(
                    f"the targets of the samples 0 and {i} of {self.name} have shapes {self._target_shape} and "
                    f"{tuple(sample.target.shape)}; bring all to one shape"
                )
        stacked = torch.stack([sample.target for sample in samples])
        if stacked.is_floating_point() and not self._target_dtype.is_floating_point:
            raise UserError(
                f"the target of sample 0 of {self.name} is a whole number ({self._target_dtype}), and others are not "
                f"({stacked.dtype}); give all of them as floating-point numbers"
            )
        return stacked

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """Returns the loss of each sample (B,).

        Args:
            output: The model's output (B, ...).
            targets: Targets of any shape and type that holds their values, as float64 (B,) or (B, k).

        Raises:
            UserError: The loss is not one number per sample.
        """
        targets = targets.to(self._target_dtype).reshape(len(output), *self._target_shape)
        try:
            losses = self._loss(output, targets)
        except Exception as error:  # one of the user's own, whose place is in the trace
            given = f"an output {tuple(output.shape)} and targets {tuple(targets.shape)} of {targets.dtype}"
            error.add_note(f"raised by the loss for {self.name}, which was given {given}")
            raise
        check_losses(losses, len(output))
        return losses

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Returns of each sample its loss, 1 for a class, the shape of its prediction, the prediction, and its target.

        The prediction is the likeliest class, or the output where metrics look at it. Where nobody looks at them,
        prediction and target are empty.

        Returns:
            Shape (B, 3 + d + k + t), float64: loss, 1 or 0, d, the d sizes of the shape, its k numbers, and the t of
            the target.
        """
        import torch

        targets = self.targets(ids).to(outputs.device)
        losses = self.loss(outputs, targets)
        is_class = self._has_classes(outputs)
        predicted = outputs.argmax(-1) if is_class else outputs
        if not is_class and self._metrics is None:
            predicted, targets = (each.new_empty(len(outputs), 0) for each in (outputs, targets))
        header = losses.new_tensor([is_class, predicted.ndim - 1, *predicted.shape[1:]], dtype=torch.float64)
        values = [each.reshape(len(losses), math.prod(each.shape[1:])).double() for each in (predicted, targets)]
        return torch.cat([losses[:, None].double(), header.expand(len(losses), -1), *values], dim=1)

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        loss = {"loss": float(predictions[:, 0].mean())}
        if self._metrics is None and not predictions[:, 1].all():
            return loss
        num_sizes = int(predictions[0, 2])
        sizes = predictions[0, 3 : 3 + num_sizes].astype(np.int64)
        given, truth = np.split(predictions, [3 + num_sizes + math.prod(sizes)], axis=1)
        predicted, targets = given[:, 3 + num_sizes :].reshape(len(given), *sizes), self._targets_of(truth)
        if predictions[:, 1].all():
            predicted = predicted.astype(np.int64)
        if self._metrics is not None:
            if targets.ndim == 1 and predicted.shape[1:] == (1,):
                predicted = predicted[:, 0]
            own = plain_metrics(self._metrics(predicted, targets), "metrics")
            return own | loss | own  # its own loss, where it gives one
        return {"accuracy": float((predicted == targets).mean())} | loss

    def _targets_of(self, values: np.ndarray) -> np.ndarray:
        """Returns targets from their values (N, t) in float64, in the type and shape of the data set."""
        import torch

        return _array(torch.from_numpy(values).to(self._target_dtype)).reshape(len(values), *self._target_shape)

    def _has_classes(self, outputs: Tensor) -> bool:
        """Returns whether the outputs are logits (B, C) of several classes and the targets classes (B,)."""
        are_logits = outputs.ndim == 2 and outputs.shape[1] > 1
        return are_logits and not self._target_shape and not self._target_dtype.is_floating_point

    def _read(self, ids: Sequence[int]) -> list[Sample]:
        """Reads samples; inputs, context and targets of a batch are asked for one after the other and read once."""
        key = tuple(int(i) for i in ids)
        last, samples = self._last
        if last != key:
            samples = self._load(key)
            self._last = key, samples
        return samples

    def _load(self, ids: Sequence[int]) -> list[Sample]:
        read = getattr(self._dataset, "__getitems__", None)
        rows = [self._dataset[i] for i in ids] if read is None else read(list(ids))
        return [sample_of(row, i, self._padding_id) for i, row in zip(ids, rows, strict=True)]

    def _all(self, ids: Sequence[int]) -> Iterator[Sample]:
        """Yields many samples, a few in memory at a time."""
        for start in range(0, len(ids), READ_AT_ONCE):
            yield from self._load(ids[start : start + READ_AT_ONCE])


def _array(values: Tensor) -> np.ndarray:
    """Returns values as NumPy has them, which knows no bfloat16."""
    import torch

    return values.float().numpy() if values.dtype == torch.bfloat16 else values.numpy()


def _padded(values: Tensor, num_tokens: int) -> Tensor:
    """Values (T,) filled up with zeros to (num_tokens,)."""
    padded = values.new_zeros(num_tokens)
    padded[: len(values)] = values
    return padded


@dataclass(frozen=True, kw_only=True)
class MapStyleData(DatasetSpec):
    """Data sets that a user's script has made.

    Attributes:
        train: The training samples.
        evaluation: Samples to score, by name of the split, the main one first.
        loss: Loss of each sample.
        metrics: See :class:`MapStyleSplit`.
        output_shape: Maps the shape (B, T, D) between layers to that of the model's output.
        padding_id: See :class:`MapStyleSplit`.
    """

    train: Any
    evaluation: Mapping[str, Any]
    loss: Loss
    metrics: Metrics | None = None
    output_shape: OutputShape
    padding_id: int | None = None

    modality: ClassVar[str] = "any"

    @property
    def name(self) -> str:
        return type(self.train).__name__

    def check(self) -> None:
        """Accepts what the script has made; :meth:`load` looks at it."""

    def preflight(self) -> int | None:
        return len(self.train)

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        how = self.loss, self.metrics, self.padding_id
        train = MapStyleSplit("train", self.train, *how)
        evaluation = (MapStyleSplit(name, data, *how) for name, data in self.evaluation.items())
        task = Task("custom", Head("custom", 0), train.loss, self.output_shape, _scored_by_split)
        return Data(train, tuple(evaluation), task, train.input_shape, train.draws_at_random)


def _scored_by_split(predictions: Any, targets: Any) -> dict[str, float]:
    raise AssertionError("a map-style split scores itself")
