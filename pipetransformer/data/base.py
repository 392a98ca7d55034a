"""The interface of datasets. Torch is imported only where tensors are made, so that configuration stays fast."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from pipetransformer.data.tasks import Task, likeliest
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from pipetransformer.data.images.flip_pair import FlipPair
    from pipetransformer.data.images.mixing import Mixing
    from pipetransformer.data.unlabelled import Unlabelled
    from pipetransformer.models.base import Head


Plain = str | int | float | None | tuple[int, ...]
NUM_PROBED = 64  # samples that tell other data apart
PARTS = ("inputs", "context", "targets")  # of a batch
SPLIT_SEED = 0  # of draws that do not follow the run's seed: runs with other seeds see the same data


@dataclass(frozen=True)
class ImageFormat:
    """Input of an image model: side length in pixels and channels (``None`` takes the data's own), normalisation."""

    size: int | None = None
    num_channels: int | None = None
    mean: tuple[float, ...] = (0.5,)
    std: tuple[float, ...] = (0.5,)


@dataclass(frozen=True)
class TextFormat:
    """Input of a text model.

    Attributes:
        tokenizer: Of the model.
        max_length: The most tokens that its positions allow.
        vocab_size: Rows of its word embeddings, and columns of a causal head; 0 where they are not known.
    """

    tokenizer: Any
    max_length: int
    vocab_size: int = 0


def evenly_spaced(num: int, most: int) -> list[int]:
    """Returns at most ``most`` of the indices 0 .. num - 1, the first and the last among them, in order."""
    return np.unique(np.linspace(0, num - 1, most).astype(int)).tolist() if num else []


class Split(ABC):
    """Samples of one split, addressed by index. All readers take many samples at once.

    Attributes:
        name: For example ``train``, ``test``, ``validation_matched``.
        input_shape: (C, H, W) of an image, () for text.
        lengths: Tokens of each sample before padding, shape (N,); ``None`` where all samples have the same shape.
        row_length: Tokens of a row that several samples share in training; ``None``: each has a row of its own.
        loss_weights: Divisor of each sample's loss, shape (N,) of float64: the loss of a global batch is the sum of its
            samples' losses over the sum of these. It is the number of tokens that count where the loss of a sample is a
            sum over tokens, or the weight of its class; ``None``: 1 each, so that the loss is a mean over samples.
        flip_pair: Both pictures of each sample, where all that is random is whether it is mirrored; ``None`` elsewhere.
        mixing: Mixes the samples of a global batch with each other, in training; ``None``: they stay apart.
        is_slow: Reading samples takes long enough that processes should do it ahead, as decoding pictures does.
        reading: Settings by which reading the samples takes longer or less long, in words; empty where there are none.
        read_ahead: Parts of a batch that such processes read, of :data:`PARTS`; the others take no time.
    """

    name: str
    input_shape: tuple[int, ...] = ()
    lengths: np.ndarray | None = None
    row_length: int | None = None
    loss_weights: np.ndarray | None = None
    flip_pair: FlipPair | None = None
    mixing: Mixing | None = None
    is_slow: bool = False
    reading: str = ""
    read_ahead: tuple[str, ...] = PARTS

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def identity(self) -> str:
        """Returns a hex digest of all that determines the model's inputs for the samples, in their order.

        Two splits with the same identity give equal :meth:`inputs` in every epoch and equal :meth:`context` for the
        same ids. Targets have no part in it, nor has the split's name. It may read all of the data: call it once.
        """

    def quick_identity(self) -> str:
        """Returns a digest that tells other data apart in little time; by default the identity."""
        return self.identity()

    @property
    def num_scored(self) -> int:
        """The number of things that :meth:`score` counts; questions, where a question takes several samples."""
        return len(self)

    @abstractmethod
    def inputs(self, ids: Sequence[int], num_tokens: int | None, epoch: int = 0) -> Tensor:
        """Returns images (B, C, H, W) in float32, or token ids (B, num_tokens) padded to ``num_tokens``.

        A sample looks the same whatever its batch; only random transforms may depend on the epoch.
        """

    def context(self, ids: Sequence[int], num_tokens: int | None) -> dict[str, Tensor]:
        """Returns what every layer may need besides the hidden state.

        For texts that is ``attention_mask`` (B, T) of bool, and ``token_type_ids`` (B, T) where the tokenizer has them.
        """
        return {}

    @abstractmethod
    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        """Returns the targets of the task's loss, (B,) or (B, k) of any type whose numbers float64 holds exactly.

        Args:
            ids: The samples.
            num_tokens: Columns (B, num_tokens) where each token has a target; ``None``: as many as the longest has.
        """

    def predict(self, outputs: Tensor, ids: Sequence[int], num_tokens: int | None) -> Tensor:
        """Maps the outputs (B, ...) for these samples to what :meth:`score` needs: by default the likeliest class."""
        return likeliest(outputs)

    @abstractmethod
    def score(self, predictions: np.ndarray) -> dict[str, float]:
        """Computes metrics from the predictions of all N samples in order, the main one first.

        Classes (N,), values (N,), or for question answering the best spans (N, k, 3) as [start, end, score].
        """

    def rows(self, predictions: np.ndarray) -> Iterator[dict[str, Any]]:
        """Yields the predictions of :meth:`score` sample by sample, as plain values beside the targets."""
        targets = self.targets(range(len(self))).tolist()
        for index, (prediction, target) in enumerate(zip(predictions.tolist(), targets, strict=True)):
            yield {"id": index, "prediction": prediction, "target": target}


@dataclass(frozen=True)
class Data:
    """A loaded dataset.

    Attributes:
        train: The training split.
        evaluation: The splits to report on, the main one first.
        task: Objective of the training; the number of outputs and the names of classes are in its head.
        input_shape: (C, H, W) of an image, () for text.
        random_transform: True when a training sample looks different in each epoch.
        note: What the data decided where the options left it the choice, for the user.
        warnings: What the user should know of, such as samples that were cut.
    """

    train: Split
    evaluation: tuple[Split, ...]
    task: Task
    input_shape: tuple[int, ...] = ()
    random_transform: bool = False
    note: str = ""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DatasetSpec(ABC):
    """A user's choice of a dataset, checked in three steps of growing cost.

    :meth:`check` sees to the options while they are composed, :meth:`preflight` to the data in the launcher, before any
    process starts; neither needs torch. :meth:`load` does the work in every process.

    Attributes:
        path: Local file or folder; ``None`` takes the built-in or hub data.
        max_train_samples: Use at most this many training samples (a seeded draw); ``None`` uses all.
        max_eval_samples: The same for each evaluation split.
        num_train_samples: Training samples without that limit, for simulations, which load no data; ``None``: unknown.
    """

    path: str | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    num_train_samples: int | None = None

    modality: ClassVar[str] = "image"  # or "text"
    libraries: ClassVar[tuple[str, ...]] = ()  # that loading imports; where ranks are forked, before that and once

    @property
    def name(self) -> str:
        """The name in reports: that of the file or folder, or of the published data."""
        return Path(self.path or self._published).resolve().name

    @property
    def is_random(self) -> bool:
        """True where the options draw a training sample anew in each epoch."""
        return False

    @property
    def has_flip_pair(self) -> bool:
        """True where all that they draw is whether a picture is mirrored."""
        return False

    @property
    def is_mixed(self) -> bool:
        """True where they mix the training samples of a batch with each other."""
        return False

    @property
    def _published(self) -> str:
        """The name of what is read without a path."""
        return type(self).__name__.lower()

    def check(self) -> None:
        """Raises UserError for options that are wrong: ranges, paths, files that are missing. It opens no file."""
        if self.path is not None and not Path(self.path).exists():
            here = "" if Path(self.path).is_absolute() else f" in {Path.cwd()}"  # a run may be read from elsewhere
            raise UserError(f"dataset.path={self.path} does not exist{here}")
        for option in ("max_train_samples", "max_eval_samples"):
            limit = getattr(self, option)
            if limit is not None and limit < 1:
                raise UserError(f"dataset.{option}={limit} leaves no samples; give 1 or more, or null for all")

    def preflight(self) -> int | None:  # noqa: B027 - most datasets are looked at when they are loaded
        """Looks at the data once, without torch, after :meth:`check` has passed.

        Local files are read and parsed; the hub is asked once, with a short time-out, whether it has the data.

        Returns:
            The number of training samples, ``None`` where only :meth:`load` can tell.

        Raises:
            UserError: The data cannot be read or trained on, or the hub cannot be reached.
        """

    def _num_train(self, available: int) -> int:
        """Returns the number of training samples in use."""
        return available if self.max_train_samples is None else min(available, self.max_train_samples)

    @abstractmethod
    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        """Loads, checks and prepares the data.

        Raises:
            UserError: Nothing to train on, labels out of range, answers outside their context, images that do not
                fit; the message says what was found and what to change.
        """

    def unlabelled(self, source: Path, wanted: ImageFormat | TextFormat, head: Head) -> Unlabelled:
        """Reads samples without targets that look as those of this data, for ``pipetransformer-predict``.

        Args:
            source: A file or folder, which is there.
            wanted: Input of the model.
            head: Of the run, with the names of its classes.

        Raises:
            UserError: They cannot be read, or this kind of data has no way to read them.
        """
        raise UserError(
            f"{type(self).__name__} does not read samples without labels; give labelled ones by dataset.path= to "
            "pipetransformer-evaluate with predictions=true"
        )


def load_data(spec: DatasetSpec, wanted: ImageFormat | TextFormat) -> Data:
    """Loads a dataset, whose class may be the user's own.

    Raises:
        UserError: See :meth:`DatasetSpec.load`; or it returns something else than data, with its class.
    """
    data = spec.load(wanted)
    own = type(spec).__name__
    if not isinstance(data, Data):
        raise UserError(f"{own}.load returned {_kind(data)}; end it with: return Data(train, (evaluation,), task)")
    for name, kind in (("train", Split), ("evaluation", tuple | list), ("task", Task)):
        if not isinstance(getattr(data, name), kind):
            give = "a tuple of splits" if name == "evaluation" else f"a {kind.__name__}"
            raise UserError(f"{own}.load returned Data with {name} {_kind(getattr(data, name))}; give {give}")
    for split in data.evaluation:
        if not isinstance(split, Split):
            raise UserError(f"{own}.load returned Data with {_kind(split)} among evaluation; give a tuple of splits")
    return data


def count_before_loading(spec: DatasetSpec) -> int | None:
    """Returns what :meth:`DatasetSpec.preflight` does.

    Raises:
        UserError: See there; or it returns something else than a number or ``None``, with its class.
    """
    count = spec.preflight()
    if count is not None and (isinstance(count, bool) or not isinstance(count, Integral)):
        raise UserError(
            f"{type(spec).__name__}.preflight returned {_kind(count)}; return the number of training samples, or None "
            "where only load can tell"
        )
    return count


def _kind(value: Any) -> str:
    """Returns the type of a value in words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def subsample(num_samples: int, at_most: int | None) -> np.ndarray:
    """Draws ``at_most`` of the samples, ascending, by a fixed seed; a smaller draw lies within a larger one."""
    if at_most is None or at_most >= num_samples:
        return np.arange(num_samples)
    return np.sort(np.random.default_rng(SPLIT_SEED).permutation(num_samples)[:at_most])


class Digest:
    """Digest of one value after the other, equal for two splits that give a model the same inputs.

    Where one value ends and the next begins is part of it.

    Args:
        kind: Name of what is digested, so that different things never have one digest.
    """

    def __init__(self, kind: str) -> None:
        self._hash = blake2b(digest_size=16)
        self.add(kind)

    def add(self, *values: Plain | bytes | np.ndarray) -> None:
        """Adds values by their type and content. Arrays are read where they lie, unless their memory has gaps."""
        for value in values:
            if isinstance(value, np.ndarray):
                assert not value.dtype.hasobject, "addresses of objects say nothing"
                self._frame(b"array", f"{value.dtype.str} {value.shape}".encode())
                self._hash.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
            elif isinstance(value, bytes):
                self._frame(b"bytes", value)
            else:
                self._frame(b"value", repr(value).encode())

    def _frame(self, kind: bytes, content: bytes) -> None:
        self._hash.update(kind + len(content).to_bytes(8, "little") + content)

    def hex(self) -> str:
        """Returns 128 bits in hexadecimal digits."""
        return self._hash.hexdigest()
