"""Errors that the user can fix name fields where they are raised, and options where they are shown."""

import errno
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from unittest import mock

import pytest
from support.jobs import ROOT

from pipetransformer import errors, saved
from pipetransformer.config.names import OPTIONS, in_options
from pipetransformer.config.sections import Cache, Parallel
from pipetransformer.errors import InfeasiblePlan, StoreFailed, UserError, without_number
from pipetransformer.report import __main__ as report
from pipetransformer.simulate import __main__ as simulation

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, UserError)]
HEAVY = ("torch", "hydra", "omegaconf", "numpy")


def test_an_error_names_its_fields_as_they_are() -> None:
    error = InfeasiblePlan("`num_stages`=7 is more than the 6 layers; lower `num_stages`")
    assert str(error) == "num_stages=7 is more than the 6 layers; lower num_stages"


def test_the_configuration_names_the_options_of_the_fields() -> None:
    error = InfeasiblePlan("`num_stages`=7 is too much for `batch_size`=2; raise `num_devices` or `path`")
    shown = "parallel.num_stages=7 is too much for batch_size=2; raise parallel.world_size or cache.path"
    assert in_options(error) == shown
    assert in_options(error, {"num_stages": "pipeline.num_stages"}).startswith("pipeline.num_stages=7")


def test_no_two_options_have_one_field() -> None:
    assert len(OPTIONS) == len(fields(Parallel)) + len(fields(Cache)) + 1


def test_text_without_fields_stays_as_it_is() -> None:
    assert in_options("weights of {a} in /tmp/x`y=3") == "weights of {a} in /tmp/x`y=3"
    assert in_options(KeyError("weight")) == "'weight'"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_keeps_its_text_from_one_process_to_another(kind: type[UserError]) -> None:
    error = pickle.loads(pickle.dumps(kind("raise `path`")))
    assert (type(error), str(error), error.message) == (kind, "raise path", "raise `path`")


def test_a_failed_store_keeps_the_number_of_the_system() -> None:
    error = StoreFailed(errno.EIO, "the disk fails; set `disk_gib`=0")
    assert (error.errno, str(error)) == (errno.EIO, "the disk fails; set disk_gib=0")


def test_the_package_raises_no_plain_error_of_a_value() -> None:
    """A rank shows a UserError in one line, and a ValueError of a library with its trace."""
    files = (ROOT / "pipetransformer").rglob("*.py")
    assert not [file for file in files if "raise ValueError" in file.read_text()]


def test_errors_import_nothing_heavy() -> None:
    code = f"import sys, pipetransformer.errors; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_write_that_fails_tells_its_reason_and_no_file_that_nobody_knows() -> None:
    assert without_number(OSError(28, "No space left on device")) == "No space left on device"
    assert without_number(OSError(13, "Permission denied", "page.html")) == "page.html: Permission denied"
    assert without_number(OSError("torn")) == "torn"


@pytest.mark.parametrize(
    ("main", "inner"),
    [
        (report.main, "pipetransformer.report.__main__._run"),
        (simulation.main, "pipetransformer.simulate.__main__.compose_and_run"),
        (saved.export, "pipetransformer.saved._options"),
        (saved.evaluate, "pipetransformer.saved._options"),
        (saved.predict, "pipetransformer.saved._options"),
    ],
)
def test_a_command_that_is_interrupted_ends_without_a_trace(
    main: Callable[[], None], inner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", "run=x"] if main is not simulation.main else ["command"])
    with mock.patch(inner, side_effect=KeyboardInterrupt), pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
