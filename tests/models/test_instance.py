"""Stacks of models that a user made, and the way back."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from pipetransformer.data.map_style import MapStyleSplit
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import Lora
from pipetransformer.models.checks import check_same_outputs
from pipetransformer.models.instance import ModelInstance, give_back, save_model, stack_of
from pipetransformer.models.layer import Layer
from pipetransformer.models.stack import LayerStack

TINY: dict[str, Any] = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 2, "img_size": 16, "num_classes": 5}
CONFIG = BertConfig(
    hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=24, vocab_size=30,
    max_position_embeddings=20,
)  # fmt: skip

GPT2 = GPT2Config(
    n_embd=16, n_layer=3, n_head=2, vocab_size=30, n_positions=20, bos_token_id=1, eos_token_id=1, pad_token_id=0
)  # fmt: skip


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def sequential() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), Residual(), Residual(), nn.Sequential(nn.Flatten(), nn.Linear(40, 3)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def turned(register: str) -> nn.Sequential:
    """A model with a block that has complex numbers, as rotary positions often are."""
    model, numbers = sequential(), torch.ones(3, dtype=torch.complex64)
    getattr(model[1], register)("turns", nn.Parameter(numbers) if register == "register_parameter" else numbers)
    return model


def vision_transformer() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", **TINY)


def eva() -> nn.Module:
    return timm.create_model("eva02_tiny_patch14_224", **TINY)


def vision_tower() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=4))


INSTANCES: dict[str, Any] = {
    "sequential": (sequential, torch.randn(4, 5, 4)),
    "stack": (lambda: LayerStack.from_sequential(sequential()), torch.randn(4, 5, 4)),
    "timm": (vision_transformer, torch.randn(4, 3, 16, 16)),
    "rotary positions": (eva, torch.randn(4, 3, 16, 16)),
    "token classification": (lambda: BertForTokenClassification(CONFIG), torch.arange(20).reshape(4, 5)),
    "shared weights": (lambda: BertForMaskedLM(CONFIG), torch.arange(20).reshape(4, 5)),
    "decoder": (lambda: GPT2ForSequenceClassification(GPT2), torch.arange(5, 25).reshape(4, 5)),
    "decoder with shared weights": (lambda: GPT2LMHeadModel(GPT2), torch.arange(20).reshape(4, 5)),
}


@pytest.fixture(params=INSTANCES)
def instance(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor]:
    make, inputs = INSTANCES[request.param]
    torch.manual_seed(0)
    return make(), inputs


def outputs_of(model: nn.Module, inputs: Tensor) -> Tensor:
    outputs = model(inputs)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def load(stack: LayerStack) -> LayerStack:
    for index in range(len(stack)):
        stack.load(index)
    return stack


def doubled(stack: LayerStack) -> dict[str, Tensor]:
    return {
        name: t * 2 for layer in stack.layers for name, t in layer.original_state().items() if t.is_floating_point()
    }


def test_a_stack_computes_what_the_instance_computes(instance: tuple[nn.Module, Tensor]) -> None:
    model, inputs = instance
    stack = stack_of(model.eval())

    assert not any(layer.has_storage for layer in stack.layers)
    torch.testing.assert_close(load(stack).eval()(inputs), outputs_of(model, inputs), rtol=0, atol=1e-6)


def test_the_instance_stays_as_it_is_while_the_stack_trains(instance: tuple[nn.Module, Tensor]) -> None:
    model, _ = instance
    before = copy.deepcopy(model.eval().state_dict())
    stack = load(stack_of(model))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 1
    stack.to("meta")

    assert all(module.training for module in stack.modules())
    assert not any(module.training for module in model.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_trained_weights_come_back_into_the_instance(instance: tuple[nn.Module, Tensor]) -> None:
    model, inputs = instance
    stack = load(stack_of(model.eval())).eval()
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter *= 0.5
    give_back(model, {name: t for layer in stack.layers for name, t in layer.original_state().items()})

    torch.testing.assert_close(outputs_of(model, inputs), stack(inputs), rtol=0, atol=1e-6)


def test_a_timm_model_is_saved_for_timm(tmp_path: Path) -> None:
    model = vision_transformer()
    stack = load(stack_of(model))
    save_model(model, doubled(stack), tmp_path)
    again = timm.create_model(f"local-dir:{tmp_path}", pretrained=True)

    assert torch.equal(again.head.weight, stack[4].module.head.weight * 2)
    assert torch.equal(model.head.weight, again.head.weight)


def test_a_transformers_model_is_saved_for_transformers(tmp_path: Path) -> None:
    model = BertForMaskedLM(CONFIG)
    state = doubled(load(stack_of(model)))
    save_model(model, state, tmp_path)
    again = BertForMaskedLM.from_pretrained(tmp_path)

    assert torch.equal(again.bert.embeddings.word_embeddings.weight, state["bert.embeddings.word_embeddings.weight"])
    assert again.cls.predictions.decoder.weight is again.bert.embeddings.word_embeddings.weight


@pytest.mark.parametrize("make", [sequential, lambda: LayerStack.from_sequential(sequential())])
def test_other_models_are_saved_under_their_own_names(make: Any, tmp_path: Path) -> None:
    model = make()
    state = doubled(load(stack_of(model)))
    save_model(model, state, tmp_path)

    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == state.keys() == sequential().state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in saved.items())


ENCODER: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30,
    "max_position_embeddings": 20,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "names", "differs"),
    [
        ("bert", ["position_ids"], True),
        ("roberta", ["position_ids"], True),
        ("distilbert", ["position_ids"], True),
        ("deberta-v2", ["position_ids"], True),
        ("mpnet", ["position_ids"], True),
        ("albert", ["position_ids"], True),
        ("modernbert", ["position_ids"], True),
        ("ernie", ["position_ids", "task_type_ids"], True),
        ("bert", ["task_type_ids"], False),
    ],
)
def test_further_values_of_tokens_count_as_in_the_original(kind: str, names: list[str], differs: bool) -> None:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24, "embedding_size": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **ENCODER, **sizes, use_task_id=True)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    ids = torch.arange(5, 25).reshape(4, 5)
    each = {"position_ids": torch.tensor([3, 0, 1, 2, 4]).expand(4, 5), "task_type_ids": ids % 3}
    given = {name: each[name] for name in names}
    outputs = load(stack_of(model)).eval()(ids, attention_mask=torch.ones_like(ids).bool(), **given)
    torch.testing.assert_close(outputs, model(ids, torch.ones_like(ids), **given).logits, rtol=0, atol=1e-6)
    assert differs != torch.allclose(outputs, model(ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "names", "refused"),
    [
        (lambda: BertForSequenceClassification(CONFIG), ["idx", "text", "task_type_ids", "position_ids"], None),
        (lambda: BertForSequenceClassification(CONFIG), ["inputs_embeds", "idx"], "inputs_embeds, which BertFor"),
        (lambda: GPT2LMHeadModel(GPT2), ["token_type_ids", "position_ids"], None),
        (vision_transformer, ["name", "attn_mask"], "attn_mask, which VisionTransformer takes and its layers do not"),
        (sequential, ["attention_mask"], None),
        (lambda: LayerStack.from_sequential(sequential()), ["x"], None),
    ],
)
def test_values_that_the_layers_of_a_model_would_leave_out_are_refused(
    make: Any, names: list[str], refused: str | None
) -> None:
    instance = ModelInstance.of(make())
    if refused is None:
        instance.check_names("train", names)
        return
    with pytest.raises(UserError, match=f"the data set train has {refused}"):
        instance.check_names("train", names)


def frozen_embedding() -> nn.Module:
    model = BertForSequenceClassification(CONFIG)
    model.bert.embeddings.requires_grad_(False)
    return model


def masked_gradient() -> nn.Module:
    model = vision_transformer()
    model.patch_embed.proj.weight.register_hook(lambda gradient: gradient * 0)
    return model


def recomputing(model: Any) -> Any:
    """The instance as a user makes it who saves memory by its own means."""

    def make() -> nn.Module:
        if isinstance(model, timm.models.VisionTransformer):
            model.set_grad_checkpointing()
        else:
            enable = "activation_checkpointing_enable" if hasattr(model, "activation_checkpointing_enable") else ""
            getattr(model, enable or "gradient_checkpointing_enable")()
        return model

    return make


class OwnForward(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def hooked() -> nn.Module:
    model = sequential()
    model.register_forward_hook(lambda module, inputs, output: 2 * output)
    return model


@pytest.mark.parametrize(
    ("ids", "mask"), [([5, 6, 7, 0, 0], [1, 1, 1, 1, 0]), ([0, 0, 5, 6, 0], [0, 0, 1, 1, 1]), ([0, 0], [1, 1])]
)
def test_a_text_whose_end_is_the_padding_token_is_classified_as_the_instance_does(
    ids: list[int], mask: list[int]
) -> None:
    """It looks for the last token that is not padding, whatever the mask says of those behind it."""
    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(GPT2).eval()
    spec = ModelInstance.of(model)
    row = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask), "labels": torch.tensor(1)}
    split = MapStyleSplit("train", [row], lambda output, _: output.sum(1), padding_id=spec.padding_id)
    assert split.lengths is not None
    num_tokens = int(split.lengths[0])
    outputs = load(spec.stack).eval()(split.inputs([0], num_tokens), **split.context([0], num_tokens))
    expected = model(input_ids=row["input_ids"][None], attention_mask=row["attention_mask"][None]).logits
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_decoder_with_a_window_is_taken_in_whatever_type_it_was_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    """transformers loads weights in the type of the file, and makes a classifier's head beside them in float32."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    config = AutoConfig.for_model(
        "mistral", **sizes, vocab_size=30, num_hidden_layers=2, pad_token_id=0, sliding_window=4
    )
    AutoModelForSequenceClassification.from_config(config).to(dtype).save_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert model.dtype == dtype
    assert len(stack_of(model)) == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [vision_transformer, eva, vision_tower])
def test_a_model_of_images_is_taken_in_whatever_type_its_weights_are(make: Any, dtype: torch.dtype) -> None:
    assert len(stack_of(make().to(dtype))) == 5


def test_the_base_of_adapters_is_the_model_that_was_loaded(tmp_path: Path) -> None:
    BertForSequenceClassification(CONFIG).save_pretrained(tmp_path / "bert")
    model = BertForSequenceClassification.from_pretrained(tmp_path / "bert")
    spec, lora = ModelInstance.of(model), Lora(r=2)
    lora.apply(spec.stack, 0)
    lora.save(spec, spec.stack, doubled(load(spec.stack)), tmp_path / "adapters")
    saved = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "bert")
    assert ModelInstance.of(BertForSequenceClassification(CONFIG)).base_name == "BertForSequenceClassification"


def test_a_module_without_weights_may_come_several_times_in_a_sequential() -> None:
    act = nn.GELU()
    model = nn.Sequential(nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 2)).eval()
    x = torch.randn(3, 5, 4)
    stack = load(stack_of(model)).eval()
    assert len(stack) == 7
    assert torch.equal(stack(x), model(x))


@pytest.mark.parametrize("layer", [nn.ReLU(inplace=True), nn.Dropout(0.5, inplace=True)])
def test_a_layer_of_a_sequential_leaves_its_input_as_it_is(layer: nn.Module) -> None:
    stack = load(stack_of(nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 8), nn.Linear(8, 3))))
    stack.check(torch.randn(4, 5, 4))
    received = torch.randn(4, 5, 8, requires_grad=True)  # as from the stage below
    stack[1](received).sum().backward()
    assert received.grad is not None
    assert layer.inplace


def test_weights_that_layers_of_a_sequential_share_stay_shared() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    model[2].weight = model[0].weight
    stack = load(stack_of(model))
    assert [[tuple(copy) for copy in tie] for tie in stack.ties] == [[(0, "0.weight"), (2, "2.weight")]]
    assert LayerStack.from_sequential(model).ties == stack.ties
    assert torch.equal(stack[2].module.weight, model[0].weight)


def test_dropout_that_the_layers_leave_out_is_noticed() -> None:
    stack, model = LayerStack.from_sequential(sequential()), sequential()
    model.load_state_dict({name: t for layer in stack.layers for name, t in layer.original_state().items()})
    x = torch.randn(4, 5, 4)
    check_same_outputs(stack, model, model, x)
    dropped = nn.Sequential(nn.Dropout(0.3), model)
    with pytest.raises(UserError, match="draw dropout 0 times in training mode, and the model 1 times"):
        check_same_outputs(stack, dropped, dropped, x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Linear(2, 2),
            r"a Linear cannot be trained .*; supported are timm's VisionTransformer and Eva, .*Sequential",
        ),
        (lambda: timm.create_model("resnet18"), r"a ResNet cannot be trained .* vit_"),
        (lambda: timm.create_model("vit_small_resnet26d_224"), r"conv1\.1 \(BatchNorm2d\) changes its buffer"),
        (
            lambda: timm.create_model("eva02_tiny_patch14_224", **TINY, patch_drop_rate=0.1),
            r"an? Eva cannot be trained layer by layer: its patch_drop leaves out other patches",
        ),
        (lambda: BertModel(CONFIG), r"it has no head; take .* AutoModelFor"),
        (lambda: BertForPreTraining(CONFIG), r"a BertForPreTraining cannot be trained .* no attribute 'logits'"),
        (lambda: BertForMaskedLM._from_config(CONFIG, attn_implementation="eager"), "attn_implementation='sdpa'"),
        (
            lambda: GPT2ForSequenceClassification(GPT2Config(**{**GPT2.to_dict(), "pad_token_id": None})),
            r"a GPT2ForSequenceClassification cannot .* by its config\.pad_token_id, which is not set",
        ),
        (
            recomputing(BertForSequenceClassification(CONFIG)),
            r"it recomputes activations itself, .* call gradient_checkpointing_disable\(\) and set parallel\.recompute",
        ),
        (recomputing(vision_transformer()), r"it recomputes activations itself, .* set_grad_checkpointing\(False\)"),
        (lambda: OwnForward(*sequential()), r"OwnForward has a forward or hooks of its own"),
        (hooked, r"Sequential has a forward or hooks of its own"),
        (
            lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2, nn.Linear(4, 4), nn.Linear(4, 2)),
            r"layer 1 is layer 0 once more, with the same weights; give each layer a module of its own",
        ),
        (
            lambda: LayerStack.from_sequential(sequential()).requires_grad_(False),
            "8 parameters of the LayerStack take no",
        ),
        (
            lambda: LayerStack([Layer(nn.Linear(2, 2), nn.Module.__call__) for _ in range(3)], lambda x: x.shape),
            "its layers 0 and 1 both have weight, and weights are kept by their names; give each Layer a prefix",
        ),
        (
            masked_gradient,
            r"1 parameters of the VisionTransformer have hooks of their own, the first patch_embed\.proj\.w",
        ),
        (
            lambda: turned("register_buffer"),
            r"^the Sequential has 1 parameters and buffers of complex numbers, the first 1\.turns, .*view_as_real$",
        ),
        (
            lambda: nn.Sequential(nn.Linear(4, 8), Scaled(), nn.Linear(8, 3)),
            r"^the parameter 1\.scale of the Sequential was expanded: .* by clone\(\)$",
        ),
        (nn.Sequential, "it has no layers; give an embedding, at least one block and a head"),
        (lambda: turned("register_parameter"), r"^the Sequential has 1 parameters and buffers of complex numbers"),
        (frozen_embedding, r"5 parameters .* take no gradient, the first bert\.embeddings\.word_embeddings\.weight"),
    ],
)
def test_a_model_that_cannot_be_trained_layer_by_layer_is_refused(make: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        stack_of(make())
