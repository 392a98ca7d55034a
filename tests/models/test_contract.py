"""What every model family keeps. A new family joins with one row."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import yaml
from support import families
from support.jobs import ROOT
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from pipetransformer.config.compose import CONF
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head, ModelSpec
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.huggingface_vision import HuggingFaceVisionModel
from pipetransformer.models.huggingface_weights import load_state
from pipetransformer.models.layer import deep_copy
from pipetransformer.models.lazy_checkpoint import named_tensors
from pipetransformer.models.split import split_widths
from pipetransformer.models.stack import LayerStack, seeded
from pipetransformer.models.timm import TimmModel

Folder = Callable[..., Path]


CLASSES = Head("image", 5)


@dataclass(frozen=True)
class Images:
    """A row for timm: the model's name and options."""

    name: str
    options: dict[str, Any]
    head: Head = CLASSES
    input_shape: tuple[int, ...] = (3, 16, 16)

    def spec(self, _: Folder) -> ModelSpec:
        tiny = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2}
        return TimmModel(name=self.name, pretrained=False, options={**tiny, **self.options})

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.randn(2, *self.input_shape, dtype=torch.float64), {}

    def original(self, folder: Path) -> nn.Module:
        return timm.create_model(f"local-dir:{folder}", pretrained=True)

    def run(self, original: nn.Module, images: Tensor) -> Tensor:
        return original(images)


@dataclass(frozen=True)
class Text:
    """A row for transformers: the kind of encoder or decoder, its head and changes to its configuration."""

    name: str
    head: Head
    token_types: bool = False
    input_shape: tuple[int, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def spec(self, folder: Folder) -> ModelSpec:
        return HuggingFaceModel(name=str(folder(self.name)), pretrained=False, options=self.options)

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        mask = torch.arange(9) < torch.tensor([[9], [6]])
        context = {"attention_mask": mask}
        if self.token_types:
            context["token_type_ids"] = (torch.arange(9) > 4).long().expand(2, 9)
        return torch.randint(2, 15, (2, 9)).masked_fill(~mask, 0), context

    def original(self, folder: Path) -> nn.Module:
        families = {
            "span": AutoModelForQuestionAnswering,
            "sequence": AutoModelForSequenceClassification,
            "token": AutoModelForTokenClassification,
            "causal": AutoModelForCausalLM,
        }
        return families[self.head.kind].from_pretrained(folder, dtype=torch.float64)

    def run(self, original: nn.Module, ids: Tensor, **context: Tensor) -> Tensor:
        outputs = original(ids, **{name: tensor.long() for name, tensor in context.items()})
        if self.head.kind == "span":
            return torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
        return outputs.logits


@dataclass(frozen=True)
class Tower:
    """A row for vision towers of transformers: the kind and changes to its configuration."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    head: Head = CLASSES
    input_shape: tuple[int, ...] = (3, 16, 16)

    def spec(self, folder: Folder) -> ModelSpec:
        return HuggingFaceVisionModel(name=str(folder(self.name)), pretrained=False, options=self.options)

    def batch(self) -> tuple[Tensor, dict[str, Tensor]]:
        return torch.randn(2, *self.input_shape, dtype=torch.float64), {}

    def original(self, folder: Path) -> nn.Module:
        return AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float64)

    def run(self, original: nn.Module, images: Tensor) -> Tensor:
        return original(images).logits


HEADS = [Head("sequence", 3), Head("token", 4), Head("span", 2)]
ENCODERS = [
    ("bert", True),
    ("roberta", False),
    ("distilbert", False),
    ("electra", True),
    ("modernbert", False),
    ("deberta-v2", False),
    ("mpnet", False),
    ("albert", True),
]
DECODERS = ["gpt2", "llama", "qwen2", "qwen3", "gemma3_text"]
CAUSAL = Head("causal", 15)  # all words
FAMILIES = [
    Images("vit_tiny_patch16_224", {}),
    Images("vit_tiny_patch16_224", {"global_pool": "avg", "class_token": False}, input_shape=(1, 16, 16)),
    Images("vit_tiny_patch16_224", {"global_pool": "map", "pre_norm": True}),
    Images("vit_tiny_patch16_224", {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.1}),
    Images("deit_tiny_patch16_224", {"global_pool": "avg", "qk_norm": True}),
    Images("deit_tiny_distilled_patch16_224", {}),
    Images("eva02_tiny_patch14_224", {}),
    Images("eva02_base_patch14_224", {"drop_path_rate": 0.1}, input_shape=(1, 16, 16)),
    Images("vit_small_patch16_dinov3", {"num_reg_tokens": 2}),
    *(Text(name, head, token_types) for name, token_types in ENCODERS for head in HEADS),
    Text("deberta-v2 xlarge", Head("sequence", 3), True),
    Text("deberta-v2", Head("span", 2), options={"relative_attention": False, "norm_rel_ebd": "none"}),
    Text("albert", Head("sequence", 3), True, options={"num_hidden_groups": 2, "inner_group_num": 2}),
    Text("modernbert", Head("sequence", 3), options={"classifier_pooling": "mean", "norm_bias": False}),
    *(Text(name, head) for name in DECODERS for head in (CAUSAL, Head("sequence", 3))),
    *(Text(name, head) for name in DECODERS[:-1] for head in (Head("token", 4), Head("span", 2))),
    Tower("vit"),
    Tower("vit", input_shape=(1, 24, 24)),
    Tower("dinov2"),
    Tower("siglip"),
]
Family = Images | Text | Tower

# rows of each way to split a model and to fill its layers: words in their ids
EACH_SPLIT = (
    *("[vit_tiny_patch16_224-image-5-{}", "distilled", "[eva02_tiny"),  # timm: a ViT, one of two heads, an EVA
    *("[bert-sequence", "[distilbert-token", "[electra-span"),  # with a pooler, without, with a projection
    *("[modernbert-span", "[gpt2-causal", "[llama-span", "[gemma3_text-causal"),  # built as decoders
    *("[deberta-v2 xlarge", "[mpnet-span", "inner_group_num"),  # blocks that share weights
    *("[vit-image-5-{}-(1, 24", "[dinov2", "[siglip"),  # vision towers
)
# and of heads for each token: those of the other families are run by the same code
EACH_HEAD_OF_TOKENS = (
    *("[bert-token", "[deberta-v2-token", "[gpt2-token", "[bert-span", "[electra-span", "[modernbert-span"),
    *("[deberta-v2-span", "[mpnet-span", "[albert-span", "[gpt2-span", "[llama-span"),
)


def name_of(family: Family) -> str:
    return f"{family.name}-{family.head.kind}-{family.head.num_outputs}-{family.options}-{family.input_shape}"


@pytest.fixture(params=FAMILIES, ids=name_of)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


BUILT: dict[str, LayerStack] = {}


def build(family: Family, folder: Folder) -> LayerStack:
    """A copy of the family's stack of seed 0, which is built once: that takes longer than most tests."""
    if name_of(family) not in BUILT:
        BUILT[name_of(family)] = family.spec(folder).build(family.head, family.input_shape, seed=0)
    return deep_copy(BUILT[name_of(family)])


@pytest.fixture(scope="module")
def saved(encoder_folder: Folder, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], Path]:
    """Returns the folder of a family's saved stack, which is written once."""

    folders: dict[str, Path] = {}

    def save(family: Family) -> Path:
        if (folder := folders.get(name_of(family))) is None:
            folder = folders[name_of(family)] = tmp_path_factory.mktemp("saved")
            stack = build(family, encoder_folder)
            family.spec(encoder_folder).save(stack, state_of(stack), folder)
        return folder

    return save


def gradients_of(stack: LayerStack) -> dict[str, Tensor | None]:
    """By original names; that of a shared weight is the sum over its copies."""
    gradients = {(index, name): p.grad for index in range(len(stack)) for name, p in stack[index].by_name().items()}
    for lowest, *copies in stack.ties:
        gradients[lowest] = sum((gradients.pop(place) for place in copies), gradients[lowest])
    return {name: gradient for (_, name), gradient in gradients.items()}


def state_of(stack: LayerStack) -> dict[str, Tensor]:
    return {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}


@pytest.mark.thinned("-image-", "-sequence-", "-causal-", *EACH_HEAD_OF_TOKENS)
def test_a_stack_computes_what_the_saved_original_computes_and_its_layers_have_all_of_its_state(
    family: Family, encoder_folder: Folder, saved: Callable[[Family], Path]
) -> None:
    torch.manual_seed(0)
    stack = build(family, encoder_folder).double().eval()
    inputs, context = family.batch()
    original = family.original(saved(family)).double().eval()

    outputs = stack(inputs, **context)
    expected = family.run(original, inputs, **context)
    weights = torch.randn_like(expected)
    (outputs * weights).sum().backward()
    (expected * weights).sum().backward()

    assert outputs.shape[-1] == family.head.num_outputs
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-12)
    gradients = gradients_of(stack)
    assert gradients.keys() == dict(original.named_parameters()).keys()
    assert all(gradient is not None for gradient in gradients.values())
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-10, msg=name)
    state = original.state_dict()
    num_again = sum(place.name == tie[0].name for tie in stack.ties for place in tie[1:])  # one for several blocks
    assert sum(len(layer.original_state()) for layer in stack.layers) == len(state) + num_again
    assert {name: tensor.shape for name, tensor in state_of(stack).items()} == {n: t.shape for n, t in state.items()}


@pytest.mark.thinned(*EACH_SPLIT)
def test_the_seed_alone_decides_the_weights_and_the_callers_draws_are_left_alone(
    family: Family, encoder_folder: Folder
) -> None:
    spec = family.spec(encoder_folder)
    first = state_of(build(family, encoder_folder))
    before = torch.get_rng_state()
    torch.rand(1)
    torch.set_rng_state(before)
    other = state_of(spec.build(family.head, family.input_shape, seed=1))  # again of seed 0: see what is loaded alone

    assert torch.equal(torch.get_rng_state(), before)
    assert any(not torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.thinned("[bert-", "[modernbert-", "[deberta-v2-", "[albert-", "[gpt2-", "[llama-", "[vit-", "[siglip-")
@pytest.mark.parametrize("family", {f.name: f for f in FAMILIES if isinstance(f, Text | Tower)}.values(), ids=name_of)
def test_layers_are_drawn_as_transformers_draws_what_a_checkpoint_lacks(
    family: Text | Tower, encoder_folder: Folder
) -> None:
    stack = family.spec(encoder_folder).build_meta(family.head, family.input_shape, seed=5)
    assert stack.source is not None
    names = stack.names()
    for index in (0, 2, 1, len(stack) - 1):
        state = {name: torch.zeros(t.shape) for layer in stack.layers for name, t in layer.tensors()}
        with seeded(5 * len(stack) + index):
            model, _ = load_state(*stack.config, {name: t for name, t in state.items() if name not in names[index]})
        expected = named_tensors(model)
        drawn = dict(stack.source(index))
        assert [*drawn] == names[index]
        assert all(torch.equal(tensor, expected[name]) for name, tensor in drawn.items())


def test_hidden_shape_is_the_shape_between_all_layers(family: Family, encoder_folder: Folder) -> None:
    stack = build(family, encoder_folder).double()
    hidden, context = family.batch()
    expected = stack.hidden_shape(hidden)

    for index in range(len(stack) - 1):
        hidden = stack[index](hidden, **context)
        assert hidden.shape == expected


@pytest.mark.thinned("-image-", *EACH_SPLIT)
def test_a_stored_hidden_state_goes_on_bit_for_bit_from_every_depth(family: Family, encoder_folder: Folder) -> None:
    stack = build(family, encoder_folder).double().eval()
    hidden, context = family.batch()
    expected = stack(hidden, **context)

    for first in range(1, len(stack)):
        hidden = stack[first - 1](hidden, **context).detach()
        upper = deep_copy(stack)
        upper.layers[:first].to("meta")
        outputs = hidden.clone()
        for layer in upper.layers[first:]:
            outputs = layer(outputs, **{name: tensor.clone() for name, tensor in context.items()})
        assert torch.equal(outputs, expected)


@pytest.mark.thinned(*EACH_SPLIT)
def test_a_copy_stands_on_its_own(family: Family, encoder_folder: Folder) -> None:
    stack = build(family, encoder_folder).double().eval()
    inputs, context = family.batch()
    twin = deep_copy(stack)
    expected = stack(inputs, **context)

    stack.to("meta")

    assert torch.equal(twin(inputs, **context), expected)


def test_a_new_stack_trains(family: Family, encoder_folder: Folder) -> None:
    assert all(module.training for module in build(family, encoder_folder).modules())


@pytest.mark.thinned(*EACH_SPLIT)
@pytest.mark.parametrize("pretrained", [False, True])
def test_a_meta_stack_has_no_storage_and_a_layer_loaded_alone_has_the_weights_that_it_has_in_the_whole_model(
    pretrained: bool, family: Family, encoder_folder: Folder, saved: Callable[[Family], Path]
) -> None:
    spec = family.spec(encoder_folder)
    whole = build(family, encoder_folder)
    if pretrained:
        spec = type(spec)(name=str(saved(family)))
    meta = spec.build_meta(family.head, family.input_shape, seed=2 if pretrained else 0).double()  # 2 draws others

    for index in sorted({len(meta) - 1, 2, 0}, reverse=True):
        assert not any(not tensor.is_meta for _, tensor in meta[index].tensors())
        meta.load(index)
        expected = dict(whole[index].tensors())
        assert all(torch.equal(tensor, expected[name].to(tensor)) for name, tensor in meta[index].tensors())
    assert not meta[1].has_storage
    if pretrained:
        for index in range(len(meta)):
            meta.load(index)
        expected = state_of(whole)
        assert all(torch.equal(tensor, expected[name].to(tensor)) for name, tensor in state_of(meta).items())
    assert all(p.requires_grad and p.dtype == torch.float64 for p in meta[2].parameters())


@pytest.mark.parametrize("family", {families.title_of(f): f for f in FAMILIES}.values(), ids=families.title_of)
def test_a_simulation_knows_which_models_a_mesh_splits(family: Family, encoder_folder: Folder) -> None:
    try:
        is_split = bool(split_widths(build(family, encoder_folder)))
    except UserError:
        is_split = False
    for option in families.options_of(family):
        shape = yaml.safe_load((CONF / "shape" / f"{option}.yaml").read_text(encoding="utf-8"))
        # ELECTRA-small has embeddings that are narrower than its blocks
        assert shape["has_tp_plan"] == (is_split and option != "electra"), option


def test_the_readme_has_the_table_of_these_families() -> None:
    """``WRITE_FAMILIES=1 python -m pytest tests/models/test_contract.py -k readme`` writes it anew."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(families.BEGIN)
    expected = f"{before}{families.BEGIN}\n{families.table(FAMILIES)}\n{families.END}{rest.partition(families.END)[2]}"
    if families.WRITE in os.environ:
        readme.write_text(expected, encoding="utf-8")
    assert families.BEGIN in text
    assert readme.read_text(encoding="utf-8") == expected
