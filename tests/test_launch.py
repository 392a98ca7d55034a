"""An error that the user can fix comes from a worker as one message, any other with its trace."""

import errno
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.jobs import loaded

from pipetransformer import launch
from pipetransformer.errors import Diverged, InfeasiblePlan, StaleStore, StoreFailed, Unwritable, UserError
from pipetransformer.training import job

FAILED = {"status": "failed", "error": "worker 1 was killed"}


def failed(error: Exception) -> Any:
    """As torch's launcher tells of a worker that ended with an error."""
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": "the trace"}}
    failure = SimpleNamespace(message=message, exitcode=1, local_rank=0)
    return SimpleNamespace(get_first_failure=lambda: (0, failure))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StaleStore("delete it, or take another `path`"), "delete it, or take another cache.path"),
        (StoreFailed(errno.EIO, "set `disk_gib` lower"), "set cache.disk_gib lower"),
        (Unwritable("give another"), "give another"),
        (Diverged("lower it"), "lower it"),
        (
            InfeasiblePlan("lower `num_stages` or raise `num_devices`"),
            "lower parallel.num_stages or raise parallel.world_size",
        ),
        (ValueError("of a dataset of the user's"), "of a dataset of the user's"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_a_rank_names_options_in_an_error_that_the_user_can_fix(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(job, "run_job", refuse)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(UserError) as caught:
        launch._run_job(loaded(), tmp_path, {}, None)
    assert type(caught.value) is UserError
    assert str(caught.value) == message


def test_an_error_that_the_user_can_fix_is_shown_without_a_trace() -> None:
    cause = launch._cause(failed(UserError("lower it")))
    assert isinstance(cause, UserError)
    assert str(cause) == "lower it"


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
