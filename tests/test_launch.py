"""What the user can mend comes from a worker as one message, all else with its trace."""

from types import SimpleNamespace
from typing import Any

import pytest

from pipetransformer import launch
from pipetransformer.autocache.shelf import InUse, StaleStore
from pipetransformer.autocache.writable import Unwritable
from pipetransformer.config.compose import UserError
from pipetransformer.training.trainer import Diverged


def failed(error: Exception) -> Any:
    """As torch's launcher tells of a worker that ended with an error."""
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": {"py_callstack": "the trace"}}
    failure = SimpleNamespace(message=message, exitcode=1, local_rank=0)
    return SimpleNamespace(get_first_failure=lambda: (0, failure))


@pytest.mark.parametrize(
    "error",
    [StaleStore("delete it"), InUse("wait"), Unwritable("give another"), Diverged("lower it"), ValueError("no")],
)
def test_an_error_that_names_its_remedy_is_shown_without_a_trace(error: Exception) -> None:
    cause = launch._cause(failed(error))
    assert isinstance(cause, UserError)
    assert str(cause) == str(error)


def test_any_other_error_is_shown_with_its_trace() -> None:
    cause = launch._cause(failed(KeyError("weight")))
    assert isinstance(cause, RuntimeError)
    assert "the trace" in str(cause)
