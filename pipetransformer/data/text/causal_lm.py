"""Documents to go on with the training of a language model, and prompts with the completions that it is to give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from pipetransformer.data.base import Data, ImageFormat, TextFormat
from pipetransformer.data.tables.spec import TableSpec
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import MIN_LENGTH, beyond_the_model, check_embedded
from pipetransformer.data.token_tasks import causal_language_modelling
from pipetransformer.errors import UserError

if TYPE_CHECKING:
    from pipetransformer.data.tables.files import Formats
    from pipetransformer.data.tables.rows import Rows
    from pipetransformer.data.text.document_split import Documents, DocumentSplit, Texts

SAMPLE_BY = ("line", "paragraph", "document")
LONG = ("truncate", "split")


@dataclass(frozen=True, kw_only=True)
class CausalLM(TableSpec):
    """Texts for a model that predicts each token from those before it, each with the token that ends a text.

    The limits on samples count documents. A document of which nothing would be learned, as one that is empty or whose
    prompt alone has ``max_length`` tokens, is left out; the run says how many are.

    Attributes:
        text: Column of the documents; of ``.txt`` files the only one is called so.
        prompt: Column of prompts, whose tokens take no part in the loss, for ``completion``.
        completion: Column of what follows them.
        separator: Stands between prompt and completion, as a part of the prompt.
        sample_by: In a ``.txt`` file a document is a ``line``, a ``paragraph`` that ends with a blank line, or the
            whole file, a ``document``.
        long: ``truncate`` keeps the first ``max_length`` tokens of a longer document, ``split`` makes several samples
            of it. The first token of each sample follows nothing and is not learned.
        max_length: Tokens of a sample at most, that which ends a text included.
        pack: Training puts several documents into a row of ``max_length`` tokens, each with positions of its own and
            unseen by the others. ``batch_size`` still counts documents. Dropout draws by row.
    """

    text: str = "text"
    prompt: str | None = None
    completion: str | None = None
    separator: str = ""
    sample_by: str = "line"
    long: str = "truncate"
    max_length: int = 512
    pack: bool = False

    modality: ClassVar[str] = "text"

    @property
    def formats(self) -> Formats:
        from pipetransformer.data.tables.files import FORMATS
        from pipetransformer.data.text.document_files import TextFile

        return {**FORMATS, ".txt": partial(TextFile, sample_by=self.sample_by)}

    def check(self) -> None:
        super().check()
        for option, choices in (("sample_by", SAMPLE_BY), ("long", LONG)):
            if getattr(self, option) not in choices:
                raise UserError(
                    f"dataset.{option}={getattr(self, option)} is unknown; choose one of {', '.join(choices)}"
                )
        if self.max_length < MIN_LENGTH:
            raise UserError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if (self.prompt is None) != (self.completion is None):
            given, other = ("prompt", "completion") if self.completion is None else ("completion", "prompt")
            raise UserError(f"dataset.{given}={getattr(self, given)} needs dataset.{other}=, the column beside it")
        if self.prompt is None and self.separator:
            raise UserError(f"dataset.separator={self.separator!r} stands between dataset.prompt= and its completion")
        if self.prompt is not None:
            self._check_prompt()

    def _check_prompt(self) -> None:
        if self.text != "text":
            raise UserError(f"dataset.text={self.text} and dataset.prompt={self.prompt} are both given; drop one")
        if self.prompt == self.completion:
            raise UserError(f"dataset.prompt= and dataset.completion= are both {self.prompt}; name two columns")
        if self.long == "split":
            raise UserError(
                "dataset.long=split would make samples of completions without their prompt; drop it, or raise "
                "dataset.max_length="
            )

    @property
    def _columns(self) -> dict[str, str]:
        """The columns of texts by the option that names them, in their order."""
        if self.prompt is None or self.completion is None:
            return {"dataset.text": self.text}
        return {"dataset.prompt": self.prompt, "dataset.completion": self.completion}

    def preflight(self) -> int | None:
        self.find()
        if self.path is None:
            return None
        tables = self.tables()
        for rows in (tables.train, tables.evaluation):
            for _ in self._texts(rows):
                pass
        return None  # a long document becomes several samples, one without tokens none

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        tables = self.tables()
        train, of_train = self._split("train", tables.train, wanted)
        evaluation, of_evaluation = self._split(tables.eval_name, tables.evaluation, wanted)
        if self.pack:
            train.row_length = min(self.max_length, wanted.max_length)
        warnings = *tables.warnings, *beyond_the_model(self.max_length, wanted), *of_train, *of_evaluation
        return Data(train, (evaluation,), train.task, warnings=warnings)

    def _split(self, name: str, rows: Rows, wanted: TextFormat) -> tuple[DocumentSplit, list[str]]:
        """Returns a split, and what is to be said of documents that were cut or left out."""
        from pipetransformer.data.text.document_split import DocumentSplit, tokenize_documents

        max_length = min(self.max_length, wanted.max_length)
        splits = self.long == "split"
        documents = kept(tokenize_documents, lambda: self._texts(rows), wanted.tokenizer, max_length, splits)
        check_embedded(documents.tokens, wanted)
        left_out = _left_out(name, documents, rows)
        if len(documents.first) == 0:
            raise UserError(left_out)
        remedies = ["raise dataset.max_length="] * (self.max_length <= wanted.max_length)
        remedies += ["give dataset.long=split"] * (self.prompt is None)
        cut = (
            f"{documents.num_cut} documents of the {name} split have more than {max_length} tokens and are cut off "
            f"there; {' or '.join(remedies) or 'give shorter ones'}"
        )
        split = DocumentSplit(name, documents, causal_language_modelling(wanted.vocab_size))
        return split, [cut] * bool(documents.num_cut) + [left_out] * bool(documents.unlearned)

    def _texts(self, rows: Rows) -> Iterator[Texts]:
        """Yields prompts and completions batch by batch; the prompts of documents are empty.

        Raises:
            UserError: A column is missing or has no texts, or a row has none.
        """
        for option, column in self._columns.items():
            rows.require(option, column)
            kind = rows.features.arrow_schema.field(column).type
            if str(kind) not in ("string", "large_string"):
                raise UserError(f"{option}={column}: {rows.name} has {kind} in it; name a column of texts")
        for first, table in rows.batches([*self._columns.values()]):
            texts = [_filled(rows, first, column, table[column].to_pylist()) for column in self._columns.values()]
            prompts = [prompt + self.separator for prompt in texts[0]] if len(texts) == 2 else [""] * len(texts[0])
            yield prompts, texts[-1]


def _filled(rows: Rows, first: int, column: str, cells: list[str | None]) -> list[str]:
    """Returns the cells of a batch, whose first row is ``first``."""
    if None in cells:
        place = rows.at(first + cells.index(None))
        raise UserError(f"{place} has no {column}; write a text there or remove the row")
    return [cell for cell in cells if cell is not None]


def _left_out(name: str, documents: Documents, rows: Rows) -> str:
    if not documents.unlearned:
        return ""
    return (
        f"{len(documents.unlearned)} documents of the {name} split are left out, because they have no token to learn: "
        "they are empty, or their prompt alone is as long as dataset.max_length=; the first is "
        f"{rows.at(documents.unlearned[0])}"
    )
