"""The commands of the experiments."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from typing import Any
from unittest import mock

from support.input_runs import with_children
from support.jobs import ROOT
from support.pool import Pool


def printed_by_command(_: Pool, name: str, arguments: Sequence[str]) -> str:
    """What ``python -m <name>`` prints."""
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def printed_in_pool(pool: Pool, name: str, arguments: Sequence[str]) -> str:
    """The same on ranks that have begun before."""

    def run_ranks(world: int, function: Callable[..., Any], *given: Any) -> Any:
        return pool.run(world, with_children, function, *given)[0]

    module = import_module(name)
    with mock.patch.object(module, "run_ranks", run_ranks), redirect_stdout(StringIO()) as out:
        module.main(arguments)
    return out.getvalue()
