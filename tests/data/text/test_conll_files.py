"""Files of the CoNLL tasks as rows of sentences."""

from pathlib import Path
from typing import Any

import pytest

from pipetransformer.data.tables.rows import Rows, read_files
from pipetransformer.data.text.conll_files import CONLL_FORMATS
from pipetransformer.errors import UserError

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

\u2028\u00a0 : I-NP O
# NN I-NP O
-DOCSTART- -X- -X- O
Peter NNP B-NP B-PER
"""
UNIVERSAL = """# sent_id = 1
# text = vámonos al mar
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\t_\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\t_\t_\t1\tobj\t_\t_
2.1\t_\t_\t_\t_\t_\t_\t_\t_\t_
3\tNew York\tNew York\tPROPN\t_\t_\t1\tobl\t_\t_

"""


def read(file: Path, content: str, delimiter: str | None = None) -> Rows:
    file.write_text(content, encoding="utf-8")
    return read_files((file,), delimiter, CONLL_FORMATS)


def lists(rows: Rows, column: str) -> list[list[str]]:
    return rows.column(column).to_pylist()


@pytest.mark.parametrize("ending", [".txt", ".conll", ".bio", ".tsv"])
def test_columns_are_divided_by_spaces_and_sentences_by_blank_lines_and_documents(tmp_path: Path, ending: str) -> None:
    rows = read(tmp_path / f"a{ending}", CONLL_2003)
    assert [*rows.features] == ["tokens", "1", "2", "tags"]
    assert lists(rows, "tokens") == [["EU", "rejects"], ["\u2028\u00a0", "#"], ["Peter"]]
    assert lists(rows, "tags") == [["B-ORG", "O"], ["O", "O"], ["B-PER"]]
    assert lists(rows, "1")[1] == [":", "NN"]
    assert [rows.at(row) for row in range(3)] == [f"{tmp_path / f'a{ending}'} line {line}" for line in (3, 6, 9)]


def test_comments_before_a_sentence_are_left_out(tmp_path: Path) -> None:
    content = "# made by hand O\n# twice\n\n# id = 1\nEU B-ORG\n# O\n\n-DOCSTART- O\n# id = 2\n#1 O\n#\tO\n"
    rows = read(tmp_path / "a.conll", content)
    assert lists(rows, "tokens") == [["EU", "#"], ["#1", "#"]]
    assert lists(rows, "tags") == [["B-ORG", "O"], ["O", "O"]]
    assert [rows.at(row) for row in range(2)] == [f"{tmp_path / 'a.conll'} line {line}" for line in (5, 10)]


def test_a_line_with_the_source_of_a_sentence_is_no_word(tmp_path: Path) -> None:
    source = "#\thttps://de.wikipedia.org/wiki/X [2009-10-17]\n"
    words = "1\tAus\tO\tO\n2\tRom\tB-LOC\tO\n"
    rows = read(tmp_path / "a.tsv", f"{source}{words}\n{source}1\t#\tO\tO\n\n#\tAus\tO\tO\n2\tRom\tO\tO\n")
    assert lists(rows, "tokens") == [["1", "2"], ["1"], ["#", "2"]]
    assert lists(rows, "1") == [["Aus", "Rom"], ["#"], ["Aus", "Rom"]]
    with pytest.raises(UserError, match=r"b\.tsv line 3 has 2 columns"):
        read(tmp_path / "b.tsv", f"{words}{source}")


@pytest.mark.parametrize(
    ("content", "delimiter"),
    [
        ("a  b\tO\r\nc\tB-X\r\n\r\n \t\r\nd\tO", None),  # a word with spaces, and a line of spaces
        ("a  b;O\nc;B-X\n\nd;O\n\n\n", ";"),
        ("\ufeff\n\na  b\tO\n c \t B-X \n\nd\tO\n", None),
    ],
)
def test_other_dividers_line_ends_and_blank_lines(tmp_path: Path, content: str, delimiter: str | None) -> None:
    rows = read(tmp_path / "a.txt", content, delimiter)
    assert lists(rows, "tokens") == [["a  b", "c"], ["d"]]
    assert lists(rows, "tags") == [["O", "B-X"], ["O"]]


def test_universal_dependencies_have_names_for_their_columns(tmp_path: Path) -> None:
    rows = read(tmp_path / "a.conllu", UNIVERSAL)
    assert lists(rows, "tokens") == [["vamos", "nos", "New York"]]
    assert lists(rows, "upos") == [["VERB", "PRON", "PROPN"]]
    assert rows.at(0).endswith("a.conllu line 4")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["a.txt has no words"]),
        ("\n -DOCSTART- O\n\n", ["a.txt has no words"]),
        ("EU\nrejects\n", ["line 1 has one column (EU)", "dataset.delimiter="]),
        ("EU,B-ORG\n", ["line 1 has one column (EU,B-ORG)", "dataset.delimiter="]),
        ("EU x B-ORG\nrejects O\n", ["line 2 has 2 columns (rejects O) and not 3", "tokens, 1, tags"]),
        ("EU O\n\nNew York O\n", ["line 3 has 3 columns (New York O) and not 2", "tokens, tags"]),
        ("EU\tO\nrejects\t\n", ["line 2 has nothing in column tags"]),
        ("EU\tO\n\tO\n", ["line 2 has nothing in column tokens"]),
    ],
)
def test_a_line_that_is_no_word_with_its_tags_is_named(tmp_path: Path, content: str, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r".") as refused:
        read(tmp_path / "a.txt", content)
    message = str(refused.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_one_file_is_read_as_two_kinds_of_table(tmp_path: Path) -> None:
    content: Any = "tokens\ttags\nEU\tO\n"
    as_words = read(tmp_path / "a.tsv", content)
    assert lists(as_words, "tokens") == [["tokens", "EU"]]
    assert lists(read_files((tmp_path / "a.tsv",)), "tokens") == ["EU"]
