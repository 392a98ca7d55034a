"""Every dataset's YAML composes into a spec that passes its own check."""

from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from pipetransformer.config.compose import CONF
from pipetransformer.data.base import DatasetSpec

NAMES = sorted(str(file.relative_to(CONF / "dataset").with_suffix("")) for file in (CONF / "dataset").rglob("*.yaml"))

NEEDS_PATH = ("image_folder", "image", "text", "tokens", "causal_lm")


def composed(name: str) -> DictConfig:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(overrides=["+freeze=pipetransformer", f"+dataset={name}"])


def spec_of(recipe: DictConfig) -> DatasetSpec:
    values = {key: value for key, value in recipe.dataset.items() if key != "_target_"}
    spec_class = get_class(recipe.dataset["_target_"])
    spec = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(spec_class), values))
    assert isinstance(spec, DatasetSpec)
    return spec


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_the_schema_of_its_spec(name: str) -> None:
    recipe = composed(name)
    assert [key for key in recipe if key != "freeze"] == ["dataset", "epochs", "batch_size", "optim"]
    assert {*recipe.optim} - {"scratch_lr"} == {"recipe_lr"}, "no rate that other optimizers would take too"
    assert (type(recipe.epochs), type(recipe.batch_size)) == (int, int)
    assert {*map(type, recipe.optim.values())} == {float}
    values = {key: value for key, value in recipe.dataset.items() if key != "_target_"}
    spec = spec_of(recipe)
    assert {*values} == {*OmegaConf.structured(type(spec))}, "a recipe lists every option"
    if name not in NEEDS_PATH:
        spec.check()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ("digits", "digits"),
        ("squad", "squad"),
        ("glue/cola", "cola"),
        ("cifar100", "cifar100"),
        ("fashion_mnist", "fashion_mnist"),
        ("imdb", "imdb"),
    ],
)
def test_reports_call_the_data_by_the_name_that_it_is_known_by(recipe: str, name: str) -> None:
    assert spec_of(composed(recipe)).name == name


def test_reports_call_local_data_by_its_folder() -> None:
    spec = spec_of(composed("image_folder"))
    assert replace(spec, path="/data/birds").name == "birds"
    assert replace(spec, path=".").name == Path.cwd().name


def test_the_short_name_of_sst2_means_the_same() -> None:
    assert composed("sst2") == composed("glue/sst2")
