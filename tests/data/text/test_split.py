from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.texts import write_squad
from torch import Tensor

from pipetransformer.data.base import DatasetSpec, TextFormat
from pipetransformer.data.text.causal_lm import CausalLM
from pipetransformer.data.text.glue import Glue
from pipetransformer.data.text.split import CHUNK, Ragged, TextSplit, Tokens, check_embedded, encode, padding_id
from pipetransformer.data.text.squad import Squad
from pipetransformer.data.text.table import TextDataset
from pipetransformer.data.text.token_classification import TokenClassification
from pipetransformer.errors import UserError

ROWS = st.lists(st.lists(st.integers(1, 1000), min_size=1, max_size=12), min_size=1, max_size=8)


class Plain(TextSplit):
    def targets(self, ids: Sequence[int], num_tokens: int | None = None) -> Tensor:
        raise NotImplementedError

    def score(self, predictions: np.ndarray) -> dict[str, float]:
        raise NotImplementedError


def split(rows: list[list[int]], type_ids: list[list[int]] | None = None) -> Plain:
    return Plain("test", Tokens(Ragged.of(rows), Ragged.of(type_ids) if type_ids else None, pad_id=7))


@given(ROWS, st.integers(0, 5), st.randoms())
def test_rows_are_padded_at_the_end(rows: list[list[int]], extra: int, random: Any) -> None:
    ragged = Ragged.of(rows)
    ids = random.choices(range(len(rows)), k=5)
    width = max(len(rows[row]) for row in ids) + extra
    expected = [rows[row] + [-1] * (width - len(rows[row])) for row in ids]
    assert ragged.padded(np.array(ids), width, -1).tolist() == expected
    assert [ragged[row].tolist() for row in ids] == [rows[row] for row in ids]
    assert ragged.lengths.tolist() == [*map(len, rows)]


def test_inputs_and_context_share_their_width() -> None:
    texts = split([[1, 2, 3], [4], [5, 6]], [[0, 1, 1], [0], [0, 1]])
    assert texts.lengths is not None
    assert texts.lengths.tolist() == [3, 1, 2]
    inputs, context = texts.inputs([2, 1], 4), texts.context([2, 1], 4)
    assert inputs.dtype == context["token_type_ids"].dtype == torch.int64
    assert inputs.tolist() == [[5, 6, 7, 7], [4, 7, 7, 7]]
    assert context["attention_mask"].tolist() == [[True, True, False, False], [True, False, False, False]]
    assert context["token_type_ids"].tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]


def test_without_a_width_the_longest_row_decides() -> None:
    assert split([[1, 2, 3], [4], [5, 6]]).inputs([1, 2], None).shape == (2, 2)


def test_a_tokenizer_without_types_gives_none() -> None:
    assert [*split([[1, 2]]).context([0], None)] == ["attention_mask"]


def test_no_token_is_ever_cut_off_by_padding() -> None:
    with pytest.raises(AssertionError):
        split([[1, 2, 3]]).inputs([0], 2)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(ValueError, match="the test split has no texts"):
        split([])


def test_chunks_are_joined_in_order(tokenizer: Any) -> None:
    texts = [f"it is {number}" for number in range(CHUNK + 3)]
    tokens = encode((texts,), tokenizer, 16)
    assert [tokenizer.decode(tokens.ids[row]) for row in (0, CHUNK + 2)] == [
        "[CLS] it is 0 [SEP]",
        "[CLS] it is 1002 [SEP]",
    ]
    assert (len(tokens.ids), tokens.pad_id) == (CHUNK + 3, 0)
    assert tokens.type_ids is not None
    np.testing.assert_array_equal(tokens.type_ids.lengths, tokens.ids.lengths)


def test_pairs_are_joined_and_cut_to_the_longest_length(tokenizer: Any) -> None:
    tokens = encode((["it is " * 20, "it"], ["of", "a"]), tokenizer, 10)
    assert (tokens.num_cut, tokens.longest) == (1, 44)
    assert tokens.ids.lengths.tolist() == [10, 5]
    assert tokenizer.decode(tokens.ids[0]) == "[CLS] it is it is it is [SEP] of [SEP]"
    assert tokens.type_ids is not None
    assert tokens.type_ids[1].tolist() == [0, 0, 0, 1, 1]


@pytest.mark.parametrize(
    ("fast", "pad", "message"), [(False, 0, "not a fast tokenizer"), (True, None, "neither a padding nor an end token")]
)
def test_tokenizers_that_do_not_serve_are_refused(fast: bool, pad: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        padding_id(SimpleNamespace(is_fast=fast, pad_token_id=pad, eos_token_id=None))


@pytest.mark.parametrize(("pad", "end", "used"), [(0, 9, 0), (None, 9, 9), (None, 0, 0), (7, None, 7)])
def test_without_a_padding_token_short_samples_are_filled_up_with_the_end_token(
    pad: int | None, end: int | None, used: int
) -> None:
    assert padding_id(SimpleNamespace(is_fast=True, pad_token_id=pad, eos_token_id=end)) == used


def data_of(kind: type[DatasetSpec], folder: Path) -> dict[str, str]:
    """Options of a small data set of each kind."""
    (folder / "a.csv").write_text("text,label\nit is,a\nis it,b\n")
    (folder / "a.txt").write_text("it O\nis X\n")
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\nit is\t0\nis it\t1\n")
    if kind is Glue:
        return {"path": str(folder), "task": "sst2"}
    if kind is Squad:
        return {"path": str(write_squad(folder / "a.json", start=2))}
    file = str(folder / ("a.txt" if kind is TokenClassification else "a.csv"))
    return {"path": file, "eval_path": file}


@pytest.mark.parametrize("kind", [TextDataset, Glue, Squad, TokenClassification, CausalLM])
def test_a_length_that_the_model_does_not_read_is_told(kind: Any, tmp_path: Path, text: TextFormat) -> None:
    options = data_of(kind, tmp_path) | ({"stride": 4} if kind is Squad else {})
    short = replace(text, max_length=16)
    assert kind(**options, max_length=16).load(short).warnings == ()
    (warning,) = kind(**options, max_length=17).load(short).warnings
    assert warning.startswith("dataset.max_length=17 has no effect above 16, the most tokens that this model reads")


@pytest.mark.parametrize("kind", [TextDataset, Glue])
@pytest.mark.parametrize(
    ("own", "remedy"), [(8, "raise dataset.max_length=, to 16 at most"), (16, "give shorter ones")]
)
def test_texts_that_are_cut_off_are_counted(kind: Any, own: int, remedy: str, tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "train.tsv").write_text(
        "sentence\tlabel\n" + "".join(f"{'it ' * n}\t{n % 2}\n" for n in (1, own - 2, own - 1, 30, 29))
    )
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nit is\t0\n")
    options: dict[str, Any] = {"task": "sst2"} if kind is Glue else {"text": "sentence"}
    for _ in range(2):  # computed, and read again
        (told,) = kind(path=str(tmp_path), max_length=own, **options).load(replace(text, max_length=16)).warnings
        assert told == (
            f"3 of 5 texts of the train split have more than {own} tokens, the longest 32, and are cut off there; "
            + remedy
        )


@pytest.mark.parametrize("kind", [TextDataset, Glue, Squad, TokenClassification, CausalLM])
def test_a_token_that_the_model_does_not_embed_is_refused(kind: Any, tmp_path: Path, text: TextFormat) -> None:
    """Words of the tokenizer that no text holds are none of these."""
    spec = kind(**data_of(kind, tmp_path), max_length=16, **({"stride": 4} if kind is Squad else {}))
    highest = int(spec.load(text).train.tokens.ids.values.max())
    assert highest + 1 < len(text.tokenizer)
    spec.load(replace(text, vocab_size=highest + 1))
    with pytest.raises(UserError, match=rf"have the token {highest}, .* word embeddings for {highest}, from 0; save"):
        spec.load(replace(text, vocab_size=highest))


def test_padding_that_the_model_does_not_embed_is_refused(text: TextFormat) -> None:
    tokens = Tokens(Ragged.of([[1, 2]]), None, pad_id=9)
    check_embedded(tokens, replace(text, vocab_size=10))
    with pytest.raises(UserError, match="or their padding have the token 9, "):
        check_embedded(tokens, replace(text, vocab_size=9))
