"""What the commands for saved runs do, in a world of one process that is open."""

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import CONFIG, Config
from pipetransformer.data.base import TextFormat
from pipetransformer.saved import evaluate
from pipetransformer.training.saved_run import export, open_model, open_saved, predict, score


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


def evaluated(arguments: list[str]) -> str:
    """What the command prints."""
    printed = io.StringIO()
    with mock.patch("sys.argv", ["evaluate", *arguments]), redirect_stdout(printed):
        evaluate()
    return printed.getvalue()


def config_format(config: Config) -> TextFormat:
    return TextFormat(**config.model.input_format())
