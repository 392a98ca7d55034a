"""Agents of ``torchrun`` on one machine that stand for nodes, and a watch over what they write."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def of_two_nodes(port: int, num_processes: int) -> tuple[str, ...]:
    """The arguments with which the agent of either node starts."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test")
    return ("--nnodes", "2", "--nproc-per-node", str(num_processes), *rendezvous)


@contextmanager
def kept(folder: Path, pattern: str, into: Path) -> Iterator[None]:
    """Files that come up under a folder get a second name, under which they outlive their removal."""
    done = Event()

    def watch() -> None:
        while not done.wait(0.005):
            for path in folder.glob(pattern):
                copy = into / path.relative_to(folder)
                copy.parent.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError, FileNotFoundError):
                    os.link(path, copy)

    watcher = Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()
