"""Other data than a run's is scored whole."""

from pathlib import Path

from PIL import Image
from support.jobs import loaded

from pipetransformer.config.schema import CONFIG, write_config
from pipetransformer.data.base import ImageFormat
from pipetransformer.saved import settings_to_score


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
    ):
        config, _ = settings_to_score(tmp_path / CONFIG, overrides)
        (split,) = config.dataset.load(ImageFormat(8, 3)).evaluation
        assert (split.name, len(split)) == (name, count)
