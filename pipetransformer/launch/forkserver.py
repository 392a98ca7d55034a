"""The server from which CPU ranks are forked.

Imports take longer than anything else at the start, and with few cores the ranks would wait for each other's imports.
So a server process imports what ranks need while the launcher still imports its own, and every rank is forked from it::

    launcher   [imports of its own][start ranks ...            waits ...
    server     [imports of ranks           ][fork, fork]
    ranks                                         [init_process_group ...
"""

import atexit
import fcntl
import gc
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import forkserver, util
from pathlib import Path

from pipetransformer.cores import num_cores
from pipetransformer.parent_process import LAUNCHER
from pipetransformer.training.interrupt import HANGUP, SIGNALS

PRELOAD = ("pipetransformer.launch.server", "pipetransformer.training.run", "scipy.stats", "sklearn.metrics")
THREADS, OWN_THREADS = "OMP_NUM_THREADS", "PIPETRANSFORMER_NUM_THREADS"
TEMPORARY, LOCK = "pipetransformer-", "lock"
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def start_method(device: str) -> str:
    """Returns how ranks start on ``parallel.device``: ``spawn`` where there may be a GPU, else ``forkserver``.

    A process that has initialized a GPU cannot fork ranks that use it, and importing a library may do that.
    """
    may_be_gpu = device == "cuda" or (device == "auto" and any(Path(file).exists() for file in GPU_FILES))
    return "spawn" if may_be_gpu else "forkserver"


def share_cores(world_size: int) -> None:
    """Sets ``OMP_NUM_THREADS`` to a rank's share of the cores, unless the user has. Libraries read it on import.

    What this launcher has set for an earlier run, as for another job of a sweep, is not the user's.
    """
    if os.environ.get(THREADS) in (None, os.environ.get(OWN_THREADS)):
        os.environ[THREADS] = os.environ[OWN_THREADS] = str(max(1, num_cores() // world_size))


def preload(device: str, num_ranks: int, libraries: Iterable[str]) -> None:
    """Starts the fork server and imports libraries in it. Call it before torch is imported; no-op with ``spawn``.

    Args:
        libraries: Modules that the model and the dataset need.
    """
    if start_method(device) == "forkserver":
        share_cores(num_ranks)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*PRELOAD, *libraries])
        os.environ[LAUNCHER] = str(os.getpid())
        # inherited by the server and by the resource tracker, which would end, or print a traceback
        before = {each: signal.signal(each, signal.SIG_IGN) for each in (*SIGNALS, HANGUP)}
        try:
            with _importable():
                forkserver.ensure_running()
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


@contextmanager
def _importable() -> Iterator[None]:
    """Puts this package on the path of the server, which does not know the folder of a script."""
    root, before = Path(__file__).resolve().parents[2], os.environ.get("PYTHONPATH")
    if Path(sys.path[0]).resolve() != root:  # it is installed
        yield
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *([before] if before else [])])
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


def collect_again() -> None:
    """Turns the garbage collector of a forked rank on; what the server has imported stays and is left alone."""
    gc.freeze()
    gc.enable()


def restore_signals() -> None:
    """Restores the signals that end a forked rank at once; the server ignores them."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, signal.SIG_DFL)
    signal.signal(HANGUP, signal.SIG_IGN)  # as in the server; a spawned rank has none


@cache
def use_one_temporary_folder() -> None:
    """Puts all temporary files of this process and its children into one folder, which is removed at exit.

    Torch's launcher leaves its folders behind, and forked ranks end without the clean-up that libraries registered.
    A run that was killed leaves its folder to the next one, which finds it unlocked.
    """
    remove_stale()
    sockets = util.get_temp_dir()  # made before and elsewhere: a socket's path has to be short; it is removed by itself
    folder = tempfile.mkdtemp(prefix=TEMPORARY)
    unlocked = os.path.join(folder, "unlocked")  # so that a run that starts beside this one does not find it
    lock = os.open(unlocked, os.O_CREAT | os.O_RDWR)  # held until this process ends
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.write(lock, sockets.encode())
    os.rename(unlocked, os.path.join(folder, LOCK))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["TMPDIR"] = tempfile.tempdir = folder


def remove_stale() -> None:
    """Removes the temporary folders of runs that were killed."""
    parent = Path(tempfile.gettempdir())
    for lock in parent.glob(f"{TEMPORARY}*/{LOCK}"):
        with suppress(OSError), lock.open() as file:  # it is another user's, or a run's that goes on
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            sockets = Path(file.read())
            if sockets.parent == parent and sockets.name.startswith("pymp-"):
                shutil.rmtree(sockets, ignore_errors=True)
            shutil.rmtree(lock.parent, ignore_errors=True)
