"""Decoders layer by layer: their masks, positions and kinds of blocks, and a head that is the embedding."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Model,
    PreTrainedModel,
)

from pipetransformer.errors import UserError
from pipetransformer.models import huggingface_decoders
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.huggingface_decoders import BlockArguments
from pipetransformer.models.huggingface_layers import split_layers
from pipetransformer.models.instance import stack_of
from pipetransformer.models.stack import LayerStack, ParamRef

STRUCTURES = huggingface_decoders._STRUCTURES[1:2]  # Llama and those built like it
Folder = Callable[..., Path]
DECODERS = ["gpt2", "llama", "qwen2", "qwen3", "gemma3_text"]
NEXT_TOKEN = Head("causal", 0)
WORDS = {"gpt2": "transformer.wte.weight", "qwen2": "model.embed_tokens.weight"}
HEAD = "lm_head.weight"
LENGTHS = torch.tensor([9, 6, 1])
MASK = torch.arange(9) < LENGTHS[:, None]


def test_dropout_behind_the_embedding_that_is_no_module_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starcoder2 has it, and training without it would be another one; evaluation shows nothing."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
    config = AutoConfig.for_model(
        "starcoder2", **sizes, vocab_size=30, num_hidden_layers=2, pad_token_id=0, embedding_dropout=0.5,
        residual_dropout=0.0, attention_dropout=0.0,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config)
    stack_of(model)
    plain = (replace(each, embed=lambda base, ids, **_: base.embed_tokens(ids)) for each in STRUCTURES)
    monkeypatch.setattr(huggingface_decoders, "_STRUCTURES", tuple(plain))
    with pytest.raises(UserError, match="draw dropout"):
        stack_of(model)


def spec_of(folder: Path, **options: Any) -> HuggingFaceModel:
    return HuggingFaceModel(name=str(folder), **{"pretrained": False, **options})


def build(folder: Path, head: Head = NEXT_TOKEN) -> LayerStack:
    return spec_of(folder).build(head, (), seed=0).double().eval()


def words() -> Tensor:
    return torch.randint(2, 15, (3, 9), generator=torch.Generator().manual_seed(0))


def states(stack: LayerStack, ids: Tensor, **context: Tensor) -> list[Tensor]:
    """The output of each layer."""
    found = [ids]
    for layer in stack.layers:
        found.append(layer(found[-1], **context))
    return found[1:]


@pytest.fixture(scope="module", params=DECODERS)
def folder(request: pytest.FixtureRequest, encoder_folder: Folder) -> Path:
    return encoder_folder(request.param)


@pytest.fixture(scope="module")
def stack(folder: Path) -> LayerStack:
    return build(folder)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_upper_layers_alone_give_the_same_bits_from_a_stored_hidden_state_at_every_depth(
    kind: str, folder: Path, stack: LayerStack
) -> None:
    context = {"attention_mask": MASK}
    if kind == "packed":
        context["position_ids"] = torch.cat([torch.arange(4), torch.arange(5)]).expand(3, 9)
    stored = states(stack, words(), **context)
    for depth in range(len(stack) - 1):
        suffix = spec_of(folder).build_meta(NEXT_TOKEN, (), seed=0).double().eval()  # as in another process
        x = stored[depth].clone()
        for index in range(depth + 1, len(suffix)):
            suffix.load(index)
            x = suffix[index](x, **{name: tensor.clone() for name, tensor in context.items()})
        assert torch.equal(x, stored[-1])
        assert not suffix[depth].has_storage


def check(stack: LayerStack, model: PreTrainedModel) -> None:
    expected = model(words(), attention_mask=MASK).logits
    torch.testing.assert_close(stack(words(), attention_mask=MASK), expected, rtol=0, atol=1e-12)


def test_positions_that_are_added_in_a_block_again_do_not_pass(
    encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(encoder_folder("gpt2"))).double().eval()
    check(stack_with_weights(model), model)
    run = huggingface_decoders._run_block

    def again(arguments: BlockArguments, kind: str, block: Any, hidden: Tensor, **context: Tensor) -> Tensor:
        return run(arguments, kind, block, hidden + model.transformer.wpe(torch.arange(9)), **context)

    monkeypatch.setattr(huggingface_decoders, "_run_block", again)
    with pytest.raises(AssertionError):
        check(stack_with_weights(model, check=False), model)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("model_type", ["gemma3_text", "qwen2"])
def test_kinds_that_are_counted_from_another_block_do_not_pass(
    model_type: str, encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(encoder_folder(model_type))).double().eval()
    check(stack_with_weights(model), model)
    kinds = huggingface_decoders.block_kinds

    def counted_from_the_second(config: Any) -> list[str]:
        first, *others = kinds(config)
        return [*others, first]

    monkeypatch.setattr(huggingface_decoders, "block_kinds", counted_from_the_second)
    with pytest.raises(AssertionError):
        check(stack_with_weights(model, check=False), model)
    with pytest.raises(ValueError, match="other outputs than the model"):
        stack_of(model)


def stack_with_weights(model: PreTrainedModel, check: bool = True) -> LayerStack:
    stack = stack_of(model) if check else split_layers(model)
    for index in range(len(stack)):
        if not stack[index].has_storage:
            stack.load(index)
    return stack.eval()


def test_each_document_of_a_packed_row_is_computed_as_if_it_were_alone(stack: LayerStack) -> None:
    ids, lengths = words()[:1], [5, 1, 3]
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = stack(ids, position_ids=places)
    masked = stack(ids, position_ids=places, attention_mask=torch.ones(1, 9, dtype=torch.bool))
    alone = torch.cat([stack(part) for part in ids.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-12)
    torch.testing.assert_close(masked, alone, rtol=0, atol=1e-12)


def test_padding_changes_nothing_at_the_tokens_before_it(stack: LayerStack) -> None:
    padded = stack(words(), attention_mask=MASK)
    other = stack(words().masked_fill(~MASK, 7), attention_mask=MASK.long())  # as tokenizers give masks
    for row, length in enumerate(LENGTHS.tolist()):
        alone = stack(words()[row : row + 1, :length])[0]
        torch.testing.assert_close(padded[row, :length], alone, rtol=0, atol=1e-12)
        assert torch.equal(other[row, :length], padded[row, :length])


@pytest.mark.thinned
@pytest.mark.parametrize("head", [NEXT_TOKEN, Head("sequence", 3)], ids=lambda head: head.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_of_padding_alone_gives_finite_outputs_and_gradients(
    head: Head, dtype: torch.dtype, folder: Path
) -> None:
    stack = build(folder, head).to(dtype).train()
    outputs = stack(words(), attention_mask=MASK & torch.tensor([[True], [False], [True]]))
    outputs.sum().backward()
    assert outputs.isfinite().all()
    assert all(bool(p.grad.isfinite().all()) for p in stack.parameters() if p.grad is not None)


def test_a_text_is_classified_by_its_last_token_even_if_that_is_the_one_for_padding(folder: Path) -> None:
    stack = build(folder, Head("sequence", 3))
    ids = words()
    ids[1, 5] = 0
    short = stack(ids[1:2, :6])
    torch.testing.assert_close(stack(ids, attention_mask=MASK)[1:2], short, rtol=0, atol=1e-12)


def test_the_blocks_of_a_forward_share_their_mask_and_positions_which_go_with_it(
    encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[str] = []
    compute = BlockArguments._compute

    def counted(own: BlockArguments, kind: str, *given: Any) -> Any:
        computed.append(kind)
        return compute(own, kind, *given)

    monkeypatch.setattr(BlockArguments, "_compute", counted)
    stack = build(encoder_folder("gemma3_text"))
    computed.clear()
    forward = stack[1]._forward
    assert isinstance(forward, partial)
    results: WeakTensorKeyDictionary = forward.args[0]._results
    mask = MASK.clone()
    first = stack(words(), attention_mask=mask)
    assert computed == ["sliding_attention", "full_attention"]
    assert len(results) == 1
    mask[0, 4:] = False
    assert not torch.equal(stack(words(), attention_mask=mask)[0, 8], first[0, 8]), "a mask that has changed is another"
    with torch.inference_mode():
        stack(words(), attention_mask=MASK.clone())
    del mask
    gc.collect()
    assert len(results) == 0


@pytest.mark.thinned
@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize("model_type", WORDS)
def test_an_untied_head_starts_as_the_embedding_and_belongs_to_itself(
    model_type: str, pretrained: bool, encoder_folder: Folder, tmp_path: Path
) -> None:
    folder, words_name = encoder_folder(model_type), WORDS[model_type]
    if pretrained:
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    tied, spec = spec_of(folder, pretrained=pretrained), spec_of(folder, pretrained=pretrained, untie=True)
    stack, expected = spec.build(NEXT_TOKEN, (), seed=0), tied.build(NEXT_TOKEN, (), seed=0)
    head = len(stack) - 1

    assert expected.ties == ((ParamRef(0, words_name), ParamRef(head, HEAD)),)
    assert stack.ties == ()
    assert torch.equal(stack[head].by_name()[HEAD], expected[0].by_name()[words_name])
    assert stack[head].by_name()[HEAD] is not stack[0].by_name()[words_name]
    assert [len(each.trainable(head, first_active=2)) for each in (expected, stack)] == [
        len(expected.own_parameters(head)),
        len(expected.own_parameters(head)) + 1,
    ]
    assert HEAD in stack.names()[head], "a checkpoint has it"

    with torch.no_grad():
        stack[head].by_name()[HEAD] += 0.1
    state = {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}
    spec.save(stack, state, tmp_path)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    outputs = stack.double().eval()(words(), attention_mask=MASK)
    torch.testing.assert_close(outputs, original(words(), attention_mask=MASK).logits, rtol=0, atol=1e-12)
    again = spec_of(tmp_path, pretrained=True).build(NEXT_TOKEN, (), seed=1)
    assert torch.equal(again[head].by_name()[HEAD], state[HEAD])


@pytest.mark.parametrize(
    ("model_type", "published", "options"),
    [("gpt2", AutoModelForCausalLM, {"tie_word_embeddings": False}), ("llama", AutoModel, {})],
    ids=["untied by an option", "published without its head"],
)
def test_a_pretrained_causal_model_whose_head_would_be_drawn_is_refused(
    model_type: str, published: Any, options: dict[str, Any], encoder_folder: Folder
) -> None:
    folder = encoder_folder(model_type)
    published.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    spec = spec_of(folder, pretrained=True, options=options)
    with pytest.raises(UserError, match=r"lack lm_head\.weight of the causal head, which would be drawn"):
        spec.build_meta(NEXT_TOKEN, (), seed=0)
    spec.build_meta(Head("sequence", 2), (), seed=0)


def test_a_tied_head_is_saved_once(encoder_folder: Folder, tmp_path: Path) -> None:
    spec = spec_of(encoder_folder("gpt2"))
    stack = spec.build(NEXT_TOKEN, (), seed=0)
    spec.save(stack, {n: t for layer in stack.layers for n, t in layer.original_state().items()}, tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert len({HEAD, WORDS["gpt2"]} & set(file.keys())) == 1


def test_untying_where_nothing_is_tied_is_told(encoder_folder: Folder) -> None:
    with pytest.warns(UserWarning, match=r"model\.untie=true changes nothing"):
        spec_of(encoder_folder("llama"), untie=True).build_meta(NEXT_TOKEN, (), seed=0)


def test_a_tokenizer_without_padding_fills_up_with_its_end_and_the_saved_model_classifies_batches_by_it(
    encoder_folder: Folder, tmp_path: Path
) -> None:
    folder = encoder_folder("gpt2")
    settings = folder / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("pad_token", "eos_token"))
    spec = spec_of(folder)
    tokenizer = spec.input_format()["tokenizer"]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0

    stack = build(folder, Head("sequence", 3))
    state = {name: tensor.float() for layer in stack.layers for name, tensor in layer.original_state().items()}
    spec.save(stack, state, tmp_path)
    original = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float64).eval()
    batch = AutoTokenizer.from_pretrained(tmp_path)(
        ["a bird sees it", "we see"], padding=True, return_tensors="pt", return_token_type_ids=False
    )
    assert original.config.pad_token_id == 0
    outputs = stack(batch.input_ids, attention_mask=batch.attention_mask)
    torch.testing.assert_close(outputs, original(**batch).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("padding", "head", "warns"),
    [
        ("[SEP]", Head("sequence", 3), True),
        ("[PAD]", Head("sequence", 3), False),
        ("[SEP]", Head("token", 3), False),
        ("[SEP]", NEXT_TOKEN, False),
    ],
)
def test_a_token_that_ends_texts_and_fills_them_up_is_told_where_a_saved_model_classifies_by_the_one_before(
    padding: str, head: Head, warns: bool, encoder_folder: Folder
) -> None:
    folder = encoder_folder("qwen3")
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    end = [("[SEP]", tokenizer.convert_tokens_to_ids("[SEP]"))]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="$A [SEP]", special_tokens=end)
    tokenizer.pad_token = padding
    tokenizer.save_pretrained(folder)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec_of(folder).build_meta(head, (), seed=0)
    assert [str(each.message).startswith(f"the tokenizer of model.name={folder} ends") for each in caught] == [
        True
    ] * warns


@pytest.mark.thinned
@pytest.mark.parametrize("published", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_published_weights_are_read_layer_by_layer_and_trained_in_float32(
    published: Any, dtype: torch.dtype, folder: Path
) -> None:
    original = published.from_config(AutoConfig.from_pretrained(folder)).to(dtype)
    original.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of a model that every process reads as a whole
        stack = spec_of(folder, pretrained=True).build(Head("sequence", 2), (), seed=0)
    found = {name: tensor for layer in stack.layers for name, tensor in layer.original_state().items()}
    prefix = stack[0].prefix
    for name, tensor in original.base_model.state_dict().items():
        assert found[prefix + name].dtype == torch.float32
        assert torch.equal(found[prefix + name], tensor.float()), name


@pytest.mark.parametrize("pretrained", [False, True])
def test_fewer_blocks_are_the_lowest_ones_of_the_kinds_that_they_have(pretrained: bool, encoder_folder: Folder) -> None:
    folder = encoder_folder("gemma3_text")
    whole = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    whole.save_pretrained(folder)
    options = {"num_hidden_layers": 2}
    stack = spec_of(folder, pretrained=pretrained, options=options).build(NEXT_TOKEN, (), seed=0)
    assert stack.num_blocks == 2
    if pretrained:
        weights = whole.model.layers[1].state_dict()
        assert all(torch.equal(tensor, weights[name]) for name, tensor in stack[2].module.state_dict().items())


def test_masks_that_old_files_keep_among_the_weights_are_left_out(encoder_folder: Folder) -> None:
    folder = encoder_folder("gpt2")
    GPT2Model(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    old = {f"h.{i}.attn.bias": torch.ones(1, 1, 12, 12).tril() for i in range(3)}
    old |= {f"h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(3)}
    save_file({**load_file(folder / "model.safetensors"), **old}, folder / "model.safetensors", {"format": "pt"})
    assert spec_of(folder, pretrained=True).build(NEXT_TOKEN, (), seed=0).num_blocks == 3


LLAMA_LIKE = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 15,
              "num_key_value_heads": 1, "intermediate_size": 24, "pad_token_id": 0}  # fmt: skip
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
REFUSED = {
    "t5": ("t5", {}, NEXT_TOKEN, "it has an encoder and a decoder"),
    "gemma3": ("gemma3", {}, NEXT_TOKEN, r"it reads more than text \(vision\)"),
    "mixtral": ("mixtral", LLAMA_LIKE, NEXT_TOKEN, "it is a mixture of experts"),
    "qwen3_moe": ("qwen3_moe", LLAMA_LIKE, NEXT_TOKEN, "it is a mixture of experts"),
    "mamba": ("mamba", {}, NEXT_TOKEN, "its blocks are state-space layers"),
    "dynamic positions": ("llama", {**LLAMA_LIKE, "rope_parameters": ROPE}, NEXT_TOKEN, r"\(dynamic\) follows the"),
    "other attention": (
        "qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, NEXT_TOKEN,
        "its blocks are of kind chunked_attention",
    ),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, NEXT_TOKEN, "other outputs than the mod"),
    "encoder": ("bert", {}, NEXT_TOKEN, "its tokens see those after them; a causal head takes a decoder"),
    "no such head": ("gemma3_text", {}, Head("token", 3), "with a token head: Unrecognized configuration class"),
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "changes", "head", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_held_is_refused_by_name_and_reason(
    model_type: str, changes: dict[str, Any], head: Head, reason: str, encoder_folder: Folder
) -> None:
    folder = encoder_folder(model_type, **changes)
    with pytest.raises(ValueError, match=rf"model\.name={folder} .*{reason}.* [sS]upported are ") as refused:
        spec_of(folder).build_meta(head, (), seed=0)
    assert "\n" not in str(refused.value)
