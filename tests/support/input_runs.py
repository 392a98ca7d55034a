"""Runs whose ranks start workers that read their input ahead."""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer.training.input_reader import InputReader, Samples
from support.resumes import Ran, run_on


@contextmanager
def counting_answers() -> Iterator[list[Samples]]:
    """Collects what readers of this process take from workers."""
    taken: list[Samples] = []
    take = InputReader._take

    def counted(reader: InputReader) -> Samples:
        taken.append(take(reader))
        return taken[-1]

    with mock.patch.object(InputReader, "_take", counted):
        yield taken


def with_children(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function that starts processes, as ranks may, in contrast to the pool's."""
    process = multiprocessing.current_process()
    process.daemon = False
    try:
        return function(*arguments)
    finally:
        process.daemon = True


def run_ahead(
    overrides: tuple[str, ...], folder: Path, prefixes: list[int], at_most: int | None = None
) -> tuple[Ran, int, int]:
    """One rank of a run that may start workers; gives also the batches that they read, and the workers left."""
    with counting_answers() as taken:
        ran = with_children(run_on, overrides, folder, prefixes, at_most)
    return ran, len(taken), len(multiprocessing.active_children())
