"""A process ends after the one that has started it, also where it waits in code that no signal interrupts."""

import subprocess
import sys

import pytest
from support.command import TIMEOUT_S, environment

RANK = """
import os, signal, socket, sys
from datetime import timedelta
from threading import Thread
from pipetransformer import parent_process
from pipetransformer.training import interrupt

def wait_in_store():
    asked, listener = [], socket.create_server(("127.0.0.1", 0))

    def tell():
        asked.append(listener.accept())  # torch has begun to wait: a signal before that would be heard
        print("here", flush=True)

    Thread(target=tell, daemon=True).start()
    TCPStore("127.0.0.1", listener.getsockname()[1], is_master=False, timeout=timedelta(minutes=10))

if sys.argv[1] == "store":
    from torch.distributed import TCPStore

parent_process.LOOK_S = 0.1
parent_process.end_with_parent(signal.SIGINT)
interrupt.listen()
with interrupt.deferred():
    parent_process.end_unheard(os.getppid(), interrupt.is_requested, wait_s=1.0)
    if sys.argv[1] == "store":
        wait_in_store()
    print("here", flush=True)
    while not interrupt.is_requested():
        signal.pause()
    signal.sigtimedwait([], 3.0)  # what it saves takes longer
print("saved", flush=True)
"""
LAUNCHER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", sys.argv[1], sys.argv[2]])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
@pytest.mark.parametrize(("waits_in", "told"), [("store", ""), ("python", "saved\n")])
def test_a_process_that_does_not_hear_of_its_parents_end_is_ended(waits_in: str, told: str) -> None:
    words = [sys.executable, "-c", LAUNCHER, RANK, waits_in]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "here\n"
        launcher.kill()
        assert launcher.communicate(timeout=TIMEOUT_S)[0] == told  # which ends with the last that could write
