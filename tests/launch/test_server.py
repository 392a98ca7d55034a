"""The fork server ends where its launcher was gone before it could ask for a signal, and imports uncollected."""

import os
import subprocess
import sys

import pytest
from support.command import environment

from pipetransformer.parent_process import LAUNCHER

SERVER = "import gc, pipetransformer.launch.server; print('serves', gc.isenabled())"


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone signals the death of a parent")
@pytest.mark.parametrize(("is_parent", "expected"), [(True, "serves False\n"), (False, "")])
def test_a_server_serves_the_launcher_that_has_started_it(is_parent: bool, expected: str) -> None:
    env = environment() | {LAUNCHER: str(os.getpid() if is_parent else os.getppid())}
    done = subprocess.run([sys.executable, "-c", SERVER], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == expected
