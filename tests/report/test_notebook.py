"""The notebook runs on a run folder, and explains itself without one."""

from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from support.command import TIMEOUT_S

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "run.ipynb"


def execute(folder: Path) -> nbformat.NotebookNode:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    NotebookClient(notebook, timeout=TIMEOUT_S, resources={"metadata": {"path": str(folder)}}).execute()
    return notebook


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_the_notebook_is_kept_without_outputs() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert outputs(notebook) == []
    assert all(cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_draws_a_run(run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_FOLDER", str(run_folder))
    made = outputs(execute(run_folder))
    assert sum("image/png" in output.get("data", {}) for output in made) == 5
    printed = "".join(output.get("text", "") for output in made)
    assert "freeze at step 8: 0 -> 2 of 6 blocks (at most a third of the active blocks)" in printed
    assert "2.0 times the best static plan" in printed


def test_the_notebook_finds_a_folder_that_is_relative_to_the_folders_above(
    run_folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path_factory.mktemp("root")
    (root / "notebooks").mkdir()
    run_folder.rename(root / "run")
    monkeypatch.setenv("RUN_FOLDER", "run")
    assert outputs(execute(root / "notebooks"))


def test_the_notebook_without_a_run_folder_says_what_to_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RUN_FOLDER", raising=False)
    with pytest.raises(CellExecutionError, match="set the environment variable RUN_FOLDER"):
        execute(tmp_path)
