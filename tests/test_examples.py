"""The examples run as they stand, from another folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(folder: Path, *command: str) -> str:
    """Standard output of a command that ends well, with the package of this checkout."""
    environment = os.environ | {"PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def accuracies(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"'accuracy': ([\d.]+)", output)]


def test_an_own_model_learns_in_one_process_while_its_blocks_freeze(tmp_path: Path) -> None:
    output = run(tmp_path, sys.executable, str(EXAMPLES / "own_model.py"))
    assert accuracies(output)[-1] > 0.6, output
    assert "0 blocks frozen" in output
    assert re.search(r"[1-4] blocks frozen", output)


def test_a_dataset_of_the_datasets_library_is_learned(tmp_path: Path) -> None:
    output = run(tmp_path, sys.executable, str(EXAMPLES / "own_dataset.py"))
    assert accuracies(output)[-1] > 0.6, output  # of five classes
    assert (tmp_path / "own_dataset_model" / "model.safetensors").is_file()


def test_an_own_loop_trains_under_torchrun_and_saves_what_transformers_loads(tmp_path: Path) -> None:
    script = str(EXAMPLES / "own_loop.py")
    output = run(tmp_path, sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", script)
    assert len(accuracies(output)) == 3, "rank 0 prints once per epoch"
    assert accuracies(output)[-1] > 0.8, output
    assert "0 -> 2 blocks frozen" in output
    from transformers import AutoModelForSequenceClassification

    assert AutoModelForSequenceClassification.from_pretrained(tmp_path / "own_loop_model").config.num_labels == 2
