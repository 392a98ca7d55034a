"""Extractive question answering: SQuAD 1.1 and 2.0 from the hub, or any file of their format."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pipetransformer.data.base import Data, DatasetSpec, ImageFormat, TextFormat, subsample
from pipetransformer.data.hub import find_on_hub, load_hub
from pipetransformer.data.tables.published import text_columns
from pipetransformer.data.tasks import question_answering
from pipetransformer.data.text.kept import kept
from pipetransformer.data.text.split import MIN_LENGTH, beyond_the_model, check_tokens
from pipetransformer.data.text.squad_split import AnsweredSplit, SquadSplit
from pipetransformer.data.text.squad_windows import Question, tokenize_windows
from pipetransformer.data.unlabelled import Unlabelled, read_table
from pipetransformer.errors import UserError
from pipetransformer.models.base import Head

SQUAD_FILES = "a SQuAD-format JSON file, or a folder with one train*.json and one dev*.json"
FILE_PATTERNS = ("train*.json", "dev*.json")


@dataclass(frozen=True, kw_only=True)
class Squad(DatasetSpec):
    """SQuAD or data of its format.

    A single file is split by article, so that evaluation never asks about a paragraph of the training data. The
    limits on samples count questions.

    Attributes:
        version_2: Some questions have no answer (SQuAD 2.0).
        max_length: Tokens of a window at most, question and special tokens included.
        stride: Tokens of the context that neighbouring windows share.
        max_answer_length: Tokens of an answer at most.
        eval_fraction: Share of the articles of a single file to evaluate on, the last ones.
    """

    version_2: bool = False
    max_length: int = 384
    stride: int = 128
    max_answer_length: int = 30
    eval_fraction: float = 0.2

    modality: ClassVar[str] = "text"
    libraries: ClassVar[tuple[str, ...]] = ("torchmetrics.functional.text",)

    def check(self) -> None:
        super().check()
        if self.max_length < MIN_LENGTH:
            raise UserError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if not 0 <= self.stride < self.max_length:
            raise UserError(
                f"dataset.stride={self.stride} must be from 0 to below dataset.max_length={self.max_length}"
            )
        if self.max_answer_length < 1:
            raise UserError(f"dataset.max_answer_length={self.max_answer_length} allows no answer; give 1 or more")
        if not 0 < self.eval_fraction < 1:
            raise UserError(f"dataset.eval_fraction={self.eval_fraction} must lie between 0 and 1")
        if self.path is not None and Path(self.path).is_dir():
            for pattern in FILE_PATTERNS:
                self._file(pattern)

    @property
    def _hub_name(self) -> str:
        return "rajpurkar/squad_v2" if self.version_2 else "rajpurkar/squad"

    def preflight(self) -> int | None:
        if self.path is None:
            find_on_hub(self._hub_name, SQUAD_FILES)
            return None
        train, name, evaluation = self._questions()
        for split, questions in (("train", train), (name, evaluation)):
            self._check_questions(split, questions)
        return None  # a long context becomes several samples

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        train, name, evaluation = self._questions()
        return Data(
            train=self._split("train", train, wanted, self.max_train_samples),
            evaluation=(self._split(name, evaluation, wanted, self.max_eval_samples),),
            task=question_answering(),
            warnings=beyond_the_model(self.max_length, wanted),
        )

    def unlabelled(self, source: Path, wanted: ImageFormat | TextFormat, head: Head) -> Unlabelled:
        assert isinstance(wanted, TextFormat)
        questions = _without_answers(source)
        windows = tokenize_windows(questions, wanted.tokenizer, min(self.max_length, wanted.max_length), self.stride)
        check_tokens(windows.tokens, wanted, lambda window: f"question {questions[windows.questions[window]].id}")
        split = SquadSplit("input", questions, windows, self.max_answer_length, self.version_2)
        return Unlabelled(AnsweredSplit(split), split.task)

    def _questions(self) -> tuple[list[Question], str, list[Question]]:
        if self.path is None:
            train, evaluation = (
                from_rows(load_hub(self._hub_name, name, SQUAD_FILES)) for name in ("train", "validation")
            )
            return train, "validation", evaluation
        if Path(self.path).is_dir():
            train, evaluation = (_flat(read_articles(self._file(name))) for name in FILE_PATTERNS)
            return train, "dev", evaluation
        articles = read_articles(Path(self.path))
        num_train = len(articles) - max(1, round(self.eval_fraction * len(articles)))
        return _flat(articles[:num_train]), "held_out_articles", _flat(articles[num_train:])

    def _file(self, pattern: str) -> Path:
        found = sorted(Path(str(self.path)).glob(pattern))
        if len(found) != 1:
            raise UserError(f"dataset.path={self.path} has {len(found)} files {pattern}; give {SQUAD_FILES}")
        return found[0]

    def _check_questions(self, name: str, questions: list[Question]) -> None:
        if not questions:
            raise UserError(f"the {name} split has no questions; check dataset.path and dataset.eval_fraction")
        unanswerable = [question.id for question in questions if not question.answers]
        if unanswerable and not self.version_2:
            raise UserError(
                f"{len(unanswerable)} questions of the {name} split have no answer, the first is {unanswerable[0]}; "
                "set dataset.version_2=true"
            )

    def _split(self, name: str, questions: list[Question], wanted: TextFormat, at_most: int | None) -> SquadSplit:
        self._check_questions(name, questions)
        chosen = [questions[row] for row in subsample(len(questions), at_most)]
        max_length = min(self.max_length, wanted.max_length)
        windows = kept(tokenize_windows, lambda: chosen, wanted.tokenizer, max_length, self.stride)
        check_tokens(windows.tokens, wanted, lambda window: f"question {chosen[windows.questions[window]].id}")
        return SquadSplit(name, chosen, windows, self.max_answer_length, self.version_2)


def _without_answers(source: Path) -> list[Question]:
    """Reads questions and contexts, in SQuAD's format or as a table, without answers.

    Raises:
        UserError: There are none, or they cannot be read.
    """
    if source.suffix.lower() == ".json":
        questions = _flat(read_articles(source, with_answers=False))
    else:
        table = read_table(source, None)
        texts, contexts = text_columns(table, [("question", "context")])
        ids = [str(each) for each in table.columns.get("id", range(len(table)))]
        questions = [Question(*each, (), ()) for each in zip(ids, texts, contexts, strict=True)]
    if not questions:
        raise UserError(f"input={source} has no questions")
    return questions


def _flat(articles: list[list[Question]]) -> list[Question]:
    return [question for article in articles for question in article]


def read_articles(file: Path, with_answers: bool = True) -> list[list[Question]]:
    """Reads the questions of each article.

    Args:
        with_answers: Of the questions; without, they need not be there.

    Raises:
        UserError: The file is not in SQuAD format, or an answer is not in its context.
    """
    try:
        articles = [
            list(_questions(article, with_answers))
            for article in json.loads(file.read_text(encoding="utf-8-sig"))["data"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError, OSError) as error:
        raise UserError(f"{file} is not in SQuAD format ({type(error).__name__}: {error})") from error
    check_answers(question for article in articles for question in article)
    return articles


def from_rows(rows: Iterable[Any]) -> list[Question]:
    """Returns the questions of the hub's rows."""
    questions = [
        Question(
            row["id"],
            row["question"],
            row["context"],
            *_without_blanks(zip(row["answers"]["text"], row["answers"]["answer_start"], strict=True)),
        )
        for row in rows
    ]
    check_answers(questions)
    return questions


def _without_blanks(answers: Iterable[tuple[str, int]]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Returns texts and starts of the answers that are not blank; a blank one is how some files say that none is."""
    given = [(text, start) for text, start in answers if text.strip()]
    return tuple(text for text, _ in given), tuple(start for _, start in given)


def check_answers(questions: Iterable[Question]) -> None:
    """Raises UserError when an answer does not stand in its context where it is said to."""
    wrong = [
        question.id
        for question in questions
        for answer, start in zip(question.answers, question.starts, strict=True)
        if start < 0 or question.context[start : start + len(answer)] != answer
    ]
    if wrong:
        raise UserError(
            f"{len(wrong)} answers do not stand in their context at answer_start, the first is of question {wrong[0]}; "
            "correct answer_start (characters from 0) or the text"
        )


def _questions(article: dict[str, Any], with_answers: bool) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            answers = question["answers"] if with_answers else ()  # none where the question is impossible
            yield Question(
                _text(str(question["id"])),
                _text(question["question"]),
                _text(paragraph["context"]),
                *_without_blanks((_text(answer["text"]), _position(answer["answer_start"])) for answer in answers),
            )


def _text(value: object) -> str:
    """Returns a text that can be encoded, which half of a surrogate pair cannot."""
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    value.encode()
    return value


def _position(value: object) -> int:
    if type(value) is not int:
        raise TypeError(f"answer_start {value!r:.40} is no whole number")
    return value
