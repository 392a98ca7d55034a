"""The examples run as they stand, from another folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
END = "end of an example"


def run(folder: Path, *command: str) -> str:
    """Standard output of a command that ends well, with the package of this checkout."""
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"'accuracy': ([\d.]+)", output)]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A folder and what each example has printed there, all of them in one process: imports take longest."""
    folder, names = tmp_path_factory.mktemp("examples"), ("own_model", "own_dataset", "own_loop")
    paths = [str(EXAMPLES / f"{name}.py") for name in names]
    code = f"import runpy\nfor path in {paths}:\n    runpy.run_path(path, run_name='__main__')\n    print('{END}')"
    *outputs, rest = run(folder, sys.executable, "-c", code).split(f"{END}\n")
    assert not rest
    return folder, dict(zip(names, outputs, strict=True))


def test_an_own_model_learns_in_one_process_while_its_blocks_freeze(ran: tuple[Path, dict[str, str]]) -> None:
    output = ran[1]["own_model"]
    assert accuracies(output)[-1] > 0.6, output
    assert "0 blocks frozen" in output
    assert re.search(r"[1-4] blocks frozen", output)


def test_a_dataset_of_the_datasets_library_is_learned(ran: tuple[Path, dict[str, str]]) -> None:
    folder, output = ran[0], ran[1]["own_dataset"]
    assert accuracies(output)[-1] > 0.6, output  # of five classes
    assert (folder / "own_dataset_model" / "model.safetensors").is_file()


# every run: in one process, the test below; scripts under torchrun, test_torchrun.py
@pytest.mark.thorough
def test_an_own_loop_trains_under_torchrun_and_saves_what_transformers_loads(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    check_own_loop(
        run(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script), tmp_path
    )


def test_an_own_loop_trains_in_one_process_and_saves_what_transformers_loads(ran: tuple[Path, dict[str, str]]) -> None:
    check_own_loop(ran[1]["own_loop"], ran[0])


def check_own_loop(output: str, folder: Path) -> None:
    assert len(accuracies(output)) == 3, "rank 0 prints once per epoch"
    assert accuracies(output)[-1] > 0.8, output
    assert "0 -> 2 blocks frozen" in output
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(folder / "own_loop_model").config.num_labels == 2
