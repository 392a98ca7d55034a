"""The files in conf/model."""

from dataclasses import fields
from pathlib import Path

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from pipetransformer.config.compose import CONF
from pipetransformer.models.base import Head, ModelSpec

FILES = sorted((CONF / "model").glob("*.yaml"))


def spec_in(path: Path) -> ModelSpec:
    return instantiate(OmegaConf.load(path), _convert_="all")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_names_every_field_of_its_spec_in_its_type(path: Path) -> None:
    node = OmegaConf.load(path)
    spec = get_class(node.pop("_target_"))

    OmegaConf.merge(OmegaConf.structured(spec), node)
    spec_in(path).check()
    assert set(node) == {field.name for field in fields(spec)}


def test_the_small_vision_transformer_takes_digits_of_eight_pixels() -> None:
    spec = spec_in(next(path for path in FILES if path.stem == "vit_tiny"))

    assert spec.build(Head("image", 10), (1, 8, 8), seed=0).num_blocks == 6
