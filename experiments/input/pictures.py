"""Made-up photographs in folders of classes, and two ways to read them: this package's, and torchvision's."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Sampler
from torchvision import datasets, transforms

from pipetransformer.autodp.sampler import batch_ids
from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.folders import from_folder
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.tasks import image_classification
from pipetransformer.training.input_reader import InputReader
from pipetransformer.training.loader import BatchLoader, ComingBatch

SIZE, MEAN, STD = 224, 0.5, 0.5
WIDTH, HEIGHT, QUALITY = 500, 375, 90  # as most of ImageNet's
CLASSES = ("a", "b")
WHOLE = Topology(Plan(0, 0, ((0, 1),), num_replicas=1, num_microbatches=1), rank=0)


def write_pictures(folder: Path, num: int, width: int = WIDTH, height: int = HEIGHT) -> Path:
    """Writes smooth shapes with a grain, whose files are about as large as photographs'."""
    generator = np.random.default_rng(0)
    for number in range(num):
        coarse = generator.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int64)
        pixels = (smooth + generator.normal(0, 6, smooth.shape)).clip(0, 255).astype(np.uint8)
        file = folder / "train" / CLASSES[number % len(CLASSES)] / f"{number:05d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(file, quality=QUALITY)
    test = folder / "test" / CLASSES[0] / "0.jpg"
    test.parent.mkdir(parents=True)
    test.write_bytes((folder / "train" / CLASSES[0] / "00000.jpg").read_bytes())
    return folder


def pictures(folder: Path) -> ImageSplit:
    """Returns the pictures as a run reads them for a model of :data:`SIZE` pixels."""
    wanted = ImageFormat(SIZE, 3, (MEAN,), (STD,))
    return ImageSplit("train", from_folder(folder).train, wanted, image_classification(len(CLASSES)))


class Ours:
    """Reads batches as a run does, without a model."""

    name = "this package"

    def __init__(self, folder: Path, order: Sequence[int], batch_size: int, num_workers: int) -> None:
        split = pictures(folder)
        self._reader = InputReader([split], num_workers)
        self._loader = BatchLoader.uncached(split, lambda inputs: torch.Size((len(inputs), 1, 1)), 0, self._reader)
        ids = np.asarray(order)
        self._batches = [batch_ids(ids, index, batch_size) for index in range(len(ids) // batch_size)]

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        self._loader.prefetch(map(ComingBatch, self._batches), WHOLE)
        for ids in self._batches:
            batch = self._loader.batch(ids, WHOLE)
            assert batch.inputs is not None
            assert batch.targets is not None
            yield batch.inputs, batch.targets

    def close(self) -> None:
        self._reader.close()


class Torchvision:
    """Reads the same batches with ``ImageFolder`` and a ``DataLoader``, as one writes it by hand."""

    name = "torchvision"

    def __init__(self, folder: Path, order: Sequence[int], batch_size: int, num_workers: int) -> None:
        steps = [transforms.Resize(SIZE), transforms.CenterCrop(SIZE), transforms.ToTensor()]
        transform = transforms.Compose([*steps, transforms.Normalize([MEAN] * 3, [STD] * 3)])
        sampler = _Order(order)
        self._loader = DataLoader(
            datasets.ImageFolder(str(folder / "train"), transform),
            batch_size=batch_size,
            sampler=sampler,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            drop_last=True,
        )

    def batches(self) -> Iterator[Any]:
        yield from self._loader

    def close(self) -> None:
        del self._loader  # which ends the workers


class _Order(Sampler[int]):
    def __init__(self, order: Sequence[int]) -> None:
        self._order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)
