"""Whole runs on tables of pictures: the same in any world and after a stop, and each kind of labels to its end."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from support.jobs import Job, run_job
from support.pool import Pool
from support.resumes import run_on

NUM, SIDE = 24, 8
MODEL = "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}"
RANDOM = (
    "dataset.transforms=[{name: RandomResizedCrop, scale: [0.5, 1]}, timm.rand-m9-mstd0.5-inc1, "
    "{name: RandomErasing, p: 0.5}]",
    "dataset.mixup=0.8",
    "dataset.cutmix=1.0",
    "dataset.mixup_mode=elem",
    "dataset.label_smoothing=0.1",
)


def write_table(folder: Path, labels: list[Any]) -> tuple[str, ...]:
    """Pictures whose brightness follows their label, and the options of a run on them."""
    folder.mkdir(exist_ok=True)
    generator, kinds = np.random.default_rng(0), sorted({*map(str, labels)})
    rows = []
    for number, label in enumerate(labels):
        pixels = generator.integers(0, 60, (SIDE + 4, SIDE, 3)) + 180 * kinds.index(str(label)) // max(
            1, len(kinds) - 1
        )
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "label": label})
    (folder / "table.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = folder / "table.jsonl"
    options = "logger=none", "precision=float64", MODEL, f"model.image_size={SIDE}", "epochs=3", "batch_size=10"
    return ("dataset=image", f"dataset.path={table}", f"dataset.eval_path={table}", *options, "optim.lr=0.01")


def classes(folder: Path) -> tuple[str, ...]:
    return write_table(folder, ["dark", "light", "middle"] * (NUM // 3))


@pytest.mark.thinned("num_stages")
@pytest.mark.parametrize("arrangement", ["parallel.num_stages=2", "parallel.num_replicas=2"])
def test_drawn_and_mixed_pictures_are_the_same_in_another_world_after_a_stop(
    arrangement: str, pool: Pool, tmp_path: Path
) -> None:
    overrides, prefixes = (*classes(tmp_path / "pictures"), *RANDOM), [1]
    (whole,) = pool.run(1, run_on, overrides, tmp_path / "whole", prefixes)
    begun = pool.run(1, run_on, overrides, tmp_path / "parted", prefixes, 4)[0]
    rest = pool.run(2, run_on, (*overrides, arrangement), tmp_path / "parted", prefixes)[0]
    assert (rest.first, rest.differences, len(whole.losses)) == (4, [], 9)
    assert begun.losses + rest.losses == pytest.approx(whole.losses, abs=1e-10)
    assert len({*whole.losses}) == len(whole.losses)


def test_every_part_of_what_is_drawn_makes_a_difference(pool: Pool, tmp_path: Path) -> None:
    table = classes(tmp_path / "pictures")
    cases = {"none": (), "transforms": RANDOM[:1], "mixup": RANDOM[1:2], "cutmix": RANDOM[2:3], "smoothing": RANDOM[4:]}
    losses = {
        name: pool.run(1, run_on, (*table, *given, "epochs=1"), tmp_path / name, [0])[0].losses
        for name, given in cases.items()
    }
    assert len({tuple(each) for each in losses.values()}) == len(cases)


def cached(job: Job) -> list[int]:
    return [event["plan"]["cache_level"] for event in job.events("transition")]


def run(pool: Pool, folder: Path, *overrides: str) -> Job:
    schedule = "freeze=schedule", "freeze.num_frozen=[1,1]", "freeze.interval=0.4"
    job = run_job(pool, 2, folder, *overrides, *schedule, "epochs=4", made_up_times=True)
    assert not job.error
    return job


def test_transforms_that_draw_nothing_leave_the_cache_on(pool: Pool, tmp_path: Path) -> None:
    table = classes(tmp_path / "pictures")
    fixed = run(pool, tmp_path / "fixed", *table, "dataset.transforms=[{name: Pad, padding: 2}, Grayscale]")
    drawn = run(pool, tmp_path / "drawn", *table, "dataset.transforms=[RandomHorizontalFlip]")
    mixed = run(pool, tmp_path / "mixed", *table, "dataset.mixup=0.8", "cache.augmentation=first_draw")
    assert fixed.summary["cache"]
    assert not any("the cache is off" in message for message in fixed.messages)
    assert any("the cache is off: the dataset's transform is random" in message for message in drawn.messages)
    assert any("the cache is off: dataset.mixup and dataset.cutmix" in message for message in mixed.messages)
    assert not {"cache"} & {*drawn.summary, *mixed.summary}


@pytest.mark.thinned("multi_label_classification", "regression")
@pytest.mark.parametrize(
    ("labels", "task", "metric", "names"),
    [
        (["dark", "light"], "classification", "accuracy", ["dark", "light"]),
        ([["dark"], ["light", "warm"]], "multi_label_classification", "micro_f1", ["dark", "light", "warm"]),
        ([0.25, 1.75], "regression", "pearson", []),
    ],
)
def test_labels_of_each_kind_are_learned_and_the_saved_model_knows_its_classes(
    labels: list[Any], task: str, metric: str, names: list[str], pool: Pool, tmp_path: Path
) -> None:
    import timm
    import torch

    job = run(pool, tmp_path / "run", *write_table(tmp_path / "pictures", labels * (NUM // 2)))
    assert job.events("start")[0]["task"] == task
    assert (job.summary["metric"]["name"], job.summary["metric"]["value"] > 0.9) == (metric, True)
    config = json.loads((job.folder / "model" / "config.json").read_text())
    assert config.get("label_names", []) == names
    saved = timm.create_model(f"local-dir:{job.folder / 'model'}", pretrained=True)
    assert saved.eval()(torch.zeros(1, 3, SIDE, SIDE)).shape == (1, len(names) or 1)
