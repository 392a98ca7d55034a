"""A store is not read by a run whose frozen layers compute otherwise, though their weights have the same shapes."""

import importlib.util
import linecache
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics
from support.jobs import loaded
from support.texts import text_run, write_encoder, write_table
from torch import nn

from pipetransformer.autocache.capacity import FeatureFormat
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.layout import Budgets
from pipetransformer.data.base import ImageFormat, TextFormat
from pipetransformer.errors import StaleStore
from pipetransformer.training.cache_fingerprint import code_versions, fingerprint, settings_of
from pipetransformer.training.loader import sample_source
from pipetransformer.training.world import ONE_NODE, NodeLayout

VIT = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
BERT = {"num_hidden_layers": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("texts")
    for name in ("train", "dev"):
        write_table(folder / f"{name}.tsv", [0, 1] * 4)
    return text_run(write_encoder(tmp_path_factory.mktemp("encoder")), "sst2", folder)


def identity(run: list[str], num_outputs: int = 2, nodes: NodeLayout = ONE_NODE, **options: object) -> StoreFingerprint:
    """Of the training samples of a run whose model has these options."""
    config = loaded(*run, *(f"++model.options.{name}={value}" for name, value in options.items()))
    wanted = config.model.input_format()
    data = config.dataset.load(TextFormat(**wanted) if "tokenizer" in wanted else ImageFormat(**wanted))
    stack = config.model.build(replace(data.task.head, num_outputs=num_outputs), data.input_shape, seed=0)
    source = sample_source(data.train, stack.hidden_shape, nodes=nodes)
    of_features = FeatureFormat(16, torch.float32), Budgets(1 << 20, 1 << 20), torch.device("cpu")
    return fingerprint(config, stack, data.train, source, *of_features)


@pytest.mark.thinned("num_heads", "class_token")
@pytest.mark.parametrize(
    "changed",
    [{"num_heads": 4}, {"qk_norm": True}, {"init_values": 1.0}, {"act_layer": "relu"}, {"class_token": False}],
    ids=str,
)
def test_an_image_model_with_other_settings_has_features_of_its_own(changed: dict[str, object]) -> None:
    assert identity([], **VIT) == identity([], **VIT)
    assert identity([], **VIT).model != identity([], **VIT | changed).model


@pytest.mark.thinned(1)
@pytest.mark.parametrize("changed", [{"rope_temperature": 100.0}, {"ref_feat_shape": 8}], ids=str)
def test_rotary_positions_of_another_kind_have_features_of_their_own(changed: dict[str, object]) -> None:
    run = ["model=eva02", "model.pretrained=false"]
    assert identity(run, **VIT) == identity(run, **VIT)
    assert identity(run, **VIT).model != identity(run, **VIT | changed).model


@pytest.mark.thinned("hidden_act")
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


def test_each_node_of_several_has_features_of_its_own_as_its_samples_come_first() -> None:
    alone, first, second = (
        identity([], 2, NodeLayout(sizes, index), **VIT) for sizes, index in (((2,), 0), ((1, 1), 0), ((1, 1), 1))
    )
    assert alone == identity([], **VIT), "as many processes as there are"
    assert len({alone.digest(), first.digest(), second.digest()}) == 3
    assert "of its node first" in alone.explain_difference(first)


def own_module(folder: Path, code: str) -> Any:
    """A module of this code in a file, as the user's own model would be."""
    file = folder / "own_family.py"
    file.write_text(f"from dataclasses import dataclass\n\nimport torch\nfrom torch import nn\n\n{code}\n")
    spec = importlib.util.spec_from_file_location("own_family", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["own_family"] = module
    linecache.checkcache()
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def own_family() -> Iterator[None]:
    yield
    del sys.modules["own_family"]


CODE = {
    "class": "class Block(nn.Linear):\n    factor = {}",
    "base": "class Base(nn.Linear):\n    factor = {}\n\nclass Block(Base):\n    pass",
    "function": (
        "def scaled(x):\n    return {} * x\n\nclass Block(nn.Linear):\n"
        "    def forward(self, x):\n        return [scaled(each) for each in x]"
    ),
    "constant": ("SCALE = {}\n\nclass Block(nn.Linear):\n    @property\n    def scale(self):\n        return SCALE\n"),
    "closure": (
        "def make(factor):\n    class Block(nn.Linear):\n        def forward(self, x):\n            return factor * x\n"
        "    return Block\n\nBlock = make({})"
    ),
}


@pytest.mark.usefixtures("own_family")
@pytest.mark.parametrize("code", CODE.values(), ids=CODE)
def test_own_layers_count_by_their_code_and_all_that_it_names(code: str, tmp_path: Path) -> None:
    blocks = (own_module(tmp_path, code.format(number)).Block(2, 2) for number in (1, 1, 20))
    one, same, other = (list(code_versions([block])) for block in blocks)
    assert one == same != other


CLASSES = """
@dataclass
class Settings:
    scale: float

class Rule:
    def __init__(self, scale):
        self.scale = scale

class Block(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
"""
VALUES = [
    "torch.full((2,), {})", "torch.full((2,), {}).numpy()", "dict(scale={})", "[dict(scale={})]", "Settings({})",
    "Rule({})", "frozenset([{}])", "1j * {}", "torch.float32 if {} == 1 else torch.float64", "lambda x: x * {}",
]  # fmt: skip


@pytest.mark.usefixtures("own_family")
@pytest.mark.parametrize("value", VALUES)
def test_own_layers_count_by_their_values(value: str, tmp_path: Path) -> None:
    code = f"{CLASSES}        self.value = {value}"
    blocks = (own_module(tmp_path, code.format(number)).Block() for number in (1, 1, 20))
    one, same, other = (settings_of(block) for block in blocks)
    assert one == same != other


def test_a_family_of_any_installed_package_counts_by_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    block = type("Block", (nn.Linear,), {"__module__": "torchmetrics.some.room"})(2, 2)
    before = list(code_versions([block]))
    assert before[0] == f"torchmetrics={torchmetrics.__version__}"
    monkeypatch.setattr(torchmetrics, "__version__", "0.0")
    assert list(code_versions([block])) == ["torchmetrics=0.0", before[1]]


def test_the_families_that_the_model_does_not_use_have_no_part_in_it() -> None:
    assert "timm=" in identity([], **VIT).model
    assert "transformers=" not in identity([], **VIT).model


def test_layers_whose_code_cannot_be_read_are_not_kept_for_later_runs() -> None:
    scope: dict[str, Any] = {"__name__": "nowhere", "nn": nn}
    exec("class Block(nn.Linear): pass", scope)
    with pytest.raises(StaleStore, match=r"code of Block cannot be read .*set path=null"):
        list(code_versions([scope["Block"](2, 2)]))
