"""What ``python train.py`` answers before it loads torch."""

import os
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from support.command import TIMEOUT_S, TRAIN, environment, train
from support.jobs import ROOT

from pipetransformer.autopipe.plan import SCHEDULES
from pipetransformer.config.arguments import SIMULATION_ONLY
from pipetransformer.config.schema import PRECISIONS
from pipetransformer.config.sections import Cache, Parallel

WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    heavy = {"torch", "timm", "transformers", "datasets", "sklearn", "torchvision"} & set(sys.modules)
    assert not heavy, f"slow to answer: imported {heavy}"
"""


SIMULATE = str(ROOT / "pipetransformer" / "simulate" / "__main__.py")


def answer(folder: Path, *arguments: str, command: str = TRAIN) -> subprocess.CompletedProcess[str]:
    """Runs a command and sees to it that nothing heavy was imported."""
    words = [sys.executable, "-c", WITHOUT_TORCH, command, *arguments]
    env = environment() | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "slow to answer" not in done.stderr, done.stderr
    return done


def test_help_tells_the_purpose_with_examples_and_the_meaning_of_every_option(tmp_path: Path) -> None:
    done = answer(tmp_path, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Fine-tunes a Transformer on several devices")
    assert done.stdout.count("  pipetransformer-train ") == 3
    choices = ("vit_tiny", "pipetransformer", "batch_size: 32", "glue/sst2", "trace: false", *PRECISIONS, *SCHEDULES)
    assert all(word in done.stdout for word in choices)
    for section in (Parallel, Cache):
        options = [line for line in done.stdout.splitlines() if line.strip().startswith(f"{section.__name__.lower()}=")]
        assert options
        assert all(f"{field.name}: " in done.stdout for field in fields(section))
    assert not any(f"  {group} " in done.stdout for group in SIMULATION_ONLY)


def test_help_of_a_simulation_tells_its_own_purpose_and_groups(tmp_path: Path) -> None:
    done = answer(tmp_path, "--help", "model=bert_large", command=SIMULATE)
    assert done.stdout.startswith("Simulates a run on devices that are not there")
    assert all(f"  {group} " in done.stdout for group in SIMULATION_ONLY)
    for words in ("cluster=paper", "link_gb_per_s: ", "num_samples: ", "shape=bert_large", "--help cluster=dgx"):
        assert words in done.stdout


def test_help_may_be_read_in_part(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)  # as head does after the first lines
    command = [sys.executable, TRAIN, "--help"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    os.close(writer)
    assert done.stderr == b""


def test_help_shows_the_options_that_are_chosen(tmp_path: Path) -> None:
    done = answer(tmp_path, "--help", "model=bert", "optim=sgd")
    assert "name: bert-base-uncased" in done.stdout
    assert "momentum: 0.9" in done.stdout
    assert "vit_tiny_patch16_224" not in done.stdout


@pytest.mark.thinned("alhpa", "logger", "world_size", "hydra.run.dir=/proc", "cache.path")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["freeze.alhpa=0.5"], "freeze.alhpa does not exist; did you mean freeze.alpha?"),
        (
            ["+freeze.beta=1"],
            "freeze.beta does not exist; valid options: interval, guard, on_unfreeze, target",
        ),
        (
            ["logger=none", "logger.max_share=0.1"],
            "logger.max_share does not exist; logger=tensorboard or logger=wandb has it\n",
        ),
        (
            ["model=bert"],
            "choose a model for images (model=deit, dinov2, eva02, siglip, vit, vit_hf, vit_tiny) or another dataset",
        ),
        (["model=brt"], "model=brt is unknown; did you mean model=bert? there are: albert, bert, bert_large"),
        (["hydra.run.dir=résumé"], "hydra.run.dir=résumé cannot be read; quote the value"),
        (["parallel.world_size=999"], "parallel.world_size=999 is more than the"),
        (["hydra.run.dir=/proc/run"], "the run folder cannot be written"),
        (["cache.path=/proc/features"], "the cache's folder /proc/features cannot be written"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_option_is_answered_in_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    done = answer(tmp_path, *arguments)
    assert done.returncode == 1
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert not done.stdout
    assert not list(tmp_path.iterdir()), "a refused command leaves no folder"


def test_a_table_that_does_not_fit_is_answered_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "reviews.csv").write_text("review,stars\na,1\nb\n")
    ended = train(tmp_path, "model=bert", "dataset=text", "dataset.path=reviews.csv", "dataset.text=review")
    assert ended.code == 1
    assert "reviews.csv line 3 has 1 cells and the header has 2" in ended.err
    assert len(ended.err.splitlines()) == 1, ended.err
    assert [file.name for file in tmp_path.iterdir()] == ["reviews.csv"], "a refused command leaves no folder"


def test_a_folder_for_the_cache_below_a_file_is_refused(tmp_path: Path) -> None:
    (here := tmp_path / "here").mkdir()
    (here / "file").touch()
    ended = train(here, "cache.path=file/features", "hydra.run.dir=../run", "dry_run=true")
    assert ended.code == 1
    assert not (tmp_path / "run").exists(), "a refused command leaves no folder, wherever it was to be"
    assert ended.err.startswith(f"the cache's folder {here / 'file' / 'features'} cannot be written")
    assert "cache.path=" in ended.err
    assert "Traceback" not in ended.err


def test_a_run_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = train(tmp_path, "hydra.run.dir=file/run")
    assert ended.code == 1
    assert ended.err.startswith("the run folder cannot be written")
    assert "hydra.run.dir=" in ended.err
    assert "Traceback" not in ended.err
