"""Other data than a run's is scored whole and as the task that the run has learned, or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from support.jobs import loaded, run_job
from support.pool import Pool
from support.texts import text_run, write_encoder

from pipetransformer.config.compose import read_config
from pipetransformer.config.schema import CONFIG, write_config
from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.datasets import HubImages
from pipetransformer.errors import UserError
from pipetransformer.saved import settings_to_score
from pipetransformer.training.saved_run import open_saved


def write_folder(folder: Path) -> Path:
    """Four pictures of each of two classes to train on, and three to test on."""
    for split, num in (("train", 4), ("test", 3)):
        for label in "ab":
            (folder / split / label).mkdir(parents=True)
            for number in range(num):
                Image.new("L", (8, 8), number).save(folder / split / label / f"{number}.png")
    return folder


def test_the_test_data_of_other_pictures_is_scored_where_the_run_held_out_a_part_of_its_own(tmp_path: Path) -> None:
    own, other = (write_folder(tmp_path / name) for name in ("own", "other"))
    write_config(loaded("dataset=image_folder", f"dataset.path={own}", "dataset.validation_fraction=0.5"), tmp_path)
    there = [f"dataset.path={other}"]
    for overrides, name, count in (
        ([], "validation", 4),
        (there, "test", 6),
        ([*there, "dataset.validation_fraction=0.25"], "validation", 2),
        ([*there, "dataset.eval_split=test"], "test", 6),
        (["dataset.eval_split=test"], "test", 6),
        (["dataset.eval_split=null"], "validation", 4),
    ):
        config, _ = settings_to_score(tmp_path / CONFIG, overrides)
        (split,) = config.dataset.load(ImageFormat(8, 3)).evaluation
        assert (split.name, len(split)) == (name, count)


def test_other_pictures_of_the_hub_are_scored_on_their_test_data(tmp_path: Path) -> None:
    write_config(loaded("dataset=cifar10", "dataset.validation_fraction=0.5", "dataset.max_eval_samples=2"), tmp_path)
    config, is_other = settings_to_score(tmp_path / CONFIG, ["dataset.hub_name=someone/other"])
    assert is_other
    assert isinstance(config.dataset, HubImages)
    assert (config.dataset.validation_fraction, config.dataset.max_eval_samples) == (0, None)


@pytest.mark.parametrize(
    ("own", "other", "message", "remedies"),
    [
        (
            [["a", "b"], ["a"], ["b"], []], ["a", "b"], "multi_label, and this data was taken for classification",
            ["dataset.task=multi_label", 'dataset.label_separator="|"'],
        ),
        (["a", "b"], [["a", "b"], ["a"]], "classification, and this data was taken for multi_label; give data", []),
        (
            [1.5, 2.25], [1, 2], "the task regression, and this data was taken for classification",
            ["dataset.task=regression"],
        ),
        (
            [1, 2], [1.0, 2.0], "the task classification, and this data was taken for regression",
            ["dataset.task=classification"],
        ),
    ],
    ids=["sets", "classes", "values", "whole numbers"],
)  # fmt: skip
def test_data_that_was_taken_for_another_task_is_refused_with_what_to_give(
    own: list[Any], other: list[Any], message: str, remedies: list[str], pool: Pool, tmp_path: Path
) -> None:
    for name, labels in (("here", own), ("there", other)):
        rows = [{"text": "a bird sings", "label": label} for label in labels * 4]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = text_run(write_encoder(tmp_path / "encoder"), "text", tmp_path / "here.jsonl")
    job = run_job(pool, 1, tmp_path / "run", *options, "epochs=1", "freeze=none")
    assert job.error == ""
    write_config(loaded(*options, "epochs=1", "freeze=none"), job.folder)
    there = f"dataset.path={tmp_path / 'there.jsonl'}"
    with pytest.raises(UserError) as refused:
        open_saved(job.folder, read_config(job.folder / CONFIG, [there]))
    assert message in str(refused.value)
    assert " ".join(remedies) in str(refused.value)
    if remedies:
        read = read_config(job.folder / CONFIG, [there, *remedies])
        assert open_saved(job.folder, read).data.task.head == open_saved(job.folder, loaded(*options)).data.task.head
