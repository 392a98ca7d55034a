"""The read path: what comes next is fetched ahead, and what no tier holds is computed."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.prefetch import Prefetcher
from pipetransformer.autocache.source import Compute, SampleSource
from pipetransformer.autocache.store import FeatureStore

DEPTH = 2  # batches that are read ahead
NUM_BUFFERS = DEPTH + 2  # the batch before the present one may still be on its way to the device


@dataclass(frozen=True, eq=False)
class Request:
    """Samples (B,) of one split, padded to ``num_tokens``."""

    source: SampleSource
    ids: np.ndarray
    num_tokens: int

    def is_for(self, other: "Request") -> bool:
        same = self.source.name == other.source.name and self.num_tokens == other.num_tokens
        return same and np.array_equal(self.ids, other.ids)


@dataclass
class ReadStats:
    """What was read so far.

    Attributes:
        hits: Samples that a tier held.
        misses: Samples that went through the frozen layers.
        read_s: Seconds of reading, hidden behind training or not.
        waited_s: Seconds in which training waited for it.
        compute_s: Seconds of computing what was missing.
    """

    hits: int = 0
    misses: int = 0
    read_s: float = 0.0
    waited_s: float = 0.0
    compute_s: float = 0.0


class FeatureReader:
    """Reads features of one level for the process that runs the first stage.

    Args:
        stores: By the name of the split.
        key: Of the level; features of any other are as good as missing.
        compute: Runs the frozen layers on the model's input; ``None`` where nothing can be missing.
        reads: Counts what is read.
    """

    def __init__(self, stores: Mapping[str, FeatureStore], key: int, compute: Compute | None, reads: ReadStats) -> None:
        self._stores, self._key, self._compute, self.reads = stores, key, compute, reads
        self._buffers: list[Tensor] = [torch.empty(0)] * NUM_BUFFERS
        self._num_read = 0
        self._ahead: Prefetcher[Request, tuple[Tensor, Tensor]] | None = None

    def prefetch(self, requests: Iterator[Request]) -> None:
        """From here on reads ahead what will be asked for; any other read still works."""
        self.stop()
        self._ahead = Prefetcher(self._fetch, requests, DEPTH)

    def stop(self) -> None:
        """Ends reading ahead."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None

    def read(self, request: Request) -> Tensor:
        """Features (B, num_tokens, D); the memory is used again after ``NUM_BUFFERS`` more reads."""
        start = time.perf_counter()
        coming = self._ahead.next_request if self._ahead is not None else None
        if self._ahead is not None and coming is not None and coming.is_for(request):
            features, found = self._ahead.take()
        else:
            self.stop()  # the buffers are the thread's while it runs
            features, found = self._fetch(request)
        self.reads.waited_s += time.perf_counter() - start
        num_found = int(found.sum())
        self.reads.hits += num_found
        if num_found < len(request.ids):
            self._fill_gaps(request, features, ~found)
        return features

    def _fetch(self, request: Request) -> tuple[Tensor, Tensor]:
        start = time.perf_counter()
        store = self._stores[request.source.name]
        kind = store.description
        out = self._buffer((len(request.ids), request.num_tokens, kind.hidden_size), kind.dtype)
        features, found = store.read(request.ids, request.num_tokens, self._key, out)
        self.reads.read_s += time.perf_counter() - start
        return features, found

    def _buffer(self, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Memory that is written already: fresh pages take longer than the copying."""
        size, index = shape[0] * shape[1] * shape[2], self._num_read % NUM_BUFFERS
        self._num_read += 1
        if self._buffers[index].numel() < size or self._buffers[index].dtype != dtype:
            self._buffers[index] = torch.empty(size, dtype=dtype)
        return self._buffers[index][:size].view(shape)

    def _fill_gaps(self, request: Request, features: Tensor, gaps: Tensor) -> None:
        start = time.perf_counter()
        ids = request.ids[gaps.numpy()]
        if self._compute is None:
            raise RuntimeError(
                f"the cache holds no features of {len(ids)} samples of the {request.source.name} split: {ids[:5]}"
            )
        source, num_tokens = request.source, request.num_tokens
        computed = self._compute(source.inputs(ids, num_tokens), source.context(ids, num_tokens))
        features[gaps] = computed.to(features)
        self.reads.misses += len(ids)
        self.reads.compute_s += time.perf_counter() - start
