"""Runs with adapters: resumed in another world, saved, scored and exported, and in a script."""

from pathlib import Path

import pytest
import timm
from safetensors.torch import load_file
from support.jobs import TINY, loaded, run_job
from support.pool import Pool
from support.resumes import run_on
from support.saved import exported, scored

from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import write_config
from pipetransformer.models.adapters import NoAdapters

DEEP = "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2}"
RUN = (*TINY, DEEP, "precision=float64", "optim.lr=0.05", "freeze.interval=0.2", "peft=lora", "peft.dropout=0.1")
PREFIXES = [1, 2, 1]


def test_a_run_goes_on_in_another_world(pool: Pool, tmp_path: Path) -> None:
    whole = pool.run(1, run_on, RUN, tmp_path / "whole", PREFIXES)[0]
    first = pool.run(2, run_on, (*RUN, "parallel=pipeline"), tmp_path / "run", PREFIXES, 3)
    ranks = pool.run(2, run_on, (*RUN, "cache=off"), tmp_path / "run", PREFIXES, None, None)
    assert [rank.differences for rank in ranks] == [[], []]
    assert [*first[0].losses, *ranks[0].losses] == pytest.approx(whole.losses, rel=0, abs=1e-10)
    layer = next((tmp_path / "run").glob("checkpoints/*/layer-002.safetensors"))
    kept = {name for name in load_file(layer) if name.startswith("optimizer/")}
    assert kept, "adapters have optimizer state"
    assert all(".lora_" in name for name in kept), "and base weights none"


SAVED = (*TINY, "peft=lora", "peft.r=2", "optim.lr=0.05", "checkpoint=off", "precision=float64")


def test_a_saved_model_is_scored_and_merged(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 2, tmp_path / "run", *SAVED, made_up_times=True)
    assert job.error == ""
    write_config(loaded(*SAVED), job.folder)
    assert {path.name for path in (job.folder / "model").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    (results,) = pool.run(1, scored, job.folder, None, [], tmp_path / "scores", False)
    assert results["test"] == {**job.summary["metrics"]["test"], "num_samples": 40}
    pool.run(1, exported, job.folder, None, tmp_path / "merged", True)
    assert timm.create_model(f"local-dir:{tmp_path / 'merged'}", pretrained=True) is not None


def test_the_settings_of_a_run_before_there_were_adapters_are_read(tmp_path: Path) -> None:
    write_config(loaded(*TINY), tmp_path)
    file = tmp_path / "config.yaml"
    lines = file.read_text().splitlines(keepends=True)
    start = lines.index("peft:\n")
    file.write_text("".join(lines[:start] + lines[start + 2 :]))
    assert read_config(file).peft == NoAdapters()
