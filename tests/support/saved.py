"""What the commands for saved runs do, in a world of one process that is open."""

import io
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer import saved
from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import CONFIG, Config
from pipetransformer.data.base import TextFormat
from pipetransformer.training.saved_run import export, open_model, open_saved
from pipetransformer.training.saved_scores import predict, score


def exported(run_dir: Path, step: int | None, folder: Path, merged: bool = False) -> int | None:
    saved = open_model(run_dir, read_config(run_dir / CONFIG, with_data=False), step)
    export(saved, run_dir, folder, merged)
    return saved.step


def scored(
    run_dir: Path, step: int | None, names: list[str], folder: Path, with_predictions: bool,
    overrides: tuple[str, ...] = (),
) -> dict[str, dict[str, Any]]:  # fmt: skip
    saved = open_saved(run_dir, read_config(run_dir / CONFIG, overrides), step)
    return score(saved, names, folder, with_predictions)


def predicted(run_dir: Path, source: Path, output: Path, overrides: tuple[str, ...] = ()) -> tuple[int, int | None]:
    return predict(run_dir, read_config(run_dir / CONFIG, overrides, with_data=False), source, output)


def evaluated(arguments: Sequence[str]) -> str:
    """What ``pipetransformer-evaluate`` prints."""
    return _printed(saved.evaluate, arguments)[0]


def predicted_by_command(arguments: Sequence[str]) -> tuple[str, str]:
    """What ``pipetransformer-predict`` prints, and its warnings."""
    return _printed(saved.predict, arguments)


def _printed(command: Callable[[], object], arguments: Sequence[str]) -> tuple[str, str]:
    out, err = io.StringIO(), io.StringIO()
    with mock.patch("sys.argv", ["command", *arguments]), redirect_stdout(out), redirect_stderr(err):
        command()
    return out.getvalue(), err.getvalue()


def config_format(config: Config) -> TextFormat:
    return TextFormat(**config.model.input_format())
