"""Transforms by the names of torchvision and timm: what they draw, what they leave alone, and what is refused."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.datasets import Digits
from pipetransformer.data.images.library_rng import kept_generators, seed_generators
from pipetransformer.data.images.sources import from_arrays
from pipetransformer.data.images.split import ImageSplit
from pipetransformer.data.images.transforms import DRAWN, ERASING, FIXED, NAMES, ImageTransforms, parse_transforms
from pipetransformer.data.tasks import image_classification

SIDE, NUM = 32, 6
PICTURES = np.random.default_rng(0).integers(50, 200, (NUM, SIDE, SIDE, 3), dtype=np.uint8)
REQUIRED: dict[str, dict[str, Any]] = {  # arguments, beside the size, without which it does nothing
    "ColorJitter": {"brightness": 0.5},
    "ElasticTransform": {"alpha": 20.0, "sigma": 1.0},
    "GaussianBlur": {"kernel_size": 3},
    "Pad": {"padding": 2},
    "RandomAdjustSharpness": {"sharpness_factor": 2},
    "RandomAffine": {"degrees": 30},
    "RandomPosterize": {"bits": 2},
    "RandomResize": {"min_size": 16, "max_size": 48},
    "RandomRotation": {"degrees": 30},
    "RandomShortestSize": {"min_size": [16, 48]},
    "RandomSolarize": {"threshold": 100},
    "ScaleJitter": {"target_size": [40, 40]},
}
POLICIES = ["timm.rand-m9-mstd0.5-inc1", "timm.rand-m9-n3-tweights", "timm.augmix-m5-w4-d2", "timm.original-mstd0.5"]
EVERY = [*NAMES, *POLICIES]


def entry(name: str) -> dict[str, Any]:
    """The transform, sure to act where it may leave a picture as it is."""
    certain = {"timm.RandomErasing": {"probability": 1.0}, "RandomErasing": {"p": 1.0}}
    crop = {"size": [24, 24]} if name in ("RandomCrop", "CenterCrop") else {}
    return {"name": name} | REQUIRED.get(name, {}) | certain.get(name, {}) | crop


def split(*entries: object, size: int = SIDE, augment: bool = False) -> ImageSplit:
    source = from_arrays(PICTURES, np.zeros(NUM, dtype=np.int64))
    wanted, task = ImageFormat(size=size), image_classification(1)
    return ImageSplit("train", source, wanted, task, augment, ImageTransforms(parse_transforms(entries), size))


def look(train: ImageSplit, ids: Sequence[int] = range(NUM), epoch: int = 0) -> torch.Tensor:
    return train.inputs(list(ids), None, epoch)


def state_of_all_generators() -> tuple[object, ...]:
    _, words, *position = np.random.get_state(legacy=True)  # noqa: NPY002
    return random.getstate(), words.tolist(), position, torch.get_rng_state().tolist()  # pyright: ignore


@pytest.mark.parametrize("name", EVERY)
def test_a_picture_is_the_same_in_every_batch_and_order_and_leaves_the_global_generators_alone(name: str) -> None:
    train, before = split(entry(name)), state_of_all_generators()
    together = look(train, epoch=3)
    assert together.shape == (NUM, 3, SIDE, SIDE)
    assert state_of_all_generators() == before
    random.random(), np.random.random(), torch.rand(1)  # noqa: NPY002 - where another rank stands
    alone = [look(split(entry(name)), [sample], epoch=3) for sample in reversed(range(NUM))]
    assert torch.equal(together, torch.cat(alone[::-1]))


@pytest.mark.parametrize("name", [*DRAWN, *ERASING, *POLICIES])
def test_what_draws_draws_anew_in_each_epoch_and_for_each_sample(name: str) -> None:
    train = split(entry(name))
    epochs = [look(train, epoch=epoch) for epoch in range(8)]
    assert any(not torch.equal(epochs[0], other) for other in epochs[1:])
    same = split(entry(name))
    same.source = from_arrays(PICTURES[:1].repeat(NUM, 0), np.zeros(NUM, dtype=np.int64))
    assert any(len(torch.unique(look(same, epoch=epoch), dim=0)) > 1 for epoch in range(8))


@pytest.mark.parametrize("name", FIXED)
def test_what_draws_nothing_is_the_same_in_each_epoch_and_applies_to_evaluation(name: str) -> None:
    (spec,) = parse_transforms([entry(name)])
    transforms = ImageTransforms([spec], SIDE)
    assert not spec.is_random
    assert transforms.fixed().specs == (spec,)
    assert torch.equal(look(split(entry(name)), epoch=0), look(split(entry(name)), epoch=1))


def test_the_library_itself_gives_the_same_picture_from_the_same_seed() -> None:
    from torchvision.transforms import v2

    seen = look(split({"name": "RandAugment", "num_ops": 3, "interpolation": "bilinear"}), [4], epoch=2)
    with kept_generators():
        seed_generators(0, 2, 4, 0)
        own = v2.RandAugment(num_ops=3, interpolation=v2.InterpolationMode.BILINEAR)(Image.fromarray(PICTURES[4]))
    expected = (torch.from_numpy(np.array(own)).permute(2, 0, 1) / 255 - 0.5) / 0.5
    assert torch.equal(seen[0], expected)


def test_a_policy_of_timm_is_that_of_its_own_factory() -> None:
    from timm.data import create_transform

    factory = create_transform(
        SIDE, is_training=True, scale=(1, 1), ratio=(1, 1), hflip=0, auto_augment="rand-m9-mstd0.5-inc1",
        interpolation="random", mean=(0.5,) * 3, std=(0.5,) * 3, separate=True,
    )  # fmt: skip
    assert isinstance(factory, tuple)
    seen = look(split("timm.rand-m9-mstd0.5-inc1"), [1], epoch=5)
    with kept_generators():
        seed_generators(0, 5, 1, 0)
        own = factory[1](Image.fromarray(PICTURES[1]))
    assert torch.equal(seen[0], (torch.from_numpy(np.array(own)).permute(2, 0, 1) / 255 - 0.5) / 0.5)


@pytest.mark.parametrize("entry", [{"name": "RandomErasing", "p": 1}, {"name": "timm.RandomErasing", "probability": 1}])
def test_erasing_puts_zeros_on_normalised_pixels_after_all_else(entry: dict[str, Any]) -> None:
    plain = look(split(augment=True), epoch=1)
    erased = look(split(entry, augment=True), epoch=1)
    changed = erased != plain
    assert changed.any(dim=(1, 2, 3)).all()
    assert (erased[changed] == 0).all()


def test_a_crop_is_made_of_the_picture_in_full_size_and_takes_the_side_of_the_model() -> None:
    train = split({"name": "RandomResizedCrop", "scale": [0.01, 0.02]}, size=16)
    assert train.input_shape == (3, 16, 16)
    assert look(train).shape == (NUM, 3, 16, 16)


def test_a_grey_picture_is_transformed_as_colour_and_stays_one_channel() -> None:
    data = Digits(transforms=["timm.rand-m9-inc1", "ColorJitter"]).load(ImageFormat())
    assert data.input_shape == (1, 8, 8)
    assert data.train.inputs([0, 1], None).shape == (2, 1, 8, 8)


def test_training_is_transformed_at_random_and_evaluation_is_not() -> None:
    plain, entries = Digits().load(ImageFormat(size=8)), ["RandomVerticalFlip", {"name": "Pad", "padding": 4}]
    data = Digits(transforms=entries).load(ImageFormat(size=8))
    padded = Digits(transforms=entries[1:]).load(ImageFormat(size=8))
    assert (plain.random_transform, padded.random_transform, data.random_transform) == (False, False, True)
    first, ids = data.evaluation[0], list(range(20))
    assert torch.equal(first.inputs(ids, None, 0), first.inputs(ids, None, 1))
    assert torch.equal(first.inputs(ids, None), padded.evaluation[0].inputs(ids, None))
    assert not torch.equal(first.inputs(ids, None), plain.evaluation[0].inputs(ids, None))
    assert not torch.equal(data.train.inputs(ids, None, 0), data.train.inputs(ids, None, 1))


def test_transforms_are_part_of_the_identity_and_their_absence_is_not() -> None:
    def identity(*entries: object) -> str:
        return split(*entries).identity()

    many = [identity("RandAugment"), identity({"name": "RandAugment", "num_ops": 1}), identity("TrivialAugmentWide")]
    assert len({identity(), *many}) == 4
    assert identity("RandAugment") == many[0]
    source, task = from_arrays(PICTURES, np.zeros(NUM, dtype=np.int64)), image_classification(1)
    assert identity() == ImageSplit("train", source, ImageFormat(size=SIDE), task).identity()


def test_gpu_generators_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "manual_seed_all", None)
    monkeypatch.setattr(torch, "manual_seed", None)
    look(split("RandAugment"))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["RandAugmnt"], r"dataset\.transforms\[0\]=RandAugmnt is .* did you mean RandAugment\?"),
        (["RandomHorizontalFlip", "Quux"], r"dataset\.transforms\[1\]=Quux .*give one of CenterCrop, .*timm\.rand-m9"),
        (["rand-m9-mstd0.5-inc1"], r"rand-m9-mstd0\.5-inc1 is a transform neither of torchvision nor of timm"),
        (["timm.rand-m9-foo3"], r"timm\.rand-m9-foo3 is a transform neither"),
        (["timm.rand-quick"], r"timm\.rand-quick is a transform neither"),  # timm would skip the word
        (["Compose"], r"Compose is a transform neither"),
        ([3], r"dataset\.transforms\[0\]=3 is no transform; give a name as RandomHorizontalFlip"),
        ([{"num_ops": 2}], r"\{'num_ops': 2\} is no transform"),
        ([{"name": "timm.rand-m9", "m": 3}], r"takes no arguments, they are in its name; leave out m"),
        (["RandomErasing", "RandAugment"], r"transforms\[1\]=RandAugment stands after RandomErasing.*to the end"),
    ],
)
def test_names_are_refused_before_torch_is_loaded(entries: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Digits(transforms=entries).check()


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"name": "RandAugment", "num_op": 2}, r"RandAugment has no argument num_op; did you mean num_ops\?"),
        ({"name": "RGB", "zz": 2}, r"RGB has no argument zz; it takes none"),
        ({"name": "RandomRotation"}, r"RandomRotation lacks degrees; give it beside the name"),
        ({"name": "timm.RandomErasing", "device": "cuda"}, r"has no argument device"),
        ({"name": "timm.RandomErasing", "mode": "sparkle"}, r"timm\.RandomErasing cannot be made"),
        ({"name": "RandomHorizontalFlip", "p": 7}, r"RandomHorizontalFlip cannot be made \(p should be"),
        ({"name": "RandAugment", "interpolation": "best"}, r"RandAugment cannot be made \('best' is not a valid"),
        ({"name": "RandomCrop", "size": 50}, r"transforms\[0\]: RandomCrop fails on picture 0 \(Required crop size"),
    ],
)  # fmt: skip
def test_arguments_are_checked_against_the_library(entry: dict[str, Any], message: str) -> None:
    spec = Digits(transforms=[entry])
    spec.check()
    with pytest.raises(ValueError, match=message):
        spec.load(ImageFormat(size=8))


def test_a_size_that_nothing_knows_is_asked_for() -> None:
    with pytest.raises(ValueError, match="RandomResizedCrop lacks size"):
        Digits(transforms=["RandomResizedCrop"]).load(ImageFormat())


def test_every_name_is_one_of_the_library() -> None:
    from torchvision.transforms import v2

    assert all(hasattr(v2, name) for name in NAMES if not name.startswith("timm."))
