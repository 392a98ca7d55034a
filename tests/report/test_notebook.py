"""The notebooks run on run folders, and explain themselves without them."""

import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from support.command import TIMEOUT_S

from pipetransformer.report.environment import write_overrides
from pipetransformer.report.figures import OF_ARMS
from pipetransformer.report.run_folder import CONFIG

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
RUN, COMPARE = NOTEBOOKS / "run.ipynb", NOTEBOOKS / "compare.ipynb"


def execute(folder: Path, file: Path = RUN) -> nbformat.NotebookNode:
    notebook = nbformat.read(file, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def num_images(made: list[dict[str, Any]]) -> int:
    return sum("image/png" in output.get("data", {}) for output in made)


@pytest.mark.parametrize("file", [RUN, COMPARE], ids=lambda file: file.name)
def test_a_notebook_is_kept_without_outputs(file: Path) -> None:
    notebook = nbformat.read(file, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_draws_a_run_whose_folder_is_relative_to_the_folders_above(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "notebooks").mkdir()
    run_folder.rename(root / "run")
    monkeypatch.setenv("RUN_FOLDER", "run")
    made = outputs(execute(root / "notebooks"))
    assert num_images(made) == 12
    printed = "".join(output.get("text", "") for output in made)
    assert "freeze at step 8: 0 -> 2 of 6 blocks (at most a third of the active blocks)" in printed
    assert "2.0 times the best static plan" in printed


def test_the_notebook_without_a_run_folder_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_FOLDER", raising=False)
    with pytest.raises(CellExecutionError, match="set the environment variable RUN_FOLDER"):
        execute(tmp_path)


def test_the_other_notebook_compares_runs_by_a_relative_glob(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "notebooks").mkdir()
    for name in ("none", "alpha"):
        job = Path(shutil.copytree(run_folder, root / "sweep" / name))
        write_overrides(job, [f"freeze={name}"])
        (job / CONFIG).write_text(f"seed: 1\nfreeze:\n  kind: {name}\n")
    monkeypatch.setenv("RUN_FOLDERS", "sweep/*")
    made = outputs(execute(root / "notebooks", COMPARE))
    assert num_images(made) == len(OF_ARMS)
    printed = "".join(output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in made)
    assert "freeze=none   1 (none)   accuracy 0.74" in printed
    assert "2.0 times the best static plan" in printed


def test_the_other_notebook_without_folders_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_FOLDERS", raising=False)
    with pytest.raises(CellExecutionError, match="set the environment variable RUN_FOLDERS"):
        execute(tmp_path, COMPARE)
