"""The read path: prefetches features in a thread, copies them to the device, and recomputes misses."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from pipetransformer.autocache.source import Compute, SampleSource
from pipetransformer.autocache.store import FeatureStore
from pipetransformer.autopipe.memory import BATCHES_AHEAD
from pipetransformer.host_copies import Upload, empty_for, to_device

NUM_BUFFERS = BATCHES_AHEAD + 2  # the previous batch may still be on its way to the device

R = TypeVar("R")
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class Request:
    """Samples (B,) of one split, padded to ``num_tokens``."""

    source: SampleSource
    ids: np.ndarray
    num_tokens: int

    def equals(self, other: "Request") -> bool:
        """Tells whether both ask for the same samples in the same order and padding."""
        same = self.source.name == other.source.name and self.num_tokens == other.num_tokens
        return same and np.array_equal(self.ids, other.ids)


@dataclass
class ReadStats:
    """Counts and times of one process's reads.

    Attributes:
        hits: Samples that were stored.
        misses: Samples that the frozen layers recomputed.
        read_s: Seconds of reading, hidden behind training or not.
        waited_s: Seconds in which training waited for a read.
        compute_s: Seconds of recomputing misses.
    """

    hits: int = 0
    misses: int = 0
    read_s: float = 0.0
    waited_s: float = 0.0
    compute_s: float = 0.0


class FeatureReader:
    """Reads features of one level after another, in the process that runs the first stage.

    Attributes:
        device: Gets what is read. To a GPU the thread copies beside its kernels, from pinned buffers.
        stats: Of all reads so far, at all levels.
    """

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.stats = ReadStats()
        self._stores: Mapping[str, FeatureStore] = {}
        self._key = 0
        self._compute: Compute | None = None
        self._buffers: list[Tensor] = [torch.empty(0)] * NUM_BUFFERS
        self._uploads: list[Upload | None] = [None] * NUM_BUFFERS  # the last one from each buffer
        self._num_read = 0
        self._prefetcher: Prefetcher[Request, tuple[Upload, Tensor]] | None = None

    def start(self, stores: Mapping[str, FeatureStore], key: int, compute: Compute | None) -> None:
        """Reads a level from here on.

        Args:
            stores: By name of the split; none ends reading.
            key: Of the level; features under any other key count as misses.
            compute: Runs the frozen layers on the model's input, for misses; ``None`` where none can occur.
        """
        self.stop_prefetching()
        self._stores, self._key, self._compute = stores, key, compute

    def prefetch(self, requests: Iterator[Request]) -> None:
        """Prefetches requests in their order. Any other request can still be read, and ends the prefetching."""
        self.stop_prefetching()
        self._prefetcher = Prefetcher(self._fetch, requests, BATCHES_AHEAD, self.device)

    def stop_prefetching(self) -> None:
        """Ends the prefetching thread."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
            for upload in filter(None, self._uploads):
                upload.drop()

    def read(self, request: Request) -> Tensor:
        """Reads features (B, num_tokens, D) to the device.

        On the CPU their memory is used again after ``NUM_BUFFERS`` more reads.
        """
        start = time.perf_counter()
        coming = self._prefetcher.next_request if self._prefetcher is not None else None
        if self._prefetcher is not None and coming is not None and coming.equals(request):
            upload, found = self._prefetcher.take()
        else:
            self.stop_prefetching()  # the buffers belong to its thread while it runs
            upload, found = self._fetch(request)
        features = upload.take()
        self.stats.waited_s += time.perf_counter() - start
        num_found = int(found.sum())
        self.stats.hits += num_found
        if num_found < len(request.ids):
            self._recompute(request, features, ~found)
        return features

    def _fetch(self, request: Request) -> tuple[Upload, Tensor]:
        start = time.perf_counter()
        assert self._stores, "no level is stored"
        store = self._stores[request.source.name]
        index = self._num_read % NUM_BUFFERS
        self._num_read += 1
        out = self._buffer(index, (len(request.ids), request.num_tokens, store.spec.hidden_size), store.spec.dtype)
        features, found = store.read(request.ids, request.num_tokens, self._key, out)
        upload = self._uploads[index] = Upload(features, self.device)
        self.stats.read_s += time.perf_counter() - start
        return upload, found

    def _buffer(self, index: int, shape: tuple[int, int, int], dtype: torch.dtype) -> Tensor:
        """Returns memory that was written before: page faults of fresh memory take longer than the copy."""
        size, last = shape[0] * shape[1] * shape[2], self._uploads[index]
        if last is not None:
            last.wait()
        if self._buffers[index].numel() < size or self._buffers[index].dtype != dtype:
            self._buffers[index] = empty_for(self.device, size, dtype)
        return self._buffers[index][:size].view(shape)

    def _recompute(self, request: Request, features: Tensor, is_missing: Tensor) -> None:
        """Fills in the features (B, T, D) of missing samples, bool (B,)."""
        start = time.perf_counter()
        ids = request.ids[is_missing.numpy()]
        if self._compute is None:
            raise RuntimeError(
                f"the cache holds no features of {len(ids)} samples of the {request.source.name} split: {ids[:5]}"
            )
        source, num_tokens = request.source, request.num_tokens
        computed = self._compute(source.inputs(ids, num_tokens), source.context(ids, num_tokens))
        features[to_device(is_missing.nonzero()[:, 0], features.device)] = computed.to(features)
        self.stats.misses += len(ids)
        self.stats.compute_s += time.perf_counter() - start


class Prefetcher(Generic[R, Result]):
    """Answers requests in a known order in a thread, a few ahead of the consumer.

    Args:
        read: Answers one request; runs in the thread, one call at a time.
        requests: In the order in which the consumer takes their answers.
        depth: Most answers that are pending or ready, besides the one that was taken last.
        device: The thread's own. Otherwise a GPU's copies would begin on the first GPU, and take memory of it.
    """

    def __init__(
        self, read: Callable[[R], Result], requests: Iterator[R], depth: int, device: torch.device | None = None
    ) -> None:
        self._read, self._requests = read, requests
        begin = partial(torch.cuda.set_device, device) if device is not None and device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-prefetch", initializer=begin)
        self._pending: deque[tuple[R, Future[Result]]] = deque()
        for _ in range(depth):
            self._submit_next()

    def _submit_next(self) -> None:
        request = next(self._requests, None)
        if request is not None:
            self._pending.append((request, self._thread.submit(self._read, request)))

    @property
    def next_request(self) -> R | None:
        """Request that :meth:`take` answers next; ``None`` at the end."""
        return self._pending[0][0] if self._pending else None

    def take(self) -> Result:
        """Returns the answer to the next request, or raises the thread's error."""
        _, future = self._pending.popleft()
        result = future.result()
        self._submit_next()
        return result

    def close(self) -> None:
        """Ends the thread after its current answer."""
        self._pending.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)
