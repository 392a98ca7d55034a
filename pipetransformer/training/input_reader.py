"""Reads the samples of coming batches ahead, in processes, so that a step finds its input ready::

    rank        [step 0       ][step 1       ][step 2       ][step 3      ...  takes a batch that is ready
    worker 0    [batch 0][batch 2      ][batch 4      ][batch 6      ...       decodes and transforms
    worker 1    [batch 1      ][batch 3      ][batch 5      ...

The workers are those of torch's DataLoader. Its sampler yields requests in the order of the steps, and the answers come
back in this order. A request holds all that its samples depend on, the epoch of random transforms included, so that a
worker reads bit for bit what the rank would; a batch that nobody announced is read by the rank itself.

Workers are forked, because sources of data need not be picklable. They are started once, when the data is there and the
model is not: they share little memory that the rank would write to, and touch neither devices nor process groups.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Loading
from pipetransformer.cores import num_cores
from pipetransformer.data.base import PARTS, Split
from pipetransformer.data.images.mixing import Mix
from pipetransformer.parent_process import end_with_parent
from pipetransformer.training.interrupt import SIGNALS
from pipetransformer.training.world import LocalRank

MAX_WORKERS = 8  # of a rank, where the user leaves their number open


@dataclass(frozen=True, eq=False)
class InputRequest:
    """Samples (B,) of one split that a rank reads for one batch.

    Attributes:
        split: Its number among those of the reader.
        ids: The samples.
        num_tokens: Tokens to which they are padded; ``None`` where all samples have one shape.
        epoch: Draws random transforms.
        parts: What is read of them, of :data:`~pipetransformer.data.base.PARTS`.
        mix: Mixes them with others; ``None``: they stay apart.
    """

    split: int
    ids: np.ndarray
    num_tokens: int | None
    epoch: int
    parts: tuple[str, ...]
    mix: Mix | None = None

    def equals(self, other: InputRequest) -> bool:
        """Tells whether both ask for the same samples, in the same order and form."""
        mine, theirs = ((one.split, one.num_tokens, one.epoch, one.parts) for one in (self, other))
        return mine == theirs and np.array_equal(self.ids, other.ids) and _are_equal(self.mix, other.mix)

    def only(self, parts: Iterable[str]) -> InputRequest:
        """Returns the same request for some of its parts."""
        wanted = {*parts}
        return replace(self, parts=tuple(part for part in self.parts if part in wanted))


def _are_equal(one: Mix | None, other: Mix | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(np.array_equal(mine, vars(other)[name]) for name, mine in vars(one).items())


class Samples(NamedTuple):
    """Parts of a batch; ``None`` for one that was not asked for."""

    inputs: Tensor | None = None
    context: dict[str, Tensor] | None = None
    targets: Tensor | None = None


def read_samples(split: Split, request: InputRequest) -> Samples:
    """Reads what a request asks for. The result follows from both arguments alone, in any process."""
    context = None
    if "context" in request.parts:
        context = split.context(request.ids.tolist(), request.num_tokens)
    return Samples(
        _inputs(split, request) if "inputs" in request.parts else None,
        context,
        _targets(split, request) if "targets" in request.parts else None,
    )


def _inputs(split: Split, request: InputRequest) -> Tensor:
    ids, mix = request.ids, request.mix
    if mix is None:
        return split.inputs(ids.tolist(), request.num_tokens, request.epoch)
    wanted, rows = np.unique(np.concatenate([ids, mix.partners]), return_inverse=True)  # each is read once
    inputs = split.inputs(wanted.tolist(), request.num_tokens, request.epoch)
    return mix.inputs(inputs[rows[: len(ids)]], inputs[rows[len(ids) :]])


def _targets(split: Split, request: InputRequest) -> Tensor:
    own = split.targets(request.ids.tolist(), request.num_tokens)
    if request.mix is None:
        return own
    assert split.mixing is not None
    partners = split.targets(request.mix.partners.tolist(), request.num_tokens)
    return request.mix.targets(own, partners, split.mixing.num_outputs)


def open_inputs(config: Config, splits: Sequence[Split], device: torch.device) -> tuple[InputReader, list[str]]:
    """Starts what reads the samples of a run ahead; with a note for each option that has no effect."""
    options, notes = config.loader, []
    num_workers = options.num_workers
    if num_workers is None:
        num_workers = default_num_workers(splits, device, LocalRank.here().local_world_size)
    if num_workers and multiprocessing.current_process().daemon:
        if options.num_workers:
            notes.append(f"loader.num_workers={num_workers} has no effect: a daemonic process cannot start others")
        num_workers = 0
    if not num_workers and options.prefetch_factor != Loading().prefetch_factor:
        notes.append(f"loader.prefetch_factor={options.prefetch_factor} has no effect: no worker reads ahead")
    is_gpu, timeout_s = device.type == "cuda", config.parallel.timeout_s
    key = config.seed, dist.get_rank() if dist.is_initialized() else 0
    return InputReader(splits, num_workers, options.prefetch_factor, is_gpu, timeout_s, key), notes


def default_num_workers(splits: Iterable[Split], device: torch.device, local_world_size: int) -> int:
    """Returns the workers of a rank: as many as its share of the node's cores leaves, where samples are slow to read.

    On the CPU a rank computes on :func:`torch.get_num_threads` cores, with a GPU on one. One worker there is in any
    case: while the rank waits for others, its core decodes.
    """
    if not any(split.is_slow for split in splits):
        return 0
    share = num_cores() // local_world_size
    busy = torch.get_num_threads() if device.type == "cpu" else 1
    return min(MAX_WORKERS, max(1, share - busy))


class InputReader:
    """Reads samples of some splits for one rank, those that were announced ahead of time.

    Args:
        splits: The splits, each of which is found by its place here.
        num_workers: Processes that read ahead; 0 reads everything where it is asked for.
        prefetch_factor: Batches that each of them has ready, or is reading.
        pin_memory: Copies batches into page-locked memory, from which a GPU takes them beside its work.
        timeout_s: Longest wait for one batch.
        key: Seeds what a script's own data set draws from global generators in a worker: seed and rank.

    Attributes:
        num_workers: See above.
        waited_s: Seconds in which the rank read, or waited for a worker.
    """

    def __init__(
        self, splits: Sequence[Split], num_workers: int = 0, prefetch_factor: int = 2, pin_memory: bool = False,
        timeout_s: float = 0.0, key: tuple[int, ...] = (0,),
    ) -> None:  # fmt: skip
        self._splits = tuple(splits)
        self.num_workers, self.waited_s = num_workers, 0.0
        self._coming = _Coming()
        self._answers: Iterator[Any] = iter(())
        if num_workers:
            self._loader = DataLoader(
                _Requested(self._splits),
                batch_size=None,  # an index is a whole batch
                sampler=self._coming,
                num_workers=num_workers,
                prefetch_factor=prefetch_factor,
                persistent_workers=True,
                collate_fn=_as_it_is,
                pin_memory=pin_memory,
                timeout=timeout_s,
                worker_init_fn=_begin_worker,
                multiprocessing_context="fork",
                generator=_generator(key),  # else each iterator takes a number from the global one
            )
            self._close = self._start()

    def number(self, split: Split) -> int:
        """Returns the number of a split, for requests."""
        return next(number for number, one in enumerate(self._splits) if one is split)

    def _start(self) -> Finalize:
        """Starts the workers, and returns what ends them; it runs at the end of the process too."""
        before = {*multiprocessing.active_children()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores, and a fork beside threads, are meant
            self._answers = iter(self._loader)
        workers = [each for each in multiprocessing.active_children() if each not in before]
        return Finalize(self, _end_workers, args=(self._answers, workers), exitpriority=10)

    def prefetch(self, requests: Iterator[InputRequest]) -> None:
        """Gives workers the coming requests in their order, in place of those announced before."""
        if self.num_workers:
            self._coming.announce(self._only_slow(request) for request in requests)
            self._answers = iter(self._loader)  # waits for what workers are reading, and drops it

    def _only_slow(self, request: InputRequest) -> InputRequest:
        return request.only(self._splits[request.split].read_ahead)

    def read(self, request: InputRequest) -> Samples:
        """Reads samples, or takes what a worker has read.

        Raises:
            UserError: As in the process that has read them.
        """
        start, split = time.perf_counter(), self._splits[request.split]
        if self._coming.is_next(self._only_slow(request)):
            ahead = self._take()
            here = read_samples(split, request.only({*PARTS} - {*split.read_ahead}))
            samples = here._replace(**{part: getattr(ahead, part) for part in split.read_ahead})
        else:
            samples = read_samples(split, request)
        self.waited_s += time.perf_counter() - start
        return samples

    def _take(self) -> Samples:
        self._coming.pending.popleft()
        answer = next(self._answers)
        if isinstance(answer, _Failure):
            raise answer.error from _InWorker(answer.trace)
        return answer

    def close(self) -> None:
        """Ends the workers, whatever they do."""
        self._coming.announce(iter(()))
        if self.num_workers:
            self._close()

    def __enter__(self) -> InputReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Coming(Sampler[InputRequest]):
    """The announced requests as a sampler, from which torch's DataLoader takes as many as workers may have.

    Attributes:
        pending: Those that it has taken and whose answer nobody has.
    """

    def __init__(self) -> None:
        self.pending: deque[InputRequest] = deque()
        self._requests: Iterator[InputRequest] = iter(())

    def announce(self, requests: Iterator[InputRequest]) -> None:
        self._requests = requests
        self.pending.clear()

    def is_next(self, request: InputRequest) -> bool:
        return bool(self.pending) and self.pending[0].equals(request)

    def __iter__(self) -> Iterator[InputRequest]:
        for request in self._requests:
            self.pending.append(request)
            yield request


class _InWorker(Exception):
    """The trace of an error in the process that met it."""


@dataclass(frozen=True)
class _Failure:
    """An answer that is an error; torch would change its message."""

    error: Exception
    trace: str


class _Requested(Dataset[Any]):
    """The samples by requests, in a worker."""

    def __init__(self, splits: Sequence[Split]) -> None:
        self._splits = splits

    def __getitem__(self, index: InputRequest) -> Samples | _Failure:
        try:
            return read_samples(self._splits[index.split], index)
        except Exception as error:
            return _Failure(_portable(error), traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """Returns an error that another process can read: itself, or its text."""
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _generator(key: tuple[int, ...]) -> torch.Generator:
    """Returns what DataLoader seeds its workers by; a new one of torch has the same seed each time."""
    return torch.Generator().manual_seed(int(np.random.SeedSequence(key).generate_state(1)[0]))


def _as_it_is(samples: Any) -> Any:
    return samples


def _begin_worker(number: int) -> None:
    """Leaves signals to the rank, which saves the run and then ends its workers; a worker ends with its rank."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    end_with_parent()


def _end_workers(answers: Any, workers: Sequence[BaseProcess]) -> None:
    try:
        answers._shutdown_workers()
    finally:
        for worker in workers:
            worker.kill()  # one that is stuck in a file
            worker.join()
