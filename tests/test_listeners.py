"""A run on one machine can be reached from this machine alone."""

import os
import re
import socket
from pathlib import Path

import pytest
from support.command import TRAIN, has_not_ended, processes, started
from support.jobs import TINY

LISTENING = "0A"
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")  # 127.0.0.1, ::1, and the first as IPv6


def listeners(pids: list[int]) -> set[str]:
    """Hexadecimal addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                inodes |= {*re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry))}
        except OSError:  # it ended, or the entry did
            continue
    tables = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in tables if row[3] == LISTENING and row[9] in inodes}


def test_this_test_sees_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert listeners([os.getpid()]) & {*LOOPBACK}
    with socket.create_server(("", 0)):
        assert listeners([os.getpid()]) - {*LOOPBACK}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_all_processes_of_a_run_and_of_wandb_listen_on_loopback(tmp_path: Path) -> None:
    seen: set[str] = set()
    words = (*TINY, "logger=wandb", "parallel.world_size=2", "parallel.device=cpu", "epochs=3", "hydra.run.dir=run")
    with started(tmp_path, TRAIN, *words) as (process, mark):
        while has_not_ended(process):
            seen |= listeners(processes(mark))
        assert process.returncode == 0, process.stderr and process.stderr.read()
    assert seen, "the ranks meet somewhere"
    assert seen <= {*LOOPBACK}
