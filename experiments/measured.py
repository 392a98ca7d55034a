"""Seconds and memory of a command with all its processes: ``python -m experiments.measured <file> <command>``.

A process that adopts orphans stands between, because some of a command's processes outlive it for a moment: the server
from which ranks are forked ends by itself, and what it has used would be counted nowhere. It ends the command where the
caller is killed::

    caller ── adopter ── command ── server ── ranks          the command ends
              adopter ── server                              and leaves its server, for which the adopter waits
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipetransformer.parent_process import end_with_parent
from pipetransformer.report.event_log import write_json

SET_CHILD_SUBREAPER = 36  # of prctl(2), Linux
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Took:
    """What a command took.

    Attributes:
        seconds: Wall time from its start to its end, start-up included.
        cpu_seconds: Of all its processes; on Linux those that outlived it, too.
        began: When it was started, in seconds since 1970; 0 where nobody noted it.
        peak_bytes: The most that one of its processes had in memory, libraries and shared memory included; 0 where
            nobody looked.
    """

    seconds: float
    cpu_seconds: float
    began: float = 0.0
    peak_bytes: int = 0

    @classmethod
    def read(cls, file: Path) -> Took:
        return cls(**json.loads(file.read_text(encoding="utf-8")))


def run_measured(command: Sequence[str], file: Path, env: Mapping[str, str] | None = None) -> Took:
    """Runs a command in the repository's root without its output, and keeps what it took in a file.

    Raises:
        SystemExit: It failed, and has said why; nothing is kept.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    wrapped = [sys.executable, "-m", "experiments.measured", str(file), *command]
    code = subprocess.run(wrapped, cwd=ROOT, env=env, stdout=subprocess.DEVNULL).returncode
    if code != 0:
        sys.exit(f"exit code {code}, and nothing is kept, of: {shlex.join(command)}")
    return Took.read(file)


def main(file: Path, command: Sequence[str]) -> int:
    """Runs a command, waits for all its processes, and writes what they took; returns its exit code."""
    noted, began, caller = time.time(), time.perf_counter(), os.getppid()
    with subprocess.Popen(command) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        end_with_parent(signal.SIGTERM)
        if os.getppid() != caller:  # it was gone before
            process.terminate()
        code = process.wait()
    seconds = time.perf_counter() - began
    _wait_for_orphans()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if code == 0:
        peak_bytes = used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        write_json(file, asdict(Took(seconds, used.ru_utime + used.ru_stime, noted, peak_bytes)))
    return code


def _wait_for_orphans() -> None:
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
