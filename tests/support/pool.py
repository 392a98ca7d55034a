"""A pool of worker processes, started once per test session, that run a function as the ranks of a world."""

import gc
import io
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer.launch.forkserver import start_method

TIMEOUT_S = 300  # a slow machine hangs no earlier
PROFILING = "pipetransformer.profiling"
BRIEF = {
    f"{PROFILING}.timing.FEWEST": 1, f"{PROFILING}.timing.MOST": 1, f"{PROFILING}.overhead.MOST": 1,
    f"{PROFILING}.overhead.NUM_ROUNDS": 1, f"{PROFILING}.overhead.NUM_STEPS": 2,
    f"{PROFILING}.overhead.NUM_PIPELINE_STEPS": 1, f"{PROFILING}.overhead.WORK_S": 1e-4,
    f"{PROFILING}.network.NUM_REPEATS": 1, f"{PROFILING}.meshes.FEWEST_ROUNDS": 1,
    f"{PROFILING}.meshes.MOST_ROUNDS": 1, f"{PROFILING}.meshes.EXCHANGES_OF_A_ROUND": 1,
}  # fmt: skip
"""How often a run measures what it plans by, where the plan need not be good."""


class Pool:
    """``run(world, function, *args)`` calls the function on ranks ``0 .. world - 1`` and returns their results.

    Functions have to live in ``tests/support``, where the workers can import them.

    Attributes:
        measures_briefly: A rank takes each time once that it plans by.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._num_runs, self.measures_briefly = folder, 0, True
        self._workers: list[tuple[mp.Process, Connection]] = []

    def run(self, world: int, function: Callable[..., Any], *args: Any, backend: str = "gloo") -> list[Any]:
        while len(self._workers) < world:
            self._workers.append(_start())
        self._num_runs += 1
        store = self._folder / f"store{self._num_runs}"
        for rank, (_, pipe) in enumerate(self._workers[:world]):
            pipe.send((function, args, rank, world, str(store), backend, self.measures_briefly))
        try:
            return self._results(world)
        except BaseException:
            self.close()  # the others may be waiting for the one that failed
            raise

    def _results(self, world: int) -> list[Any]:
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._workers[:world])}
        results: list[Any] = [None] * world
        while waiting:
            ready = wait(list(waiting), timeout=TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"ranks {sorted(waiting.values())} did not answer within {TIMEOUT_S} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                failed, results[rank] = _unpacked(pipe.recv_bytes())
                if failed:
                    raise AssertionError(f"rank {rank} failed:\n{results[rank]}")
        return results

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
            process.join()
        self._workers.clear()


def _start() -> tuple[mp.Process, Connection]:
    method = start_method("auto")
    context = mp.get_context(method)  # type: ignore[arg-type]
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):  # Python 3.11 does not hand it on
        if method == "forkserver":
            context.set_forkserver_preload(["support.preload"])
            forkserver.ensure_running()
        here, there = context.Pipe()
        process = context.Process(target=_work, args=(there,), daemon=True)
        process.start()
    there.close()
    return process, here


def _work(pipe: Connection) -> None:
    import warnings

    import torch

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    while True:
        try:
            task = pipe.recv()
        except (EOFError, ConnectionError):
            return
        try:
            answer = _packed((False, _call(*task)))
        except BaseException:
            answer = _packed((True, traceback.format_exc()))
        pipe.send_bytes(answer)


def _packed(answer: tuple[bool, Any]) -> bytes:
    """In one piece; a pipe would send each tensor through a shared file of its own, which takes a millisecond."""
    import torch

    buffer = io.BytesIO()
    torch.save(answer, buffer)
    return buffer.getvalue()


def _unpacked(answer: bytes) -> tuple[bool, Any]:
    import torch

    return torch.load(io.BytesIO(answer), weights_only=False)


def _call(
    function: Callable[..., Any], args: tuple[Any, ...], rank: int, world: int, store: str, backend: str,
    measures_briefly: bool,
) -> Any:  # fmt: skip
    import torch.distributed as dist

    os.environ |= {"GROUP_RANK": "0", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}  # as torchrun does
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=TIMEOUT_S)
    )
    if backend == "gloo":
        dist.barrier()  # a rank that leaves at once would close connections that others are still making
    try:
        with ExitStack() as brief:
            for name, value in BRIEF.items() if measures_briefly else ():
                brief.enter_context(mock.patch(name, value))
            return function(*args)
    finally:
        dist.destroy_process_group()
        gc.collect()  # DDP sits in reference cycles with its groups, whose threads would go on beside all later tests
        gc.freeze()  # what is left was imported or is kept for other tests: transitions collect the rest quickly


@contextmanager
def mortal_pool(folder: Path) -> Iterator[Pool]:
    """A pool whose workers may be killed."""
    folder.mkdir()
    pool = Pool(folder)
    yield pool
    pool.close()
