"""Runs whose ranks start workers that read their input ahead."""

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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


def run_ahead(
    overrides: tuple[str, ...], folder: Path, prefixes: list[int], at_most: int | None = None
) -> tuple[Ran, int, int]:
    """One rank of a run that may start processes; gives also the batches that workers read, and the workers left."""
    process = multiprocessing.current_process()
    process.daemon = False  # as ranks are, in contrast to the pool's processes
    try:
        with counting_answers() as taken:
            ran = run_on(overrides, folder, prefixes, at_most)
    finally:
        process.daemon = True
    return ran, len(taken), len(multiprocessing.active_children())
