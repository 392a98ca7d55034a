"""Where a node keeps its stores while a run lasts."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def node_folder(path: Path, barrier: Callable[[], object]) -> Iterator[Path]:
    """Lends a folder to the processes of one node, and takes it back with the parents that were made for it.

    All processes call it. A parent that nodes share goes with the last of them; a node with a disk of its own, where
    not even the run folder exists, is left as it was.

    Args:
        barrier: Waits for all processes.
    """
    made = [parent for parent in path.parents if not parent.exists()]
    barrier()  # nobody makes a parent before everybody has looked
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):  # not empty: it is still another node's
            for parent in made:
                parent.rmdir()
