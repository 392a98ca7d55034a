"""Tokens that are kept are those that would be computed, and anything that they depend on makes them stale."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from pipetransformer.data.base import TextFormat
from pipetransformer.data.text import kept as module
from pipetransformer.data.text.document_split import tokenize_documents
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import Tokens, encode, encode_batches
from pipetransformer.data.text.squad_windows import Question, tokenize_windows
from pipetransformer.data.text.table import TextDataset
from pipetransformer.data.text.tagged_split import align
from pipetransformer.errors import UserError

QUESTIONS = [Question(str(i), "is it", "it is a " * (i + 4), ("it",), (0,)) for i in range(4)]
KINDS: dict[str, tuple[Callable[..., Any], Callable[[], Any], tuple[int, ...]]] = {
    "texts": (encode, lambda: (["it is", "a of it", ""],), (6,)),
    "pairs": (encode_batches, lambda: iter([(["it", "a"], ["is", "of"])]), (12,)),
    "words": (align, lambda: iter([["it", "rome"], ["a"]]), (12,)),
    "documents": (tokenize_documents, lambda: iter([(["", ""], ["it is a of it is a", ""])]), (4, True)),
    "windows": (tokenize_windows, lambda: QUESTIONS, (14, 2)),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pipetransformer" / "tokens"


@pytest.fixture
def own(tokenizer: Any) -> Any:
    """A tokenizer that the test may change."""
    return copy.deepcopy(tokenizer)


def plain(value: Any) -> Any:
    """A value with the type and the bytes of each array, to compare."""
    if is_dataclass(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    return (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value


def stores(folder: Path) -> list[Path]:
    return sorted(each for each in folder.glob("*") if each.is_dir())


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_read_again_is_what_is_computed(kind: str, own: Any, folder: Path) -> None:
    tokenize, texts, options = KINDS[kind]
    wanted = plain(tokenize(texts(), own, *options))
    assert plain(kept(tokenize, texts, own, *options)) == wanted
    assert len(stores(folder)) == 1
    with mock.patch.object(type(own), "__call__", side_effect=AssertionError("nothing is tokenised twice")):
        again = kept(tokenize, texts, own, *options)
    assert plain(again) == wanted
    assert [each.name for each in folder.glob("*.incomplete")] == []


def rows(tokens: Any) -> list[list[int]]:
    return [tokens.ids[row].tolist() for row in range(len(tokens.ids))]


def test_all_that_tokens_depend_on_makes_them_anew(own: Any, folder: Path) -> None:
    texts = ["it is", "a of"]
    before = rows(kept(encode, lambda: (texts,), own, 8))
    for number, (changed, max_length) in enumerate([(["it is", "of a"], 8), (["it i", "sa of"], 8), (texts, 3)], 2):
        given = (changed,)
        assert rows(kept(encode, lambda given=given: given, own, max_length)) == rows(encode(given, own, max_length))
        assert len(stores(folder)) == number
    assert rows(kept(encode, lambda: (texts,), own, 8)) == before
    own.add_tokens(["it is"])
    assert rows(kept(encode, lambda: (texts,), own, 8)) == rows(encode((texts,), own, 8)) != before
    assert len(stores(folder)) == 5
    with mock.patch.object(module.metadata, "version", return_value="another"):
        kept(encode, lambda: (texts,), own, 8)
    assert len(stores(folder)) == 6
    own(["it"], truncation=True, max_length=2, padding=True)  # leaves its state in the tokenizer
    kept(encode, lambda: (texts,), own, 8)
    assert len(stores(folder)) == 6


def test_a_digest_without_the_texts_would_be_noticed(own: Any) -> None:
    with mock.patch.object(module, "_add_texts"):
        kept(encode, lambda: (["it is"],), own, 8)
        assert rows(kept(encode, lambda: (["of a"],), own, 8)) != rows(encode((["of a"],), own, 8))


def load(file: Path, text: TextFormat) -> Any:
    options = {"eval_path": str(file), "text": "review"}
    return TextDataset(path=str(file), **options).load(text).train


def test_an_edited_table_is_noticed_and_one_that_is_not_is_read_again(tmp_path: Path, own: Any, folder: Path) -> None:
    file, wanted = tmp_path / "t.csv", TextFormat(own, 16)
    file.write_text("review,label\nit is,x\na of,y\n")
    first, again = load(file, wanted), load(file, wanted)
    assert plain(first.tokens) == plain(again.tokens)
    assert (first.identity(), len(stores(folder))) == (again.identity(), 1), "both splits have the same texts"
    file.write_text("review,label\nit is it,x\na of,y\n")
    edited = load(file, wanted)
    assert rows(edited.tokens) == rows(encode((["it is it", "a of"],), own, 16)) != rows(first.tokens)
    assert edited.inputs([1, 0], 6).shape == (2, 6)


@pytest.mark.parametrize("damage", ["cut", "lost"])
def test_damaged_files_are_made_anew(damage: str, own: Any, folder: Path) -> None:
    wanted = rows(kept(encode, lambda: (["it is"],), own, 8))
    file = stores(folder)[0] / "tokens.ids.values.npy"
    file.unlink() if damage == "lost" else file.write_bytes(file.read_bytes()[:-3])
    assert rows(kept(encode, lambda: (["it is"],), own, 8)) == wanted
    assert rows(kept(encode, lambda: (["it is"],), own, 8)) == wanted


def test_one_that_was_killed_while_it_wrote_leaves_nothing_in_the_way(own: Any, folder: Path) -> None:
    wanted = rows(kept(encode, lambda: (["it is"],), own, 8))
    (store,) = stores(folder)
    store.rename(store.with_suffix(".incomplete"))
    assert rows(kept(encode, lambda: (["it is"],), own, 8)) == wanted
    assert stores(folder) == [store]


def test_where_nothing_can_be_written_a_run_goes_on(own: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("a file in the way")
    assert rows(kept(encode, lambda: (["it is"],), own, 8)) == rows(encode((["it is"],), own, 8))
    folder.unlink()
    with mock.patch.object(np, "save", side_effect=OSError("no room")):
        assert rows(kept(encode, lambda: (["it is"],), own, 8)) == rows(encode((["it is"],), own, 8))
    assert stores(folder) == []


CALLS: list[int] = []


def counted(texts: tuple[list[str], ...], tokenizer: Any, max_length: int) -> Tokens:
    CALLS.append(max_length)
    return encode(texts, tokenizer, max_length)


def test_one_of_several_tokenises_and_the_others_wait_for_it(own: Any) -> None:
    CALLS.clear()
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: rows(kept(counted, lambda: (["it is"],), own, 8)), range(3)))
    assert made[0] == made[1] == made[2]
    assert CALLS == [8]


def test_a_tokenizer_with_code_of_its_own_is_not_kept(own: Any, folder: Path) -> None:
    with mock.patch.object(module, "_content", return_value=None):
        assert rows(kept(encode, lambda: (["it is"],), own, 8)) == rows(encode((["it is"],), own, 8))
    assert stores(folder) == []


def test_an_error_of_the_texts_stays_as_it_is(own: Any) -> None:
    def texts() -> Any:
        raise UserError("row 3 has no text")

    with pytest.raises(UserError, match="row 3 has no text"):
        kept(encode, texts, own, 8)
