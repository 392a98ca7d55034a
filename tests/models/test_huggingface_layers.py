import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from pipetransformer.errors import UserError
from pipetransformer.models.base import Head
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.huggingface_layers import split_layers
from pipetransformer.models.split import tp_plan_of
from pipetransformer.models.stack import LayerStack

Folder = Callable[..., Path]


ANSWERS = Head("span", 2)


def build(folder: Path, head: Head = ANSWERS) -> LayerStack:
    return HuggingFaceModel(name=str(folder), pretrained=False).build(head, (), seed=0).double().eval()


@pytest.fixture(scope="module", params=["bert", "roberta", "distilbert", "electra"])
def stack(request: pytest.FixtureRequest, encoder_folder: Folder) -> LayerStack:
    return build(encoder_folder(request.param))


@settings(max_examples=10, deadline=None)
@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3), extra=st.integers(0, 3))
def test_padding_changes_nothing_at_the_tokens_before_it(stack: LayerStack, lengths: list[int], extra: int) -> None:
    rows = [torch.arange(length) + 2 for length in lengths]
    num_tokens = max(lengths) + extra
    ids = torch.stack([nn.functional.pad(row, (0, num_tokens - len(row)), value=1) for row in rows])
    mask = torch.arange(num_tokens) < torch.tensor(lengths)[:, None]

    padded = stack(ids, attention_mask=mask)

    for row, outputs in zip(rows, padded, strict=True):
        alone = stack(row[None], attention_mask=torch.ones(1, len(row), dtype=torch.bool))[0]
        torch.testing.assert_close(outputs[: len(row)], alone, rtol=0, atol=1e-12)


def test_a_row_of_padding_alone_gives_finite_gradients(stack: LayerStack) -> None:
    stack.zero_grad()
    mask = torch.tensor([[True] * 4, [False] * 4])
    stack(torch.full((2, 4), 3), attention_mask=mask)[0].sum().backward()

    assert all(bool(p.grad.isfinite().all()) for p in stack.parameters() if p.grad is not None)


def test_a_mask_of_ones_is_no_mask(stack: LayerStack) -> None:
    ids = torch.randint(2, 15, (2, 6))

    masked = stack(ids, attention_mask=torch.ones(2, 6, dtype=torch.bool))

    torch.testing.assert_close(masked, stack(ids), rtol=0, atol=1e-12)


def test_token_types_count_where_the_model_has_them_and_only_there(encoder_folder: Folder) -> None:
    ids, types = torch.randint(2, 15, (2, 6)), torch.ones(2, 6, dtype=torch.int64)

    def differs(model_type: str) -> bool:
        stack = build(encoder_folder(model_type))
        return not torch.equal(stack(ids, token_type_ids=types), stack(ids))

    assert {model_type: differs(model_type) for model_type in ("bert", "electra", "roberta", "distilbert")} == {
        "bert": True,
        "electra": True,
        "roberta": False,
        "distilbert": False,
    }


def test_question_answering_gives_start_and_end_for_each_token(stack: LayerStack) -> None:
    assert stack(torch.randint(2, 15, (3, 5))).shape == (3, 5, 2)


def test_no_layer_holds_what_another_layer_holds(encoder_folder: Folder) -> None:
    stack = build(encoder_folder("bert"), Head("sequence", 3))
    names = [name for layer in stack.layers for name in layer.original_state()]

    assert len(names) == len(set(names))
    assert set(stack[4].original_state()) == {
        f"{part}.{kind}" for part in ("bert.pooler.dense", "classifier") for kind in ("weight", "bias")
    }


@pytest.mark.parametrize("model_type", ["mobilebert", "opt"])
def test_another_structure_is_refused_with_what_is_supported(model_type: str, encoder_folder: Folder) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 15}
    tokens = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0, "intermediate_size": 24}

    with pytest.raises(ValueError, match=r"not made of embeddings and blocks alone; supported are .*BERT"):
        build(encoder_folder(model_type, **sizes, **tokens), Head("sequence", 2))


def test_a_run_asks_a_model_of_another_structure_for_its_longest_text_in_vain(encoder_folder: Folder) -> None:
    """Its texts are read before its layers are made."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 15}
    folder = encoder_folder("opt", **sizes, bos_token_id=2, eos_token_id=3, pad_token_id=0, ffn_dim=24)
    with pytest.raises(UserError, match=r"OPTModel.*not made of embeddings and blocks alone; supported are .*BERT"):
        HuggingFaceModel(name=str(folder), pretrained=False).input_format()


def test_blocks_that_take_so_many_tokens_at_a_time_are_refused(encoder_folder: Folder) -> None:
    with pytest.raises(UserError, match=r"chunk_size_feed_forward=4 takes texts of 4, 8, \.\.\. tokens alone; 1 any"):
        build(encoder_folder("bert", chunk_size_feed_forward=4), Head("sequence", 2))


@pytest.mark.parametrize("options", [{"num_attention_heads": 5}, {"hidden_dropout_prob": 2.0}], ids=str)
def test_options_that_do_not_fit_a_model_are_named(encoder_folder: Folder, options: dict[str, Any]) -> None:
    spec = HuggingFaceModel(name=str(encoder_folder("bert")), pretrained=False, options=options)
    for make in (spec.input_format, lambda: spec.build_meta(Head("sequence", 2), (), seed=0)):
        with pytest.raises(
            UserError, match=re.escape(f"model.options={options} does not fit model.name={spec.name}: ")
        ):
            make()


def test_attention_of_its_own_is_refused(encoder_folder: Folder) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 15}

    with pytest.raises(ValueError, match=r"MegatronBert.*its attention is not torch's scaled_dot_product_attention"):
        build(encoder_folder("megatron-bert", **sizes, intermediate_size=24, pad_token_id=0), Head("sequence", 2))


def test_a_model_that_calls_its_parts_otherwise_is_refused(
    encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bert.modeling_bert import BertModel

    original = BertModel.forward

    def doubled(self: BertModel, *args: object, **kwargs: Tensor) -> object:
        outputs = original(self, *args, **kwargs)
        outputs.last_hidden_state *= 2
        return outputs

    monkeypatch.setattr(BertModel, "forward", doubled)

    with pytest.raises(ValueError, match=r"does not run layer by layer: .* other outputs than the model in training"):
        build(encoder_folder("bert"))


def test_a_model_that_fails_on_its_own_configuration_is_refused_in_one_line(encoder_folder: Folder) -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    folder = encoder_folder("cohere_compass_text", **sizes)
    with pytest.raises(
        ValueError, match=r"could not load .*: KeyError 'full_attention'\. Supported are .*BERT"
    ) as refused:
        build(folder, Head("sequence", 2))

    assert "\n" not in str(refused.value)


def test_a_model_that_is_off_only_for_rows_of_padding_alone_is_refused(encoder_folder: Folder) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "vocab_size": 15}

    with pytest.raises(ValueError, match=r"LayoutLM.* give other outputs than the model for 1 of 4 samples"):
        build(encoder_folder("layoutlm", **sizes, intermediate_size=24, pad_token_id=0), Head("sequence", 2))


class BatchTokens(nn.BatchNorm1d):
    """Batch normalisation of (B, T, D) over samples and tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


def test_an_encoder_with_batch_statistics_is_refused_by_name(
    encoder_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.bert.modeling_bert import BertLayer

    make = BertLayer.__init__

    def with_statistics(self: BertLayer, *args: object, **kwargs: object) -> None:
        make(self, *args, **kwargs)
        self.output.LayerNorm = BatchTokens(16)

    monkeypatch.setattr(BertLayer, "__init__", with_statistics)

    with pytest.raises(
        ValueError, match=r"layer\.0\.output\.LayerNorm \(BatchTokens\) changes its buffer running_mean"
    ):
        build(encoder_folder("bert"))


def test_an_encoder_whose_mlp_takes_a_few_tokens_at_a_time_is_not_split() -> None:
    """Each piece draws dropout of its own, of which a rank could not tell its part."""
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
    config = BertConfig(**sizes, vocab_size=20, chunk_size_feed_forward=1)
    stack = split_layers(BertForSequenceClassification(config))
    with pytest.raises(UserError, match=r"no tp_plan says how BertLayer is split; run with parallel\.tp=1"):
        tp_plan_of(stack[1])
