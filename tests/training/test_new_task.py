"""A new task is one value: a whole run of one that no file of the package names."""

from pathlib import Path

import pytest
from support.jobs import Job
from support.pool import Pool
from support.tagging import LABELS, tag, tag_by_mean
from support.texts import write_encoder

OPTIONS = (
    "precision=float64",
    "epochs=4",
    "batch_size=5",
    "optim.lr=0.01",
    "freeze=schedule",
    "freeze.num_frozen=[0,1]",
)


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("encoder"))


def tagged(pool: Pool, world_size: int, folder: Path, encoder: Path, *overrides: str) -> Job:
    folder.mkdir()
    model = ("model=bert", f"model.name={encoder}", "model.pretrained=false")
    pool.run(world_size, tag, (*model, "dataset=sst2", *OPTIONS, *overrides), folder)
    return Job(folder, "")


def test_a_task_of_ones_own_is_trained_frozen_cached_scored_and_saved_in_a_pipeline(
    pool: Pool, tmp_path: Path, encoder: Path
) -> None:
    from transformers import AutoModelForTokenClassification

    alone = tagged(pool, 1, tmp_path / "alone", encoder)
    pipeline = tagged(pool, 2, tmp_path / "pipeline", encoder, "parallel.num_stages=2", "parallel.num_microbatches=2")
    assert pipeline.losses == pytest.approx(alone.losses, abs=1e-10)
    assert pipeline.losses[-1] < 0.5 * pipeline.losses[0]
    assert pipeline.summary["metric"] == alone.summary["metric"]
    assert pipeline.summary["metric"]["name"] == "token_accuracy"
    assert pipeline.summary["metric"]["value"] > 0.9
    assert pipeline.events("start")[0]["task"] == "tagging"
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "pipeline" / "model")
    assert saved.config.num_labels == len(LABELS)


def test_a_task_whose_loss_is_a_mean_over_the_batch_is_refused_on_every_rank(
    pool: Pool, tmp_path: Path, encoder: Path
) -> None:
    model = ("model=bert", f"model.name={encoder}", "model.pretrained=false", "parallel=data")
    errors = pool.run(2, tag_by_mean, (*model, "dataset=sst2", *OPTIONS), tmp_path)
    assert all(error.startswith("the loss has shape () for 1 samples; return one number per") for error in errors), (
        errors
    )
