"""``python train.py`` and ``torchrun train.py`` in processes of their own, as users start them."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from support.jobs import ROOT

TIMEOUT_S = 280
TRAIN = str(ROOT / "train.py")
MARK = "PIPETRANSFORMER_TEST"


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def train(folder: Path, *arguments: str, **variables: str) -> Ended:
    """Runs ``python train.py`` in a folder to its end, with variables of the environment."""
    return command(folder, sys.executable, TRAIN, *arguments, **variables)


def torchrun(folder: Path, *arguments: str) -> Ended:
    """Runs ``torchrun`` in a folder to its end."""
    return command(folder, sys.executable, "-m", "torch.distributed.run", *arguments)


def command(folder: Path, *words: str, **variables: str) -> Ended:
    env = environment() | variables
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return Ended(done.returncode, done.stdout, done.stderr)


def environment() -> dict[str, str]:
    """One thread, no network, and a mark by which :func:`processes` knows the command and its children."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "HYDRA_FULL_ERROR")}
    return inherited | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", MARK: uuid.uuid4().hex}


@contextmanager
def started(folder: Path, *words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts Python in a process group of its own; gives the process and its mark, and ends it."""
    env = environment() | variables
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process, env[MARK]
    finally:
        for pid in processes(env[MARK]):
            os.kill(pid, 9)
        process.communicate()


def has_not_ended(process: subprocess.Popen[str]) -> bool:
    """Waits for a moment, so that a loop that watches a command leaves it the cores."""
    try:
        process.wait(0.05)
    except subprocess.TimeoutExpired:
        return True
    return False


def forked(mark: str) -> tuple[int, list[int]]:
    """Returns the fork server of a command, 0 for none, and the ranks that live, in their order."""
    parents = {}
    for pid in processes(mark):
        with suppress(OSError):  # it has ended meanwhile
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    servers = [pid for pid, parent in parents.items() if parent in parents and parents[parent] not in parents]
    server = next((pid for pid in servers if b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()), 0)
    return server, sorted(pid for pid, parent in parents.items() if server and parent == server)


def wait_until_gone(mark: str) -> None:
    """Waits for the end of all processes that were started with a mark."""
    end = time.monotonic() + TIMEOUT_S
    while processes(mark):
        assert time.monotonic() < end, "some processes go on"
        time.sleep(0.05)


def processes(mark: str) -> list[int]:
    """Processes that live and were started with a mark."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found
