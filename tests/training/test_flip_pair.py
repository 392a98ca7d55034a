"""A cache of both pictures of each sample gives the run without a cache, whatever the epochs mirror."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from support.jobs import TINY, run_job
from support.pool import Pool

from pipetransformer.autocache.source import SampleSource
from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.data.base import ImageFormat
from pipetransformer.data.images import transforms
from pipetransformer.data.images.datasets import Digits
from pipetransformer.data.images.flip_pair import FlipPair
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.training.cache_session import CacheSession, CacheTerms

FLIP = "{name: RandomHorizontalFlip, p: 0.3}"
FROZEN = (*TINY, "precision=float64", "optim.lr=0.01", "epochs=3", "freeze=prefix", "freeze.num_blocks=1")
PAIR = (*FROZEN, f"dataset.transforms=[{FLIP}]", "cache.augmentation=flip_pair")
ALL = 2 * 64 + 40


def pair_of(*entries: object, augment: bool = False) -> FlipPair | None:
    spec = Digits(transforms=list(entries), augment=augment, max_train_samples=32)
    return spec.load(ImageFormat()).train.flip_pair


PAD = {"name": "Pad", "padding": [2, 0, 0, 0]}  # on the left alone, so that the order counts


@pytest.mark.parametrize(
    "entries", [["RandomHorizontalFlip"], [PAD, "RandomHorizontalFlip"], ["RandomHorizontalFlip", PAD]]
)
def test_each_epoch_shows_the_picture_that_its_own_draw_makes(entries: list[object]) -> None:
    train = Digits(transforms=entries, max_train_samples=32).load(ImageFormat()).train
    pair, ids = train.flip_pair, np.arange(32)
    assert pair is not None
    for epoch in range(3):
        mirrored = pair.draws(ids, epoch)
        assert 0 < mirrored.sum() < 32
        plain, mirror = (pair.inputs(ids.tolist(), each) for each in (False, True))
        expected = torch.where(torch.from_numpy(mirrored)[:, None, None, None], mirror, plain)
        assert torch.equal(train.inputs(ids.tolist(), None, epoch), expected)
        assert np.array_equal(pair.draws(ids[::-1], epoch), mirrored[::-1]), "a draw is of its sample"


@pytest.mark.parametrize(
    "entries", [[], ["RandAugment"], ["RandomHorizontalFlip", "RandomVerticalFlip"], ["RandomHorizontalFlip"] * 2]
)
def test_other_transforms_have_no_pair(entries: list[object]) -> None:
    assert pair_of(*entries) is None
    assert pair_of("RandomHorizontalFlip", augment=True) is None


def test_a_run_with_both_pictures_stored_is_the_run_without_a_cache(pool: Pool, tmp_path: Path) -> None:
    stored = run_job(pool, 2, tmp_path / "stored", *PAIR, made_up_times=True)
    (fill,) = stored.events("cache_fill")
    assert (fill["num_samples"], stored.messages) == (ALL, [])
    assert stored.summary["cache"]["hit_rate"] == 1
    alone = run_job(pool, 2, tmp_path / "alone", *PAIR[:-1], "cache=off", made_up_times=True)
    assert stored.losses == pytest.approx(alone.losses, rel=0, abs=1e-10)
    in_turn = run_job(
        pool, 2, tmp_path / "in turn", *PAIR[:-1], "cache.augmentation=variants", "cache.variants=2", made_up_times=True
    )
    assert in_turn.losses != pytest.approx(alone.losses, rel=0, abs=1e-10), "two draws in turn are another run"


def test_draws_that_no_epoch_reads_any_more_are_not_computed(pool: Pool, tmp_path: Path) -> None:
    """Of three epochs two are left when the block freezes, and each reads one of five draws."""
    late = (*PAIR[:-1], "freeze=schedule", "freeze.num_frozen=[1]", "cache.augmentation=variants", "cache.variants=5")
    late = tuple(option for option in late if not option.startswith("freeze.num_blocks"))
    job = run_job(pool, 2, tmp_path / "late", *late, "cache.require=true", made_up_times=True)
    (fill,) = job.events("cache_fill")
    assert (fill["num_samples"], job.summary["cache"]["hit_rate"]) == (2 * 64 + 40, 1)


@pytest.mark.parametrize(
    ("num_draws", "is_pair", "counts"), [(2, True, [64, 64, 32, 16]), (5, False, [96, 64, 32, 16])]
)
def test_a_decision_counts_what_a_fill_takes_without_drawing_it(
    num_draws: int, is_pair: bool, counts: list[int]
) -> None:
    draws, cache = Mock() if is_pair else None, Mock()
    cache.capacity.persistent, cache.capacity.miss_rate.return_value = False, 0.0
    source = SampleSource("train", np.ones(num_draws * 32), 8, Mock(), Mock(), num_draws, draws=draws)
    line = Timeline(num_samples=32, batch_size=8, steps_per_epoch=4, num_steps=12, decision_every=1)
    order, terms = SampleOrder(32, 0, 8), CacheTerms(Path())
    session = CacheSession(cache, Mock(source=source), (), Mock(), Reporter(), line, order, terms)
    assert [session.num_samples(step) for step in (0, 4, 8, 10)] == counts
    assert draws is None or not draws.called


def test_in_the_last_epoch_one_picture_of_a_pair_is_computed(pool: Pool, tmp_path: Path) -> None:
    late = (*PAIR, "freeze=schedule", "freeze.num_frozen=[0,1]", "cache.require=true")
    job = run_job(
        pool, 2, tmp_path / "late", *(option for option in late if option != "freeze.num_blocks=1"), made_up_times=True
    )
    (fill,) = job.events("cache_fill")
    assert (fill["num_samples"], job.summary["cache"]["hit_rate"]) == (64 + 40, 1)


def test_a_store_of_pairs_is_read_by_a_later_run_with_another_seed_of_the_order(pool: Pool, tmp_path: Path) -> None:
    path = f"cache.path={tmp_path / 'features'}"
    run_job(pool, 1, tmp_path / "first", *PAIR, path, made_up_times=True)
    second = run_job(pool, 1, tmp_path / "second", *PAIR, path, "optim.lr=0.03", made_up_times=True)
    (fill,) = second.events("cache_fill")
    assert (fill["num_samples"], fill["num_found"]) == (0, ALL)


@pytest.mark.thinned("options0", "options2")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([f"dataset.transforms=[{FLIP}, RandAugment]"], "the dataset's transforms draw more than that"),
        (["dataset.augment=true"], "the dataset's transforms draw more than that"),
        (["dataset.transforms=[]"], "cache.augmentation=flip_pair has no effect"),
    ],
)
def test_what_draws_more_keeps_the_cache_off_with_the_remedy(
    options: list[str], words: str, pool: Pool, tmp_path: Path
) -> None:
    job = run_job(pool, 1, tmp_path / "run", *FROZEN, *options, "cache.augmentation=flip_pair", made_up_times=True)
    assert not job.error
    assert any(words in message for message in job.messages), job.messages


def test_the_name_of_the_transform_is_torchvisions() -> None:
    assert transforms.FLIP in transforms.DRAWN
