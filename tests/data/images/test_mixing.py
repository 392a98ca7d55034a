"""Mixup and cutmix against timm's own code in the same state of its generator."""

from itertools import product

import numpy as np
import pytest
import torch
from timm.data import Mixup
from torch import Tensor

from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images.datasets import Digits
from pipetransformer.data.images.library_rng import kept_generators, seed_generators
from pipetransformer.data.images.mixing import MIXING, MODES, Mixing
from pipetransformer.data.tasks import image_classification

NUM_CLASSES, SHAPE = 5, (3, 10, 12)
ALPHAS = [(0.8, 0.0), (0.0, 1.0), (0.8, 1.0)]


def mixing(mixup: float, cutmix: float, mode: str, prob: float = 0.8) -> Mixing:
    return Mixing(mixup, cutmix, prob, 0.4, mode, SHAPE, NUM_CLASSES)


def batch(size: int) -> tuple[np.ndarray, Tensor, Tensor]:
    """Ids, pictures and classes."""
    generator = np.random.default_rng(size)
    ids = generator.permutation(100)[:size]
    pictures, classes = generator.normal(size=(size, *SHAPE)), generator.integers(0, NUM_CLASSES, size)
    return ids, torch.from_numpy(pictures).float(), torch.from_numpy(classes)


def by_timm(chosen: Mixing, step: int, pictures: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    """What timm makes of the global batch in one process."""
    options = chosen.mixup, chosen.cutmix, None, chosen.prob, chosen.switch_prob, chosen.mode
    mix = Mixup(*options, label_smoothing=0.0, num_classes=NUM_CLASSES)
    with kept_generators():
        seed_generators(1, step, MIXING)
        return mix(pictures.clone(), classes)


def by_us(chosen: Mixing, step: int, ids: np.ndarray, pictures: Tensor, classes: Tensor) -> tuple[Tensor, Tensor]:
    mix = chosen.draw(1, step, ids)
    partners = [ids.tolist().index(partner) for partner in mix.partners]
    return mix.inputs(pictures, pictures[partners]), mix.targets(classes, classes[partners], NUM_CLASSES)


@pytest.mark.parametrize(("alphas", "mode"), list(product(ALPHAS, MODES)))
def test_pictures_and_targets_are_those_of_timm(alphas: tuple[float, float], mode: str) -> None:
    chosen, (ids, pictures, classes) = mixing(*alphas, mode), batch(8)
    num_mixed = 0
    for step in range(25):
        wanted, seen = by_timm(chosen, step, pictures, classes), by_us(chosen, step, ids, pictures, classes)
        assert torch.equal(seen[0], wanted[0])
        torch.testing.assert_close(seen[1], wanted[1].double(), rtol=0, atol=1e-6)
        num_mixed += not torch.equal(seen[0], pictures)
    assert 15 <= num_mixed <= 25, "with a probability of 0.8 for a batch, or for each picture"


@pytest.mark.parametrize("mode", MODES)
def test_in_a_batch_of_odd_size_the_middle_picture_stays_as_it_is(mode: str) -> None:
    chosen, (ids, pictures, classes) = mixing(0.8, 1.0, mode, prob=1.0), batch(5)
    for step in range(10):
        mixed, targets = by_us(chosen, step, ids, pictures, classes)
        torch.testing.assert_close(mixed[2], pictures[2])
        torch.testing.assert_close(targets.sum(1), torch.ones(5, dtype=torch.float64))
        assert targets[2, classes[2]] == pytest.approx(1)


def test_a_vector_of_labels_is_mixed_as_it_is() -> None:
    chosen, (ids, pictures, _) = mixing(0.8, 0.0, "elem"), batch(6)
    labels = torch.from_numpy(np.random.default_rng(1).integers(0, 2, (6, NUM_CLASSES)))
    options = {"multi_label": True, "mode": "elem", "prob": 0.8, "label_smoothing": 0.0, "num_classes": NUM_CLASSES}
    with kept_generators():
        seed_generators(1, 3, MIXING)
        _, wanted = Mixup(0.8, **options)(pictures.clone(), labels)
    torch.testing.assert_close(by_us(chosen, 3, ids, pictures, labels)[1], wanted.double(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_smoothed_loss_of_mixed_pictures_is_that_of_timm(mode: str) -> None:
    from timm.loss import SoftTargetCrossEntropy

    chosen, (ids, pictures, classes) = mixing(0.8, 1.0, mode), batch(8)
    task = image_classification(NUM_CLASSES, label_smoothing=0.1)
    output = torch.from_numpy(np.random.default_rng(2).normal(size=(8, NUM_CLASSES)))
    for step in range(5):
        options = chosen.mixup, chosen.cutmix, None, chosen.prob, chosen.switch_prob, chosen.mode
        with kept_generators():
            seed_generators(1, step, MIXING)
            _, wanted = Mixup(*options, label_smoothing=0.1, num_classes=NUM_CLASSES)(pictures.clone(), classes)
        _, targets = by_us(chosen, step, ids, pictures, classes)
        expected = SoftTargetCrossEntropy()(output, wanted)
        torch.testing.assert_close(task.loss(output, targets).mean(), expected.double(), rtol=0, atol=1e-6)


def test_draws_follow_the_seed_and_the_step_and_leave_the_global_generators_alone() -> None:
    chosen, ids = mixing(0.8, 1.0, "elem"), np.arange(6)
    with kept_generators():
        np.random.seed(7)  # noqa: NPY002
        first = chosen.draw(1, 2, ids)
        rank = np.random.rand()  # noqa: NPY002
        assert np.array_equal(chosen.draw(1, 2, ids).shares, first.shares)
        np.random.seed(7)  # noqa: NPY002
        assert np.random.rand() == rank  # noqa: NPY002
    assert not np.array_equal(chosen.draw(1, 3, ids).shares, first.shares)
    assert not np.array_equal(chosen.draw(2, 2, ids).shares, first.shares)


def test_training_is_mixed_and_evaluation_is_not() -> None:
    data = Digits(mixup=0.8).load(ImageFormat())
    assert data.train.mixing == Mixing(0.8, 0.0, 1.0, 0.5, "batch", (1, 8, 8), 10)
    assert data.evaluation[0].mixing is None
    assert Digits().load(ImageFormat()).train.mixing is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mixup": -0.1}, r"dataset\.mixup=-0\.1 is no parameter of a Beta"),
        ({"cutmix": float("inf")}, r"dataset\.cutmix=inf is no parameter"),
        ({"mixup": float("nan")}, r"dataset\.mixup=nan is no parameter"),
        ({"mixup_prob": 1.1}, r"dataset\.mixup_prob=1\.1 is no probability; give 0 to 1"),
        ({"mixup_switch_prob": -1}, r"dataset\.mixup_switch_prob=-1 is no probability"),
        ({"mixup_mode": "half"}, r"dataset\.mixup_mode=half is unknown; give one of batch, pair, elem"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Digits(**options).check()  # pyright: ignore[reportArgumentType]
