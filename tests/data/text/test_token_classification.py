"""Sentences with tags: which token carries a tag, what is scored, and what is said where data does not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seqeval import metrics

from pipetransformer.data.base import Data, TextFormat
from pipetransformer.data.text.tagged_split import TaggedSplit, align
from pipetransformer.data.text.token_classification import TokenClassification, mark_chunks
from pipetransformer.data.token_tasks import IGNORED
from pipetransformer.errors import UserError

TRAIN = "it O\nof B-LOC\nparis I-LOC\n\na O\n\nxyz B-PER\n\x07\x08 I-PER\nis O\n"
DEV = "of B-LOC\nrome I-LOC\nis O\n\nit B-PER\n"


def write(folder: Path, **files: str) -> str:
    for name, content in files.items():
        (folder / f"{name}.txt").write_text(content)
    return str(folder)


def load(text: TextFormat, **options: Any) -> Data:
    spec = TokenClassification(**options)
    spec.check()
    return spec.load(text)


@pytest.fixture
def data(tmp_path: Path, text: TextFormat) -> Data:
    return load(text, path=write(tmp_path, train=TRAIN, dev=DEV))


def test_the_first_token_of_a_word_carries_its_tag_and_a_word_without_token_does_not_count(data: Data) -> None:
    assert data.task.head.labels == ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
    assert isinstance(data.train, TaggedSplit)
    # [CLS] it of p ##a ##r ##i ##s [SEP] | [CLS] a [SEP] | [CLS] x ##y ##z is [SEP]
    assert data.train.lengths is not None
    assert data.train.lengths.tolist() == [9, 3, 6]
    none = IGNORED
    assert data.train.targets([0, 1, 2], 10).tolist() == [
        [none, 4, 0, 2, none, none, none, none, none, none],
        [none, 4, none, none, none, none, none, none, none, none],
        [none, 1, none, none, 4, none, none, none, none, none],
    ]
    assert data.train.targets([1]).shape == (1, 3)
    assert data.train.loss_weights is not None
    assert data.train.loss_weights.tolist() == [3, 1, 2]
    assert data.warnings == (
        "1 words of the train split count neither in the loss nor in the scores, because they have no token; raise "
        "dataset.max_length if their sentences were cut",
    )


WORD = st.text(st.sampled_from("aitsof.,-'$xyzÄß東\x07\u0301#"), min_size=1, max_size=8)


@given(st.lists(st.lists(WORD, min_size=1, max_size=6), min_size=1, max_size=4), st.integers(8, 24))
def test_words_and_tokens_belong_together_as_in_transformers(
    tokenizer: Any, sentences: list[list[str]], max_length: int
) -> None:
    words = align(iter(sentences), tokenizer, max_length)
    split = tokenizer(sentences, is_split_into_words=True, truncation=True, max_length=max_length)
    for row in range(len(sentences)):
        of_tokens = split.word_ids(row)
        found = dict(zip(words.numbers[row].tolist(), words.first[row].tolist(), strict=True))
        assert words.tokens.ids[row].tolist() == split["input_ids"][row]
        assert found == {word: of_tokens.index(word) for word in dict.fromkeys(of_tokens) if word is not None}


def test_a_tokenizer_that_marks_the_beginning_of_words_gives_what_it_gives_for_text() -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<s>", "Ġ", "E", "U", "Ġc", "a", "l", "ls"]
    model = models.BPE({piece: i for i, piece in enumerate([*pieces, "c", "s"])}, [("Ġ", "c"), ("l", "s")])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>")
    words = align(iter([["EU", "calls", "a"]]), fast, 20)
    assert fast.convert_ids_to_tokens(words.tokens.ids[0]) == ["E", "U", "Ġc", "a", "l", "ls", "Ġ", "a"]
    assert words.first[0].tolist() == [0, 2, 7], "a space alone is no part of the word that follows"


def outputs_for(split: TaggedSplit, tags: dict[tuple[int, int], int], num_tokens: int) -> torch.Tensor:
    outputs = torch.zeros(len(split), num_tokens, len(split.task.head.labels))
    outputs[..., 4] = 1.0
    for (row, token), tag in tags.items():
        outputs[row, token, tag] = 2.0
    return outputs


def test_scores_are_those_of_seqeval_on_the_words(data: Data) -> None:
    (dev,) = data.evaluation
    assert isinstance(dev, TaggedSplit)
    # [CLS] of r ##o ##m ##e is [SEP] | [CLS] it [SEP]; tokens that carry no tag are left out, whatever is predicted
    outputs = outputs_for(dev, {(0, 1): 0, (0, 2): 2, (0, 3): 1, (0, 7): 3, (1, 1): 0, (1, 2): 1}, 8)
    predictions = np.concatenate(
        [dev.predict(outputs[:1], [0], 8).numpy(), dev.predict(outputs[1:, :3], [1], 3).numpy()]
    )
    truth, guess = [["B-LOC", "I-LOC", "O"], ["B-PER"]], [["B-LOC", "I-LOC", "O"], ["B-LOC"]]
    assert dev.score(predictions) == {
        "f1": metrics.f1_score(truth, guess),
        "precision": metrics.precision_score(truth, guess),
        "recall": metrics.recall_score(truth, guess),
        "token_accuracy": 0.75,
    }
    assert [*dev.rows(predictions)] == [
        {"id": 0, "words": ["of", "rome", "is"], "prediction": guess[0], "target": truth[0]},
        {"id": 1, "words": ["it"], "prediction": guess[1], "target": truth[1]},
    ]


def test_words_that_do_not_fit_count_nowhere_and_are_reported(tmp_path: Path, text: TextFormat) -> None:
    long = "".join(f"it {tag}\n" for tag in ["B-X", "O"] * 10)
    data = load(text, path=write(tmp_path, train=long, dev=long), max_length=8)
    (dev,) = data.evaluation
    assert dev.loss_weights is not None
    assert dev.loss_weights.tolist() == [6]
    cut = [warning.partition(" split")[0] for warning in data.warnings]
    assert cut == ["14 words of the train", "14 words of the dev"]
    assert dev.score(np.array([[0, 1, 0, 1, 0, 1]]))["f1"] == 1


def test_parts_of_speech_are_scored_by_accuracy(tmp_path: Path, text: TextFormat) -> None:
    table = "it\tPRON\nis\tVERB\n"
    data = load(text, path=write(tmp_path, train=table, dev=table))
    assert data.evaluation[0].score(np.array([[0, 0]])) == {"token_accuracy": 0.5}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["B-PER", "I-PER", "O"], True),
        (["B-PER", "E-PER", "I-PER", "O", "S-PER"], True),
        (["B", "I", "O"], True),
        (["NOUN", "VERB", "O"], False),
        (["N", "E", "S", "V"], False),
        (["PRP$", "-LRB-", "NN"], False),
        (["O"], False),
    ],
)
def test_tags_mark_chunks_where_all_have_prefixes(labels: list[str], expected: bool) -> None:
    assert mark_chunks(labels) is expected


def write_lines(file: Path, rows: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_classes(file: Path, rows: list[dict[str, Any]]) -> None:
    """With the names of the classes, in another order than the alphabet's."""
    names = datasets.ClassLabel(names=["O", "B-X", "unused"])
    features = {"tokens": datasets.List(datasets.Value("string")), "ner_tags": datasets.List(names)}
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).to_parquet(file)


@pytest.mark.parametrize(
    ("name", "put", "tags", "options", "labels"),
    [
        ("a.jsonl", write_lines, ["O", "B-X"], {}, ("B-X", "O")),
        ("a.jsonl", write_lines, ["O", "B-X"], {"labels": ["O", "B-X", "I-X"]}, ("O", "B-X", "I-X")),
        ("a.jsonl", write_lines, [9, 10], {}, ("9", "10")),
        ("a.jsonl", write_lines, [0, 1], {"labels": ["O", "B-X"]}, ("O", "B-X")),
        ("a.parquet", write_classes, [0, 1], {"labels": ["B-X", "O"]}, ("B-X", "O")),
    ],
)
def test_tables_of_lists_have_tags_by_name_or_by_number(
    tmp_path: Path, text: TextFormat, name: str, put: Callable[..., None], tags: list[Any], options: dict[str, Any],
    labels: tuple[str, ...],
) -> None:  # fmt: skip
    put(tmp_path / name, [{"tokens": ["it", "is"], "ner_tags": tags}, {"tokens": ["a"], "ner_tags": tags[1:]}])
    data = load(text, path=str(tmp_path / name), tags="ner_tags", eval_path=str(tmp_path / name), **options)
    assert data.task.head.labels == labels
    by_name = {"O": labels.index("O"), "B-X": labels.index("B-X")} if "O" in labels else {}
    first, second = (by_name["O"], by_name["B-X"]) if by_name else (0, 1)
    assert data.train.targets([0]).tolist() == [[IGNORED, first, second, IGNORED]]
    assert data.train.targets([1]).tolist() == [[IGNORED, second, IGNORED]]


@pytest.mark.parametrize(("name", "put"), [("a.jsonl", write_lines), ("a.parquet", write_classes)])
def test_a_word_whose_tag_is_minus_100_is_of_no_class_and_counts_nowhere(
    tmp_path: Path, text: TextFormat, name: str, put: Callable[..., None]
) -> None:
    rows = [
        {"tokens": ["it", "is", "a"], "ner_tags": [-100, 1, 0]},
        {"tokens": ["a", "it", "is"], "ner_tags": [0, 0, -100]},
        {"tokens": ["it"], "ner_tags": [-100]},
    ]
    put(tmp_path / name, rows)
    data = load(text, path=str(tmp_path / name), tags="ner_tags", eval_path=str(tmp_path / name), chunks=False)
    assert data.task.head.labels == (("0", "1") if put is write_lines else ("O", "B-X", "unused"))
    none = IGNORED
    assert data.train.targets([0, 1, 2]).tolist() == [[none, none, 1, 0, none], [none, 0, 0, none, none], [none] * 5]
    assert data.train.loss_weights is not None
    assert data.train.loss_weights.tolist() == [2, 2, 0]
    (split,) = data.evaluation
    assert isinstance(split, TaggedSplit)
    # [CLS] it is a [SEP], of which [CLS] and it carry no tag
    tags = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 0, 1, 0], [1] * 5])
    outputs = torch.nn.functional.one_hot(tags, len(data.task.head.labels)).float()
    predictions = split.predict(outputs, [0, 1, 2], 5).numpy()
    assert split.score(predictions) == {"token_accuracy": 0.75}
    assert [row["words"] for row in split.rows(predictions)] == [["is", "a"], ["a", "it"], []]
    assert not data.warnings


@pytest.mark.parametrize("rest", [{}, {"tags": []}, {"tags": None}])
def test_test_data_without_tags_are_not_evaluated_on(tmp_path: Path, text: TextFormat, rest: dict[str, Any]) -> None:
    write_lines(tmp_path / "train.jsonl", [ROW] * 4)
    write_lines(tmp_path / "test.jsonl", [{"tokens": ["it", "is"], **rest}])
    data = load(text, path=str(tmp_path))
    assert (len(data.train), data.evaluation[0].name, len(data.warnings)) == (3, "held_out", 1)
    assert data.warnings[0].startswith(f"the split test is not evaluated on, because {tmp_path / 'test.jsonl'} has no")


def test_a_split_without_a_tag_is_refused(tmp_path: Path, text: TextFormat) -> None:
    for name, tags in (("train", [0, 1]), ("test", [-100, -100])):
        write_lines(tmp_path / f"{name}.jsonl", [{"tokens": ["it", "is"], "tags": tags}])
    with pytest.raises(UserError, match="no word of the test split has a tag, but -100, which is none; check"):
        load(text, path=str(tmp_path))


def test_names_of_classes_come_from_the_data(tmp_path: Path, text: TextFormat) -> None:
    write_classes(tmp_path / "a.parquet", [{"tokens": ["it", "is"], "ner_tags": [0, 1]}] * 2)
    data = load(text, path=str(tmp_path / "a.parquet"), tags="ner_tags", chunks=True)
    assert data.task.head.labels == ("O", "B-X", "unused")
    assert data.train.targets([0]).tolist() == [[IGNORED, 0, 1, IGNORED]]


ROW = {"tokens": ["it", "is"], "tags": ["O", "B-X"]}


@pytest.mark.parametrize(
    ("rows", "options", "words"),
    [
        ([{"words": ["it", "is"], "tags": ["O", "B"]}], {}, ["dataset.tokens=tokens", "no such column", "words, tags"]),
        ([{"tokens": ["it"], "tag": ["O"]}], {}, ["dataset.tags=tags", "did you mean tag?"]),
        ([{"tokens": "it is", "tags": ["O", "B"]}], {}, ["dataset.tokens=tokens", "has string in it", "give a list"]),
        ([{"tokens": [1, 2], "tags": ["O", "B"]}], {}, ["dataset.tokens=tokens", "list<item: int64>"]),
        ([{**ROW, "tags": [0.5, 1.5]}], {}, ["dataset.tags=tags", "double", "the name or number of a tag"]),
        ([{**ROW, "tags": [[], []]}], {}, ["dataset.tags=tags", "the name or number of a tag"]),
        ([ROW, {**ROW, "tags": ["O"]}], {}, ["a.jsonl line 2 has 2 tokens and 1 tags", "one tag"]),
        ([ROW, {**ROW, "tags": None}], {}, ["a.jsonl line 2 has no tags"]),
        ([ROW, {"tags": ["O", "O"]}], {}, ["a.jsonl line 2 has no tokens"]),
        ([ROW, {**ROW, "tokens": ["it", None]}], {}, ["a.jsonl line 2, word 2 has no text"]),
        ([ROW, {**ROW, "tags": [None, "O"]}], {}, ["a.jsonl line 2, word 1 (it) has no tag"]),
        ([{**ROW, "tags": ["O", "O"]}], {}, ["the one tag O", "nothing to learn"]),
        ([{"tokens": [], "tags": []}], {}, ["dataset.tags=tags", "null"]),
        (
            [{**ROW, "tags": ["B-X", "NOUN"]}],
            {},
            ["the tag B-X (", "a.jsonl line 1, word 1) is one of a chunk and NOUN (", "line 1, word 2) is not"],
        ),
        (
            [{**ROW, "tags": ["O", "b-x"]}],
            {"chunks": True},
            ["dataset.chunks=true: the tag b-x (", "line 1, word 2) marks no chunk; give each", "as in B-PER"],
        ),
        ([{**ROW, "tags": ["X-B", "B-X"]}], {"chunks": True}, ["the tag X-B (", "word 1) marks no chunk"]),
        ([{**ROW, "tokens": ["1", "2-3"]}], {}, ["dataset.tokens=tokens", "nothing but numbers", "tokens, tags"]),
        (
            [{**ROW, "tokens": ["1"], "tags": ["O"]}, {"tokens": [], "tags": []}],
            {"labels": ["O", "B-X"]},
            ["dataset.tokens=tokens", "nothing but numbers there, as 1"],
        ),
        ([ROW], {"labels": ["O", "B-Y"]}, ["line 1, word 2 (is) has the tag 'B-X'", "O, B-Y", "dataset.labels="]),
        ([{**ROW, "tags": [0, 2]}], {"labels": ["O", "B"]}, ["word 2 (is) has the tag 2", "dataset.labels="]),
        ([ROW], {"labels": ["O", "O"]}, ["dataset.labels=['O', 'O']", "each of them once"]),
        ([ROW], {"labels": ["O"]}, ["dataset.labels=['O']", "two or more"]),
        ([ROW], {"max_length": 2}, ["dataset.max_length=2", "8 or more"]),
        ([{**ROW, "tokens": ["\x07", "\x08"]}], {}, ["no word of the train split has a token", "dataset.tokens"]),
    ],
)
def test_what_does_not_fit_is_named_in_one_line(
    tmp_path: Path, text: TextFormat, rows: list[dict[str, Any]], options: dict[str, Any], words: list[str]
) -> None:
    write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(UserError) as refused:
        load(text, path=str(tmp_path / "a.jsonl"), eval_path=str(tmp_path / "a.jsonl"), **options)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_tag_that_only_the_evaluation_data_has_is_named_with_its_line(tmp_path: Path, text: TextFormat) -> None:
    path = write(tmp_path, train=TRAIN, dev="it O\n\nof O\nrome B-CITY\n")
    with pytest.raises(UserError, match=r"dev\.txt line 3, word 2 \(rome\) has the tag 'B-CITY', and the known"):
        load(text, path=path)


def test_a_launcher_reads_the_data_without_a_tokenizer_and_counts_sentences(tmp_path: Path) -> None:
    path = write(tmp_path, train=TRAIN, dev=DEV)
    assert TokenClassification(path=path).preflight() == 3
    assert TokenClassification(path=path, max_train_samples=2).preflight() == 2
    with pytest.raises(UserError, match="did you mean tags"):
        TokenClassification(path=path, tags="tagz").preflight()
