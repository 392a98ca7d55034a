"""What the user can mend comes from a worker as one message, all else with its trace."""

import errno
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipetransformer import launch
from pipetransformer.autocache.buffer import StoreFailed
from pipetransformer.autocache.persistent import InUse, StaleStore
from pipetransformer.autocache.writable import Unwritable
from pipetransformer.config.compose import UserError
from pipetransformer.training.trainer import Diverged

FAILED = {"status": "failed", "error": "worker 1 was killed"}


def failed(error: Exception) -> Any:
    """As torch's launcher tells of a worker that ended with an error."""
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": "the trace"}}
    failure = SimpleNamespace(message=message, exitcode=1, local_rank=0)
    return SimpleNamespace(get_first_failure=lambda: (0, failure))


@pytest.mark.parametrize(
    "error",
    [
        StaleStore("delete it"),
        InUse("wait"),
        Unwritable("give another"),
        StoreFailed(errno.EIO, "take another"),
        Diverged("lower it"),
        ValueError("no"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_names_its_remedy_is_shown_without_a_trace(error: Exception) -> None:
    cause = launch._cause(failed(error))
    assert isinstance(cause, UserError)
    assert str(cause) == str(error)


def test_any_other_error_is_shown_with_its_trace() -> None:
    cause = launch._cause(failed(KeyError("weight")))
    assert isinstance(cause, RuntimeError)
    assert "the trace" in str(cause)


@pytest.mark.parametrize(
    ("told", "ending", "recorded"),
    [
        (None, FAILED, FAILED),
        ({"status": "interrupted", "steps": 1}, FAILED, FAILED | {"steps": 1}),
        ({"status": "interrupted"}, {"status": "interrupted"}, {"status": "interrupted"}),
        ({"status": "diverged", "error": "lower it"}, FAILED, {"status": "diverged", "error": "lower it"}),
        ({"status": "completed"}, {"status": "failed"}, {"status": "completed"}),
    ],
)
def test_how_a_run_ended_is_recorded_where_rank_0_could_not_tell(
    tmp_path: Path, told: dict[str, object] | None, ending: dict[str, str], recorded: dict[str, object]
) -> None:
    file = tmp_path / "summary.json"
    if told is not None:
        file.write_text(json.dumps(told))
    launch._record(file, ending)
    assert json.loads(file.read_text()) == recorded
