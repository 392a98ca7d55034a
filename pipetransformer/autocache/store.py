"""Features of one level in a memory-mapped file that all processes of a node share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class FeatureStore:
    """Hidden states by sample, without their padding.

    A sample's tokens lie in consecutive rows; a byte per sample says that they are there. The file is sparse until it
    is written and is the same memory in every process that opens it.

    Args:
        path: File of the features; the marks lie beside it.
        lengths: Tokens of each sample, (N,).
        hidden_size: Width of a token's feature, D.
        dtype: Type of the features; what is read is bit for bit what was stored.
    """

    def __init__(self, path: Path, lengths: np.ndarray, hidden_size: int, dtype: torch.dtype) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._paths = (path, path.with_suffix(".valid"))
        self._lengths = torch.from_numpy(np.asarray(lengths, dtype=np.int64))
        self._starts = torch.cumsum(self._lengths, 0) - self._lengths
        num_rows = int(self._lengths.sum())
        size = num_rows * hidden_size
        self._rows = torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(num_rows, hidden_size)
        self._valid = torch.from_file(str(self._paths[1]), shared=True, size=len(lengths), dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._rows.numel() * self._rows.element_size()

    def write(self, ids: Sequence[int] | np.ndarray, features: Tensor) -> None:
        """Stores the samples' features (B, T, D), then marks them."""
        index = torch.as_tensor(np.asarray(ids))
        rows, real = self._locate(index, features.shape[1])
        self._rows[rows[real]] = features.detach().to("cpu", self._rows.dtype)[real]
        self._valid[index] = 1

    def read(self, ids: Sequence[int] | np.ndarray, num_tokens: int) -> Tensor:
        """The samples' features (B, num_tokens, D); zero where a sample has fewer tokens.

        Raises:
            RuntimeError: A sample was never stored.
        """
        index = torch.as_tensor(np.asarray(ids))
        if not bool(self._valid[index].all()):
            missing = index[self._valid[index] == 0].tolist()
            raise RuntimeError(f"{self._paths[0]} holds no features of samples {missing[:5]} ({len(missing)} missing)")
        rows, real = self._locate(index, num_tokens)
        features = self._rows[rows.reshape(-1)].view(*rows.shape, -1)
        return features if bool(real.all()) else features * real[:, :, None].to(features.dtype)

    def _locate(self, index: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Row of each token (B, T), and which of them belong to the sample; the others point at its first row."""
        offsets = torch.arange(num_tokens)
        real = offsets < self._lengths[index, None]
        return self._starts[index, None] + offsets * real, real

    def delete(self) -> None:
        """Gives back the space; processes that still have it open keep what they read."""
        for path in self._paths:
            path.unlink(missing_ok=True)
