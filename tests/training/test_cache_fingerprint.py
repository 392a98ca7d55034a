"""A store is not read by a run whose frozen layers compute otherwise, though their weights have the same shapes."""

import pytest
import torch
from support.jobs import loaded
from support.texts import text_run, write_encoder, write_table

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.data.base import ImageFormat, TextFormat
from pipetransformer.training.cache_fingerprint import fingerprint
from pipetransformer.training.loader import sample_source

VIT = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
BERT = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("train", "dev"):
        write_table(folder / f"{name}.tsv", [0, 1] * 4)
    return text_run(write_encoder(tmp_path_factory.mktemp("encoder")), "sst2", folder)


def identity(run: list[str], num_outputs: int = 2, **options: object) -> StoreFingerprint:
    """Of the training samples of a run whose model has these options."""
    config = loaded(*run, *(f"++model.options.{name}={value}" for name, value in options.items()))
    wanted = config.model.input_format()
    data = config.dataset.load(TextFormat(**wanted) if "tokenizer" in wanted else ImageFormat(**wanted))
    stack = config.model.build(data.task, num_outputs, data.input_shape, seed=0)
    source = sample_source(data.train, stack.hidden_shape)
    return fingerprint(config, stack, data.train, source, FeatureFormat(16, torch.float32), torch.device("cpu"))


@pytest.mark.parametrize(
    "changed",
    [{"num_heads": 4}, {"qk_norm": True}, {"init_values": 1.0}, {"act_layer": "relu"}, {"class_token": False}],
    ids=str,
)
def test_an_image_model_with_other_settings_has_features_of_its_own(changed: dict[str, object]) -> None:
    assert identity([], **VIT) == identity([], **VIT)
    assert identity([], **VIT).model != identity([], **VIT | changed).model


@pytest.mark.parametrize(
    "changed",
    [{"num_attention_heads": 4}, {"layer_norm_eps": 1e-5}, {"hidden_act": "relu"}],
    ids=str,
)
def test_a_text_model_with_other_settings_has_features_of_its_own(texts: list[str], changed: dict[str, object]) -> None:
    assert identity(texts, **BERT) == identity(texts, **BERT)
    assert identity(texts, **BERT).model != identity(texts, **BERT | changed).model


def test_the_head_has_no_part_in_it(texts: list[str]) -> None:
    assert identity([], **VIT).model == identity([], 3, **VIT).model
    assert identity(texts, **BERT).model == identity(texts, 3, **BERT).model
