"""Commands for saved runs in a world of one process that is open."""

import io
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from unittest import mock

from pipetransformer.saved import predict


def command_predicted(arguments: Sequence[str]) -> tuple[str, str]:
    """What ``pipetransformer-predict`` prints, and its warnings."""
    out, err = io.StringIO(), io.StringIO()
    with mock.patch("sys.argv", ["predict", *arguments]), redirect_stdout(out), redirect_stderr(err):
        predict()
    return out.getvalue(), err.getvalue()
