"""Documents for a language model: what is learned of them, and what is said where they do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from pipetransformer.data.base import Data, TextFormat
from pipetransformer.data.text.causal_lm import CausalLM
from pipetransformer.data.text.document_split import DocumentSplit
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.errors import UserError

CHARACTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "Ċ", "?", ":"]
END = len(CHARACTERS)  # the id of the token that ends a text, which is the padding too, as GPT-2's is


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    """GPT-2's kind: each character is a token, and there is none for padding."""
    vocabulary = {piece: number for number, piece in enumerate([*CHARACTERS, "<end>", "<begin>"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


@pytest.fixture(scope="module")
def text() -> TextFormat:
    return TextFormat(make_tokenizer(eos_token="<end>"), max_length=512, vocab_size=40)


def load(wanted: TextFormat, /, **options: Any) -> Data:
    spec = CausalLM(**options)
    spec.check()
    return spec.load(wanted)


def write(folder: Path, content: str, name: str = "train.txt") -> str:
    (folder / name).write_text(content)
    return str(folder / name)


def write_lines(folder: Path, *rows: dict[str, Any]) -> str:
    return write(folder, "".join(json.dumps(row) + "\n" for row in rows), "a.jsonl")


def texts_of(split: Any, text: TextFormat) -> list[str]:
    return [text.tokenizer.decode(split.tokens.ids[row]) for row in range(len(split))]


def learned(split: Any, row: int, text: TextFormat) -> str:
    targets = split.targets([row])[0]
    return text.tokenizer.decode(targets[targets != IGNORED])


@pytest.mark.parametrize(
    ("sample_by", "documents"),
    [
        ("line", ["it is", "a cat", "no", "dog"]),
        ("paragraph", ["it is\na cat", "no\ndog"]),
        ("document", ["it is\na cat\n\n \nno\ndog"]),
    ],
)
def test_a_text_file_is_divided_as_asked(
    tmp_path: Path, text: TextFormat, sample_by: str, documents: list[str]
) -> None:
    path = write(tmp_path, "\nit is\na cat\n\n \nno\ndog\n\n")
    data = load(text, path=path, eval_path=path, sample_by=sample_by)
    assert texts_of(data.train, text) == [f"{document}<end>" for document in documents]
    assert (data.task.name, data.task.head.kind, data.warnings) == ("causal_language_modelling", "causal", ())
    assert data.task.output_shape((2, 8, 16)) == (2, 8, 40)


def test_each_token_is_to_give_the_next_one_up_to_the_one_that_ends_the_text(tmp_path: Path, text: TextFormat) -> None:
    path = write(tmp_path, "abc\na\n")
    train = load(text, path=path, eval_path=path).train
    assert train.inputs([0, 1], 6).tolist() == [[0, 1, 2, END, END, END], [0, END, END, END, END, END]]
    none = IGNORED
    assert train.targets([0, 1], 6).tolist() == [[1, 2, END, none, none, none], [END, none, none, none, none, none]]
    assert train.targets([1]).tolist() == [[END, none]]
    assert train.context([0, 1], 6)["attention_mask"].sum(1).tolist() == [4, 2], "the end is no padding, though equal"
    assert train.loss_weights is not None
    assert train.loss_weights.tolist() == [3, 1]


def test_the_tokens_of_a_prompt_are_given_and_not_learned(tmp_path: Path, text: TextFormat) -> None:
    rows = ({"ask": "who?", "say": "me"}, {"ask": "", "say": "hi"}, {"ask": "why", "say": ""})
    path = write_lines(tmp_path, *rows)
    train = load(text, path=path, eval_path=path, prompt="ask", completion="say", separator=": ").train
    assert texts_of(train, text) == ["who?: me<end>", ": hi<end>", "why: <end>"]
    assert [learned(train, row, text) for row in range(3)] == ["me<end>", "hi<end>", "<end>"]
    assert train.loss_weights is not None
    assert train.loss_weights.tolist() == [3, 3, 1]


def test_a_token_that_begins_in_the_prompt_is_learned_with_the_completion(tmp_path: Path) -> None:
    pieces = {piece: number for number, piece in enumerate(["a", "b", "c", "bc", "<end>"])}
    tokenizer = Tokenizer(models.BPE(pieces, [("b", "c")]))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    path = write_lines(tmp_path, {"prompt": "aab", "completion": "ca"})
    train = load(TextFormat(fast, 512), path=path, eval_path=path, prompt="prompt", completion="completion").train
    assert train.targets([0]).tolist() == [[IGNORED, 3, 0, 4, IGNORED]]


def test_tokens_that_the_tokenizer_adds_are_not_added_twice(tmp_path: Path) -> None:
    fast = make_tokenizer(eos_token="<end>", bos_token="<begin>")
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<begin> $A <end>", special_tokens=[("<begin>", END + 1), ("<end>", END)]
    )
    path = write_lines(tmp_path, {"p": "who", "c": "me"})
    train = load(TextFormat(fast, 512), path=path, eval_path=path, prompt="p", completion="c").train
    assert fast.decode(train.inputs([0], None)[0]) == "<begin>whome<end>"
    assert train.targets([0])[0, :4].tolist() == [IGNORED, IGNORED, IGNORED, CHARACTERS.index("m")]
    plain = load(TextFormat(fast, 512), path=path, eval_path=path, text="p").train
    assert plain.targets([0]).tolist() == [[*(CHARACTERS.index(each) for each in "who"), END, IGNORED]]


@pytest.mark.parametrize(
    ("long", "documents", "warnings"),
    [
        ("truncate", ["abcdefgh", "abcdefg<end>", "abcdefgh"], 1),
        ("split", ["abcdefgh", "ijkl<end>", "abcdefg<end>", "abcdefgh"], 0),  # <end> alone would have nothing before it
    ],
)
def test_longer_documents_are_cut_or_become_several_samples(
    tmp_path: Path, text: TextFormat, long: str, documents: list[str], warnings: int
) -> None:
    path, dev = write(tmp_path, "abcdefghijkl\nabcdefg\nabcdefgh\n"), write(tmp_path, "a\n", "dev.txt")
    data = load(text, path=path, eval_path=dev, long=long, max_length=8)
    assert texts_of(data.train, text) == documents
    assert len(data.warnings) == warnings
    assert data.train.loss_weights is not None
    assert data.train.loss_weights.tolist() == [len(text.tokenizer(each)["input_ids"]) - 1 for each in documents]
    if warnings:
        assert "2 documents of the train split have more than 8 tokens" in data.warnings[0]
        assert "dataset.long=split" in data.warnings[0]


def test_documents_of_which_nothing_is_learned_are_left_out_and_named(tmp_path: Path, text: TextFormat) -> None:
    path = write_lines(tmp_path, *({"p": prompt, "c": "x"} for prompt in ("a", "abcdefgh", "b", "abcdefghi")))
    data = load(text, path=path, eval_path=path, prompt="p", completion="c", max_length=8)
    assert texts_of(data.train, text) == ["ax<end>", "bx<end>"]
    assert "2 documents of the train split are left out" in data.warnings[1]
    assert data.warnings[1].endswith("a.jsonl line 2")


def test_the_loss_of_a_split_is_that_of_transformers_over_all_tokens(tmp_path: Path, text: TextFormat) -> None:
    path = write(tmp_path, "abcdefghijkl\na\nabc\nwhy so long\n")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=8, n_layer=2, n_head=2, n_positions=16, bos_token_id=END)
    model = GPT2LMHeadModel(config).eval()
    (dev,) = load(text, path=path, eval_path=path).evaluation
    assert isinstance(dev, DocumentSplit)
    rows = range(len(dev))
    mask = dev.context(rows, 16)["attention_mask"]
    with torch.no_grad():
        right = model(
            dev.inputs(rows, 16), attention_mask=mask, labels=dev.inputs(rows, 16).masked_fill(~mask, IGNORED)
        )
    sums = [dev.predict(right.logits[part, :width], part, width) for part, width in (([0, 1], 16), ([2, 3], 12))]
    scores = dev.score(torch.cat(sums).numpy())
    assert [*scores] == ["loss", "perplexity", "token_accuracy"]
    assert scores["loss"] == pytest.approx(right.loss.item(), abs=1e-6)
    by_sample = [*dev.rows(torch.cat(sums).numpy())]
    assert [row["num_tokens"] for row in by_sample] == [12, 1, 3, 11]
    mean = np.average([row["loss"] for row in by_sample], weights=[row["num_tokens"] for row in by_sample])
    assert mean == pytest.approx(scores["loss"])


ROW = {"text": "it is", "label": 1}


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([ROW], {"text": "txt"}, ["dataset.text=txt", "no such column", "did you mean text?"]),
        ([ROW], {"text": "label"}, ["dataset.text=label", "int64", "name a column of texts"]),
        ([ROW, {"text": None}], {}, ["a.jsonl line 2 has no text", "remove the row"]),
        ([ROW], {"prompt": "text"}, ["dataset.prompt=text needs dataset.completion="]),
        ([ROW], {"completion": "text"}, ["dataset.completion=text needs dataset.prompt="]),
        ([ROW], {"prompt": "text", "completion": "text"}, ["are both text"]),
        ([ROW], {"prompt": "text", "completion": "answer"}, ["dataset.completion=answer", "text, label"]),
        ([ROW], {"prompt": "a", "completion": "b", "text": "c"}, ["dataset.text=c", "drop one"]),
        ([ROW], {"prompt": "a", "completion": "b", "long": "split"}, ["dataset.long=split", "without their prompt"]),
        ([ROW], {"separator": " "}, ["dataset.separator=' '", "dataset.prompt="]),
        ([ROW], {"long": "drop"}, ["dataset.long=drop is unknown", "truncate, split"]),
        ([ROW], {"sample_by": "page"}, ["dataset.sample_by=page is unknown", "line, paragraph, document"]),
        ([ROW], {"max_length": 1}, ["dataset.max_length=1", "8 or more"]),
        ([{"text": ""}, {"text": ""}], {}, ["2 documents of the train split are left out", "line 1"]),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(
    tmp_path: Path, text: TextFormat, rows: list[dict[str, Any]], options: dict[str, Any], words: list[str]
) -> None:
    path = write_lines(tmp_path, *rows)
    with pytest.raises(UserError) as refused:
        load(text, path=path, eval_path=path, **options)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_file_without_text_is_refused(tmp_path: Path, text: TextFormat) -> None:
    with pytest.raises(UserError, match=r"train\.txt has no text"):
        load(text, path=write(tmp_path, "\n  \n"))


def test_a_tokenizer_that_ends_no_text_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "abc\n")
    with pytest.raises(UserError, match="no token that ends a text"):
        load(TextFormat(make_tokenizer(pad_token="<end>"), 512), path=path, eval_path=path)


def test_a_launcher_looks_at_every_document_without_a_tokenizer(tmp_path: Path) -> None:
    path = write_lines(tmp_path, ROW, {"text": None})
    with pytest.raises(UserError, match="line 2 has no text"):
        CausalLM(path=path, eval_path=path).preflight()
    assert CausalLM(path=write(tmp_path, "a\nb\n")).preflight() is None
