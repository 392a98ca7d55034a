import gzip
import shutil
import struct
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from pipetransformer.data.base import ImageFormat, Split
from pipetransformer.data.images import datasets as specs
from pipetransformer.data.images import sources
from pipetransformer.data.images.datasets import Digits, HubImages, IdxImages, hold_out
from pipetransformer.data.images.sources import IDX_FILES, ImageSplits, from_arrays, packaged_folder


def pixels(split: Split) -> set[bytes]:
    return {image.numpy().tobytes() for image in split.inputs(range(len(split)), None)}


def test_digits_are_built_in(image: ImageFormat) -> None:
    data = Digits().load(image)
    assert (data.task.name, data.task.head.num_outputs, data.input_shape) == ("classification", 10, (1, 8, 8))
    assert (len(data.train), [len(split) for split in data.evaluation]) == (1437, [360])
    assert data.evaluation[0].name == "test"
    assert (data.random_transform, data.task.head.labels) == (False, tuple("0123456789"))
    values = data.train.inputs([*range(100)], None)
    assert (values.min().item(), values.max().item()) == (-1, 1)


def test_validation_digits_come_from_the_training_data_alone(image: ImageFormat) -> None:
    usual, tuning = Digits().load(image), Digits(validation_fraction=0.25).load(image)
    (validation,) = tuning.evaluation
    assert (validation.name, len(validation), len(tuning.train)) == ("validation", 360, 1077)
    assert pixels(validation) <= pixels(usual.train)
    assert pixels(validation).isdisjoint(pixels(tuning.train))
    assert pixels(validation).isdisjoint(pixels(usual.evaluation[0]))


def test_limits_draw_the_same_samples_every_time(image: ImageFormat) -> None:
    first, second = (Digits(max_train_samples=20, max_eval_samples=7).load(image) for _ in range(2))
    assert (len(first.train), len(first.evaluation[0])) == (20, 7)
    assert pixels(first.train) == pixels(second.train)


def test_augmentation_is_told_and_spares_the_evaluation(image: ImageFormat) -> None:
    data = Digits(augment=True).load(image)
    plain = Digits().load(image)
    assert data.random_transform
    assert pixels(data.train) != pixels(plain.train)
    assert pixels(data.evaluation[0]) == pixels(plain.evaluation[0])


def test_digits_take_no_path(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dataset\.path=.* has no effect"):
        Digits(path=str(tmp_path)).check()


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_a_validation_fraction_that_is_no_share_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match=rf"dataset\.validation_fraction={fraction}"):
        Digits(validation_fraction=fraction).check()


def write_idx(folder: Path, num_labels: int = 6) -> None:
    generator = np.random.default_rng(0)
    train, test = (generator.integers(0, 256, (count, 5, 5), dtype=np.uint8) for count in (6, 3))
    labels = np.arange(9, dtype=np.uint8) % 3
    for name, array in zip(IDX_FILES, (train, labels[:num_labels], test, labels[6:]), strict=True):
        header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
        (folder / f"{name}.gz").write_bytes(gzip.compress(header + array.tobytes()))


def test_idx_files_of_a_folder_are_loaded(tmp_path: Path, image: ImageFormat) -> None:
    write_idx(tmp_path)
    spec = IdxImages(path=str(tmp_path), num_classes=3)
    spec.check()
    data = spec.load(image)
    assert (len(data.train), len(data.evaluation[0]), data.input_shape, data.task.head.num_outputs) == (
        6,
        3,
        (1, 5, 5),
        3,
    )
    assert data.train.targets([4]).tolist() == [1]


def test_idx_labels_beyond_the_classes_are_refused(tmp_path: Path, image: ImageFormat) -> None:
    write_idx(tmp_path)
    with pytest.raises(ValueError, match=r"2 labels of the train split lie outside 0\.\.1"):
        IdxImages(path=str(tmp_path), num_classes=2).load(image)


def test_idx_images_and_labels_must_go_together(tmp_path: Path, image: ImageFormat) -> None:
    write_idx(tmp_path, num_labels=5)
    with pytest.raises(ValueError, match=r"\(6, 5, 5\) do not go with labels of shape \(5,\)"):
        IdxImages(path=str(tmp_path)).load(image)


def test_a_folder_without_idx_files_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lacks train-images-idx3-ubyte"):
        IdxImages(path=str(tmp_path)).check()


@pytest.mark.skipif(packaged_folder() is None, reason="the package dataset-fashion-mnist is not installed")
def test_the_packaged_fashion_mnist_is_found(image: ImageFormat) -> None:
    assert IdxImages().read().classes[:2] == ("T - shirt / top", "Trouser")
    data = IdxImages().load(image)
    assert (len(data.train), len(data.evaluation[0]), data.input_shape) == (60_000, 10_000, (1, 28, 28))


@pytest.mark.parametrize("in_memory", [False, True])
def test_an_image_folder_is_loaded(tmp_path: Path, in_memory: bool) -> None:
    for split, count in (("train", 4), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                Image.new("RGB", (6 + number, 9), (number, 0, 0)).save(tmp_path / split / name / f"{number}.png")
    spec = HubImages(path=str(tmp_path), max_train_samples=5, in_memory=in_memory)
    spec.check()
    data = spec.load(ImageFormat(size=8, num_channels=3))
    assert (len(data.train), len(data.evaluation[0]), data.task.head.labels) == (5, 4, ("cat", "dog"))
    assert data.train.inputs([0, 1, 2, 3, 4], None).shape == (5, 3, 8, 8)
    assert data.evaluation[0].name == "val"


def write_colours(root: Path, *splits: str) -> Path:
    """One 4x4 picture in each of two classes."""
    for split in splits:
        for name, colour in (("cat", "red"), ("dog", "blue")):
            (root / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4), colour).save(root / split / name / "0.png")
    return root


@pytest.mark.parametrize("in_memory", [False, True])
def test_only_pictures_in_memory_outlive_their_files(tmp_path: Path, image: ImageFormat, in_memory: bool) -> None:
    write_colours(tmp_path, "train", "test")
    data = HubImages(path=str(tmp_path), in_memory=in_memory).load(image)
    (tmp_path / "train" / "cat" / "0.png").unlink()
    if in_memory:
        assert len(pixels(data.train)) == 2
    else:
        with pytest.raises(ValueError, match=r"0\.png cannot be read"):
            pixels(data.train)


def test_an_image_folder_needs_a_path() -> None:
    with pytest.raises(ValueError, match=r"dataset\.path= is missing; give a folder with train/<class>"):
        HubImages().check()


def test_another_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not an image folder"):
        HubImages(path=str(tmp_path), hub_name="owner/data").check()


@pytest.mark.parametrize("spec", [IdxImages(), HubImages(hub_name="zalando-datasets/fashion_mnist")])
def test_the_hub_is_asked_when_nothing_is_local(
    spec: HubImages | IdxImages, image: ImageFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def from_hub(*question: object) -> ImageSplits:
        asked.append(question[:4])
        pictures = from_arrays(np.zeros((2, 3, 3), dtype=np.uint8), np.arange(2))
        return ImageSplits(pictures, pictures, "test", ("a", "b"))

    monkeypatch.setattr(specs, "from_hub", from_hub)
    monkeypatch.setattr(specs, "packaged_folder", lambda: None)
    data = spec.load(image)
    assert asked == [("zalando-datasets/fashion_mnist", "train", "test", ("image", "label"))]
    assert data.task.head.labels == ("a", "b")


def test_a_debian_package_is_taken_for_the_data_that_it_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(specs, "packaged_folder", lambda: Path("/usr/share/fashion"))
    monkeypatch.setattr(specs, "find_on_hub", lambda name, *_: asked.append(name))
    assert IdxImages(hub_name="ylecun/mnist").preflight() is None
    assert asked == ["ylecun/mnist"]


def test_one_class_is_refused_before_the_start(tmp_path: Path) -> None:
    shutil.rmtree(write_colours(tmp_path, "train") / "train" / "dog")
    (tmp_path / "test").mkdir()
    with pytest.raises(ValueError, match="one class, cat, and classification needs 2 or more"):
        HubImages(path=str(tmp_path)).check()
    with pytest.raises(ValueError, match="one class, 0, and classification needs 2 or more"):
        IdxImages(num_classes=1).check()


@pytest.mark.parametrize("options", [{}, {"max_train_samples": 3}, {"validation_fraction": 0.26}])
def test_the_launcher_counts_the_training_pictures(tmp_path: Path, options: dict[str, float]) -> None:
    write_idx(tmp_path)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (4, 4)).save(tmp_path / split / name / f"{number}.png")
    idx = IdxImages(path=str(tmp_path), num_classes=3)
    for spec in (Digits(), idx, HubImages(path=str(tmp_path))):
        chosen = replace(spec, **options)  # pyright: ignore[reportArgumentType]
        if spec is not idx or "validation_fraction" not in options:
            assert chosen.preflight() == len(chosen.load(ImageFormat()).train)


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_damaged_picture_is_found_before_the_start(tmp_path: Path, split: str) -> None:
    write_colours(tmp_path, "train", "test")
    assert HubImages(path=str(tmp_path)).preflight() == 2
    for name in ("cat", "dog"):
        file = tmp_path / split / name / "0.png"
        file.write_bytes(file.read_bytes()[:-20])
    message = rf"{split}/cat/0\.png cannot be read as a picture .*; repair or remove it; 1 more cannot be read"
    with pytest.raises(ValueError, match=message):
        HubImages(path=str(tmp_path)).preflight()


def test_a_damaged_picture_that_is_not_read_does_not_matter(tmp_path: Path) -> None:
    write_colours(tmp_path, "train", "test")
    (tmp_path / "test" / "cat" / "0.png").write_bytes(b"hello")
    assert HubImages(path=str(tmp_path), validation_fraction=0.5).preflight() == 1
    with pytest.raises(ValueError, match=r"test/cat/0\.png"):
        HubImages(path=str(tmp_path)).preflight()


def test_a_folder_without_test_pictures_is_enough_where_some_are_held_out(tmp_path: Path) -> None:
    write_colours(tmp_path, "train")
    for name in ("cat", "dog"):
        shutil.copy(tmp_path / "train" / name / "0.png", tmp_path / "train" / name / "1.png")
    tuning = HubImages(path=str(tmp_path), validation_fraction=0.5)
    tuning.check()
    assert tuning.preflight() == 2
    data = tuning.load(ImageFormat(4, None, (0.5,), (0.5,)))
    assert (len(data.train), [split.name for split in data.evaluation]) == (2, ["validation"])
    with pytest.raises(ValueError, match=r"not an image folder; .*, or evaluate on a part of train/ by dataset\.val"):
        HubImages(path=str(tmp_path)).check()


@pytest.mark.parametrize("colour_first", [False, True])
@pytest.mark.parametrize("limit", [None, 1])
def test_hub_data_with_any_colour_is_colour_in_all_splits(
    monkeypatch: pytest.MonkeyPatch, colour_first: bool, limit: int | None
) -> None:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog"])})
    grey, colour = Image.new("L", (4, 4), 9), Image.new("RGB", (4, 4), (255, 0, 0))
    mixed = [colour, grey] if colour_first else [grey, colour]

    def load_hub(name: str, split: str, local: str) -> datasets.Dataset:
        pictures = mixed if split == "train" else [grey, grey]
        return datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features)

    monkeypatch.setattr(sources, "load_hub", load_hub)
    data = HubImages(hub_name="owner/data", max_train_samples=limit).load(ImageFormat())
    assert data.input_shape == (3, 4, 4)
    assert data.train.inputs([0], None).shape == data.evaluation[0].inputs([0], None).shape == (1, 3, 4, 4)
    mixed = [grey, grey]
    assert HubImages(hub_name="owner/data").load(ImageFormat()).input_shape == (1, 4, 4)


@given(st.floats(0.1, 0.8))
def test_a_held_out_share_is_disjoint_and_stratified(fraction: float) -> None:
    labels = np.repeat([0, 1, 2], [60, 30, 30])
    kept, held_out = hold_out(labels, fraction, "share", ("a", "b", "c"))
    assert sorted([*kept, *held_out]) == [*range(120)]
    assert np.bincount(labels[held_out]) == pytest.approx(fraction * np.array([60, 30, 30]), abs=1)


def test_a_share_too_small_for_the_classes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dataset\.validation_fraction=0\.01 cannot be split off 20 samples"):
        hold_out(np.repeat([0, 1], 10), 0.01, "dataset.validation_fraction", ("a", "b"))


def test_a_class_of_one_picture_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"dataset\.eval_fraction=0\.1 .* and dog has 1 picture; give it another one, or"
    ):
        hold_out(np.array([0] * 10 + [1] + [2] * 9), 0.1, "dataset.eval_fraction", ("cat", "dog", "owl"))
    with pytest.raises(ValueError, match="and cat has 1 picture, as have 1 others; give"):
        hold_out(np.array([0, 1] + [2] * 9), 0.1, "dataset.eval_fraction", ("cat", "dog", "owl"))


def test_an_image_folder_is_evaluated_on_the_folder_that_is_asked_for(tmp_path: Path, image: ImageFormat) -> None:
    for number, split in enumerate(("train", "val", "test")):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (4, 4), number).save(tmp_path / split / name / "0.png")
    for asked, found in ((None, "test"), ("val", "val"), ("validation", "val")):
        spec = HubImages(path=str(tmp_path), eval_split=asked)
        spec.check()
        assert [split.name for split in spec.load(image).evaluation] == [found]
    with pytest.raises(ValueError, match=r"dataset\.eval_split=dev: there is no folder .*dev; there is test, val"):
        HubImages(path=str(tmp_path), eval_split="dev").check()


@pytest.mark.parametrize(("asked", "found"), [(None, "test"), ("validation", "validation")])
def test_the_hubs_test_data_is_the_default(asked: str | None, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(sources, "load_hub", lambda _, split, *__: read.append(split) or two_pictures())
    HubImages(hub_name="owner/data", eval_split=asked).read()
    assert read == ["train", found]


def two_pictures() -> datasets.Dataset:
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    pictures = [Image.new("L", (4, 4), number) for number in range(2)]
    return datasets.Dataset.from_dict({"image": pictures, "label": [0, 1]}, features=features)
