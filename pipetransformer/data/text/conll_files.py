"""Files in the format of the CoNLL tasks: sentences with a line for each word, and its tags in columns."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from pipetransformer.data.tables.base import Record, RecordFile, shown, text_lines
from pipetransformer.data.tables.files import FORMATS, Formats
from pipetransformer.errors import UserError

DOCUMENT = "-DOCSTART-"  # begins a line between two documents
COMMENT = "# "  # begins a comment before a sentence; inside one it is a word
SPACES = re.compile(" +")
NOT_A_WORD = re.compile(r"\d+[-.]\d+")  # number of several words, or of one that is not in the text
FIRST, LAST = "tokens", "tags"
UNIVERSAL = ("id", FIRST, "lemma", "upos", "xpos", "feats", "head", "deprel", "deps", "misc")


@dataclass(frozen=True)
class Line:
    """The cells of one word."""

    number: int
    cells: list[str]


class ConllFile(RecordFile):
    """A row is a sentence, and a cell the list of what its words have in a column.

    Columns are divided by tabs, in lines that have one, else by spaces. The first is called ``tokens``, the last
    ``tags``, and those between by their number, from ``1``. Blank lines and ``-DOCSTART-`` lines end a sentence. Lines
    before its first word that begin with ``#`` and a space are comments, and one with ``#`` and a tab, as GermEval has,
    where it has less columns than the words.
    """

    def schema(self) -> pa.Schema:
        return pa.schema([(name, pa.list_(pa.string())) for name in self._names()])

    def records(self) -> Iterator[Record]:
        names = self._names()
        for lines in self._sentences():
            for line in lines:
                self._check(line, names)
            columns = zip(*(line.cells for line in lines), strict=True)
            yield lines[0].number, {name: list(cells) for name, cells in zip(names, columns, strict=True)}

    def _names(self) -> list[str]:
        """Returns the names of the columns; the first word has them all."""
        first = next(self._sentences(), None)
        if first is None:
            raise UserError(f"{self.path} has no words; give a line for each word, and a blank one after each sentence")
        count = len(first[0].cells)
        if count < 2:
            raise UserError(
                f"{self.path} line {first[0].number} has one column ({first[0].cells[0]:.40}); give a word and its "
                "tag with a space or tab between them, or name what divides them by dataset.delimiter="
            )
        return [FIRST, *map(str, range(1, count - 1)), LAST]

    def _check(self, line: Line, names: list[str]) -> None:
        if len(line.cells) != len(names):
            raise UserError(
                f"{self.path} line {line.number} has {len(line.cells)} columns ({' '.join(line.cells):.40}) and not "
                f"{len(names)}, which are {shown(names)}; complete it, or leave it blank where a sentence ends"
            )
        if "" in line.cells:
            raise UserError(
                f"{self.path} line {line.number} has nothing in column {names[line.cells.index('')]}; give each word "
                f"all of {shown(names)}"
            )

    def _sentences(self) -> Iterator[list[Line]]:
        words: list[Line] = []
        for number, line in enumerate(text_lines(self.path), 1):
            text = line.strip(" \t\r\n")
            if not words and text.startswith(COMMENT):
                continue
            if text and not text.startswith(DOCUMENT):
                words += self._words(Line(number, self._cells(line.strip("\r\n"))))
            elif words:
                yield _without_source(words)
                words = []
        if words:
            yield _without_source(words)

    def _cells(self, text: str) -> list[str]:
        delimiter = self.delimiter or ("\t" if "\t" in text else " ")
        cells = SPACES.split(text.strip(" ")) if delimiter == " " else text.split(delimiter)
        return [cell.strip(" ") for cell in cells]

    def _words(self, line: Line) -> list[Line]:
        """Returns the line if it is of a word."""
        return [line]


def _without_source(lines: list[Line]) -> list[Line]:
    """Leaves out a first line ``#`` with the source of a sentence behind a tab, which has less columns than words."""
    is_source = len(lines) > 1 and lines[0].cells[0] == "#" and len(lines[0].cells) < len(lines[1].cells)
    return lines[1:] if is_source else lines


class ConllUFile(ConllFile):
    """CoNLL-U, the format of Universal Dependencies: ten columns with names, comments, and lines of several words.

    The column of the word forms is called ``tokens``. Lines of several words (``1-2``) and of words that are not in
    the text (``1.1``) are left out.
    """

    def _names(self) -> list[str]:
        super()._names()
        return list(UNIVERSAL)

    def _words(self, line: Line) -> list[Line]:
        return [] if line.cells[0].startswith("#") or NOT_A_WORD.fullmatch(line.cells[0]) else [line]


ENDINGS = (".conll", ".bio", ".iob", ".bioes", ".tsv", ".txt")
CONLL_FORMATS: Formats = {
    **dict.fromkeys(ENDINGS, ConllFile),
    ".conllu": ConllUFile,
    **{ending: FORMATS[ending] for ending in (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")},
}
"""Files of sentences: columns, or tables with lists in their cells."""
