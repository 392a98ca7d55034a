"""A run has a cache where frozen layers' output can be stored and is of use; where not, the user is told why."""

import re
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.caches import FEW, FORMAT, make_source
from support.jobs import loaded
from support.samples import RandomImages

from pipetransformer.autocache.capacity import CacheCapacity
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autopipe.profile import AffineTime
from pipetransformer.data.base import Data
from pipetransformer.data.tasks import image_classification
from pipetransformer.errors import UserError
from pipetransformer.models.stack import LayerStack
from pipetransformer.training import cache_setup
from pipetransformer.training.cache_setup import CacheSetup, set_up_cache

DATA = Data(RandomImages(4), (), image_classification(2))
FREEZES = ("freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.5")


def set_up(*overrides: str, data: Data = DATA) -> CacheSetup:
    """Sets up a cache where that ends before the model is looked at."""
    stack: LayerStack = None  # type: ignore[assignment]
    config, device = loaded(*overrides), torch.device("cpu")
    return set_up_cache(config, stack, data, [make_source([])], FORMAT, device, Path("nowhere"), ExitStack())


@pytest.mark.parametrize("options", [("freeze=none",), (*FREEZES, "cache=off"), (*FREEZES, "parallel.autopipe=false")])
def test_unless_frozen_layers_leave_the_pipeline_nothing_is_stored(options: tuple[str, ...]) -> None:
    setup = set_up(*options, data=replace(DATA, random_transform=True))
    assert setup == CacheSetup(), "without a word about the transform"
    assert (setup.reader, setup.is_partial, setup.mean_read) == (None, False, AffineTime(0.0, 0.0))


def test_a_random_transform_keeps_the_cache_off_and_says_how_to_have_it() -> None:
    setup = set_up(*FREEZES, data=replace(DATA, random_transform=True))
    assert setup.cache is None
    (note,) = setup.notes
    assert "cache.augmentation=first_draw" in note


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (replace(DATA, random_transform=True), "the cache is off: the dataset's transform is random"),
        (replace(DATA, train=RandomImages(4, mixup="batch")), "the cache is off: dataset.mixup and dataset.cutmix"),
    ],
    ids=["random", "mixed"],
)
def test_a_run_that_requires_the_cache_is_refused_with_what_keeps_it_off(data: Data, reason: str) -> None:
    with pytest.raises(UserError, match=f"cache.require=true trains only with the cache, and {reason}"):
        set_up(*FREEZES, "cache.require=true", data=data)


@pytest.mark.parametrize("augmentation", ["off", "first_draw"])
def test_mixed_samples_keep_the_cache_off_whatever_is_kept_of_a_transform(augmentation: str) -> None:
    mixed = RandomImages(4, mixup="batch")
    setup = set_up(*FREEZES, f"cache.augmentation={augmentation}", data=replace(DATA, train=mixed))
    assert setup.cache is None
    (note,) = setup.notes
    assert "dataset.mixup and dataset.cutmix" in note
    assert set_up(*FREEZES, "cache=off", data=replace(DATA, train=mixed)) == CacheSetup()


@pytest.mark.parametrize(
    ("memory_bytes", "arrangement", "message"),
    [
        (0, "elastic", "fit no sample; all features take .* raise one of them"),
        (FEW, "elastic", ""),
        (FEW, "sharded", "do not fit all features, and with parallel=sharded no device .* raise one of them"),
        (1 << 20, "sharded", ""),
    ],
)
def test_budgets_that_are_of_no_use_are_refused_by_name(memory_bytes: int, arrangement: str, message: str) -> None:
    config = loaded(*FREEZES, "cache.memory_gib=0.5", f"parallel={arrangement}")
    capacity = CacheCapacity([make_source([])], FORMAT, Budgets(memory_bytes, 0), persistent=False)
    problem = cache_setup._shortage(config, capacity)
    expected = f"cache.memory_gib=0.5 and cache.disk_gib=20 {message}" if message else ""
    assert re.fullmatch(expected, problem or ""), problem
