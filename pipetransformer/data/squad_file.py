"""Questions with their contexts and answers, from SQuAD-format JSON or the hub (Rajpurkar et al., 2016 and 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SQUAD_FILES = "a SQuAD-format JSON file, or a folder with one train*.json and one dev*.json"


@dataclass(frozen=True)
class Question:
    """One question.

    Attributes:
        id: The dataset's id.
        text: The question.
        context: The paragraph it is about.
        answers: Right answers; none when the context does not answer the question.
        starts: Where each answer starts in the context, in characters.
    """

    id: str
    text: str
    context: str
    answers: tuple[str, ...]
    starts: tuple[int, ...]


def read_articles(file: Path) -> list[list[Question]]:
    """The questions of each article.

    Raises:
        ValueError: The file is not in SQuAD format, or an answer is not in its context.
    """
    try:
        articles = [list(_questions(article)) for article in json.loads(file.read_text(encoding="utf-8"))["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file} is not in SQuAD format ({type(error).__name__}: {error})") from error
    check_answers(question for article in articles for question in article)
    return articles


def from_rows(rows: Iterable[Any]) -> list[Question]:
    """The questions of the hub's rows."""
    questions = [
        Question(
            row["id"],
            row["question"],
            row["context"],
            tuple(row["answers"]["text"]),
            tuple(row["answers"]["answer_start"]),
        )
        for row in rows
    ]
    check_answers(questions)
    return questions


def check_answers(questions: Iterable[Question]) -> None:
    """Raises ValueError when an answer does not stand in its context where it is said to."""
    wrong = [
        question.id
        for question in questions
        for answer, start in zip(question.answers, question.starts, strict=True)
        if start < 0 or question.context[start : start + len(answer)] != answer
    ]
    if wrong:
        raise ValueError(
            f"{len(wrong)} answers do not stand in their context at answer_start, the first is of question {wrong[0]}; "
            "correct answer_start (characters from 0) or the text"
        )


def _questions(article: dict[str, Any]) -> Iterator[Question]:
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            answers = question["answers"]  # none where the question is impossible
            yield Question(
                str(question["id"]),
                question["question"],
                paragraph["context"],
                tuple(answer["text"] for answer in answers),
                tuple(answer["answer_start"] for answer in answers),
            )
