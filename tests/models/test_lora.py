"""Adapters by peft: the same training as a plain loop with peft, at every plan, and files that peft loads."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import timm
import torch
from safetensors.torch import load_file
from support.cases import NUM_BLOCKS, SEED, Case, tensors_equal
from support.exactness import assert_equal
from support.messages import num_received
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.samples import IMAGE_SIZE
from support.texts import WORDS, write_tokenizer
from support.trainings import train_elastic, train_reference
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, GPT2ForSequenceClassification

from pipetransformer.autopipe.plan import Plan
from pipetransformer.errors import UserError
from pipetransformer.models.adapters import Lora
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.instance import stack_of
from pipetransformer.models.stack import LayerStack, ParamRef
from pipetransformer.models.timm import TimmModel

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft asks for it
PLANS = {
    "pipeline": {0: plan(0, 0, [0, 3, HEAD], 1, 4)},  # the first stage is the embedding, of which nothing trains
    "replicas": {0: plan(0, 0, [HEAD], 3, 2)},
    "frozen": {0: plan(0, 0, [2, HEAD], 1, 2), 2: plan(3, 0, [4, HEAD], 1, 2)},
    "cached": {0: plan(0, 0, [2, HEAD], 1, 2), 2: plan(2, 2, [HEAD], 2, 1), 4: plan(4, 4, [5, HEAD], 1, 2)},
    "thawed": {0: plan(3, 0, [4, HEAD], 1, 2), 3: plan(1, 0, [1, 4, HEAD], 1, 4)},
    "all frozen": {0: plan(0, 0, [2, HEAD], 1, 2), 3: plan(NUM_BLOCKS, NUM_BLOCKS, [HEAD], 2, 1)},
    "shards": {0: sharded(0, 0, 2, 2), 3: sharded(2, 2, 2, 1)},
}


def frozen_from(plans: dict[int, Plan]) -> dict[int, int]:
    return {step: each.num_frozen for step, each in plans.items()}


@pytest.mark.thinned("pipeline", "thawed", "cached", "shards")
@pytest.mark.parametrize(("name", "kind"), [(name, ("vit", "bert")[number % 2]) for number, name in enumerate(PLANS)])
def test_training_equals_a_plain_loop_with_peft(
    name: str, kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case, plans = Case(kind, bert_config, lora=True, num_steps=6), PLANS[name]
    world = max(each.num_devices for each in plans.values())
    trace = pool.run(world, train_elastic, case, plans, str(tmp_path))[0]
    assert_equal(trace, train_reference(case, frozen_from(plans)))
    moved = {key.rpartition("/")[0] for key in trace.moments}
    assert moved, "something trains"
    assert all(".lora_" in key or not key.startswith(("blocks.", "bert.encoder")) for key in moved)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="torch 2.11 sends it one all the same: docs/limits.md")
@pytest.mark.parametrize(("first_stage", "expected"), [(0, [0, 4]), (1, [4, 4])])
def test_a_stage_in_which_nothing_trains_is_sent_no_gradient(
    first_stage: int, expected: list[int], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case, wanted = Case("vit", bert_config, lora=True), plan(0, 0, [first_stage, HEAD], 1, 4)
    assert pool.run(2, num_received, case, wanted, str(tmp_path)) == expected


@pytest.mark.thinned("bert_mlm")
@pytest.mark.parametrize("kind", ["vit", "bert_mlm"])
def test_dropout_of_adapters_belongs_to_the_sample(kind: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case(kind, bert_config, dropout=0.2, lora=True, num_steps=6)
    trace = pool.run(2, train_elastic, case, PLANS["cached"], str(tmp_path))[0]
    assert_equal(trace, train_reference(case, frozen_from(PLANS["cached"])))


def state_of(stack: LayerStack) -> dict[str, Tensor]:
    return {name: tensor.detach() for layer in stack.layers for name, tensor in layer.original_state().items()}


def trained(stack: LayerStack) -> LayerStack:
    """As after a training: nothing is zero any more."""
    for index in range(len(stack)):
        for parameter in stack.trainable(index, 0):
            parameter.data.copy_(torch.randn_like(parameter))
    return stack.eval()


def inputs_of(case: Case) -> tuple[Tensor, dict[str, Tensor]]:
    if case.reads_images:
        return torch.randn(2, 3, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.float64), {}
    return torch.randint(2, 15, (2, 9)), {"attention_mask": torch.arange(9) < torch.tensor([[9], [6]])}


def outputs_of(model: torch.nn.Module, case: Case) -> Tensor:
    torch.manual_seed(1)
    inputs, context = inputs_of(case)
    output = model(inputs, **context)
    return output if isinstance(output, Tensor) else output.logits


@pytest.mark.thinned
@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "eva02_tiny_patch14_224"])
def test_the_biases_that_train_are_those_of_peft(name: str, bias: str) -> None:
    tiny = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 8}
    original = timm.create_model(name, pretrained=False, **tiny)
    stack = stack_of(original)
    Lora(bias=bias).apply(stack, SEED)
    of_blocks = [(ParamRef(n, key), key) for n in range(len(stack) - 1) for key in stack[n].by_name()]
    trained = {key for ref, key in of_blocks if ref not in stack.fixed}
    adapted = sorted({key.partition(".lora_")[0] for key in trained if ".lora_" in key})

    config = peft.LoraConfig(target_modules=adapted, bias=bias)  # type: ignore[arg-type]
    model = peft.get_peft_model(original, config)  # type: ignore[arg-type]
    wanted = {key.removeprefix("base_model.model.") for key, p in model.named_parameters() if p.requires_grad}
    assert trained == wanted & {key for _, key in of_blocks}


def give_tokenizer(case: Case) -> None:
    """Puts one beside the configuration of a model of texts: it is saved with the adapters."""
    if not case.reads_images:
        write_tokenizer(Path(case.spec().name), WORDS, pad_token=WORDS[0], unk_token=WORDS[1])


@pytest.mark.thinned
@pytest.mark.parametrize("bias", ["none", "lora_only", "all"])
@pytest.mark.parametrize("kind", ["vit", "bert", "gpt2"])
def test_peft_loads_what_is_saved_and_the_sum_is_the_model(
    kind: str, bias: str, bert_config: Path, tmp_path: Path
) -> None:
    case, spec = Case(kind, bert_config), Lora(r=3, bias=bias)
    stack, base = case.stack(), case.original()
    spec.apply(stack, SEED)
    expected = outputs_of(trained(stack), case)
    give_tokenizer(case)
    spec.save(case.spec(), stack, state_of(stack), tmp_path)
    merged = spec.merge(stack, state_of(stack))

    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path), autocast_adapter_dtype=False).eval()
    torch.testing.assert_close(outputs_of(loaded, case), expected, rtol=0, atol=1e-12)
    plain = case.original()
    plain.load_state_dict(merged, strict=False)
    torch.testing.assert_close(outputs_of(plain.eval(), case), expected, rtol=0, atol=1e-12)
    again = case.stack()
    spec.apply(again, seed=5)
    spec.load_saved(again, tmp_path)
    for index in range(len(again)):
        again.load_again(index)
    tensors_equal(state_of(again), state_of(stack), 0.0)


def test_a_head_that_is_the_word_embeddings_is_not_saved(bert_config: Path, tmp_path: Path) -> None:
    case = Case("gpt2", bert_config)
    stack = case.stack()
    Lora().apply(stack, SEED)
    give_tokenizer(case)
    Lora().save(case.spec(), stack, state_of(stack), tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors")
    assert {name for name in names if ".lora_" not in name} == {
        f"base_model.model.transformer.ln_f.{each}" for each in ("weight", "bias")
    }


def test_classes_and_padding_are_saved_beside_adapters(encoder_folder: Callable[..., Path], tmp_path: Path) -> None:
    """The base's own config.json knows neither; a decoder finds the last token of a text by its padding."""
    spec = HuggingFaceModel(name=str(encoder_folder("gpt2", pad_token_id=7)), pretrained=False)
    stack = spec.build(Head("sequence", 2, labels=("no", "yes")), (), SEED)
    Lora().apply(stack, SEED)
    Lora().save(spec, stack, state_of(stack), tmp_path)
    config, tokenizer = AutoConfig.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert (config.id2label, config.pad_token_id) == ({0: "no", 1: "yes"}, tokenizer.pad_token_id)
    assert config.pad_token_id != 7
    model = GPT2ForSequenceClassification._from_config(config)
    assert peft.PeftModel.from_pretrained(model, str(tmp_path)).base_model.model.config.num_labels == 2


def test_every_adapter_of_an_eva_trains() -> None:
    tiny = {"patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    spec = TimmModel(name="eva02_tiny_patch14_224", pretrained=False, options=tiny)
    stack = spec.build(Head("image", 5), (3, 8, 8), SEED)
    with pytest.raises(UserError, match=r"target_modules=\['qkv'\]: .*; it has attn\.proj, mlp\.fc1, mlp\.fc2, or"):
        Lora(target_modules=("qkv",)).apply(stack, SEED)  # whose adapter timm would not call

    Lora().apply(stack, SEED)
    stack(torch.randn(2, 3, 8, 8)).square().sum().backward()

    adapters = {name: p for layer in stack.layers for name, p in layer.by_name().items() if ".lora_B" in name}
    assert len(adapters) == 6
    assert all(p.grad is not None and p.grad.any() for p in adapters.values())


def test_the_seed_and_the_name_alone_decide_the_adapters(bert_config: Path) -> None:
    case = Case("bert", bert_config)
    spec, shape = case.spec(), case.task.head
    whole, other = (case.stack() for _ in range(2))
    Lora().apply(whole, 1)
    Lora().apply(other, 2)
    meta = spec.build_meta(shape, (), SEED)
    Lora().apply(meta, 1)
    meta = meta.double()
    assert not any(tensor.is_meta is False for index in range(len(meta)) for _, tensor in meta[index].tensors())
    meta.load(3)
    expected, different = dict(whole[3].tensors()), dict(other[3].tensors())
    for name, tensor in meta[3].tensors():
        assert torch.equal(tensor, expected[name])
        assert ("lora_A" in name) == (not torch.equal(tensor, different[name]))


def test_only_adapters_and_head_train(bert_config: Path) -> None:
    stack = Case("bert", bert_config).stack()
    Lora(target_modules=["dense"]).apply(stack, SEED)
    assert stack.trainable(0, 0) == []
    names = {p: n for n, p in stack[1].by_name().items()}
    parts = [names[p].removeprefix("bert.encoder.layer.0.") for p in stack.trainable(1, 0)]
    assert parts == [
        f"{place}.lora_{factor}.default.weight"
        for place in ("attention.output.dense", "intermediate.dense", "output.dense")
        for factor in "AB"
    ]
    assert len(stack.trainable(HEAD, 0)) == len(list(stack[HEAD].parameters()))
    assert stack.trainable(1, 2) == [], "adapters of a frozen block are frozen, too"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target_modules": ["query", "vaule"]}, r"no block has a linear layer vaule; it has .*attention.self.value"),
        ({"target_modules": ["qeury"]}, r"peft.target_modules=\['qeury'\]: no block .* attention.self.query"),
        ({"r": 0}, "peft.r=0 must be at least 1"),
        ({"dropout": 1.0}, "peft.dropout=1.0 is no rate"),
        ({"bias": "some"}, "peft.bias=some is unknown; choose one of none, lora_only, all"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, object], words: str, bert_config: Path) -> None:
    with pytest.raises(UserError, match=words):
        Lora(**options).apply(Case("bert", bert_config).stack(), SEED)  # type: ignore[arg-type]


def test_the_reference_trains_what_peft_trains(bert_config: Path) -> None:
    case = replace(Case("bert", bert_config), lora=True)
    wrapped, stack = case.original(), case.stack()
    theirs = sum(p.numel() for p in wrapped.parameters() if p.requires_grad)
    ours = sum(p.numel() for index in range(len(stack)) for p in stack.trainable(index, 0))
    assert ours == theirs
