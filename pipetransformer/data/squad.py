"""Extractive question answering: SQuAD 1.1 and 2.0 from the hub, or any file of their format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pipetransformer.data.base import QUESTION_ANSWERING, Data, DatasetSpec, ImageFormat, TextFormat
from pipetransformer.data.hub import load_hub
from pipetransformer.data.squad_file import SQUAD_FILES, Question, from_rows, read_articles
from pipetransformer.data.squad_split import SquadSplit
from pipetransformer.data.subset import choose
from pipetransformer.data.text import MIN_LENGTH
from pipetransformer.data.windows import cut

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

    def check(self) -> None:
        super().check()
        if self.max_length < MIN_LENGTH:
            raise ValueError(f"dataset.max_length={self.max_length} is too short for a text; give {MIN_LENGTH} or more")
        if not 0 <= self.stride < self.max_length:
            raise ValueError(
                f"dataset.stride={self.stride} must be from 0 to below dataset.max_length={self.max_length}"
            )
        if self.max_answer_length < 1:
            raise ValueError(f"dataset.max_answer_length={self.max_answer_length} allows no answer; give 1 or more")
        if not 0 < self.eval_fraction < 1:
            raise ValueError(f"dataset.eval_fraction={self.eval_fraction} must lie between 0 and 1")
        if self.path is not None and Path(self.path).is_dir():
            for pattern in FILE_PATTERNS:
                self._file(pattern)

    def load(self, wanted: ImageFormat | TextFormat) -> Data:
        assert isinstance(wanted, TextFormat)
        train, name, evaluation = self._questions()
        return Data(
            train=self._split("train", train, wanted, self.max_train_samples),
            evaluation=(self._split(name, evaluation, wanted, self.max_eval_samples),),
            task=QUESTION_ANSWERING,
            num_outputs=2,
        )

    def _questions(self) -> tuple[list[Question], str, list[Question]]:
        if self.path is None:
            hub_name = "rajpurkar/squad_v2" if self.version_2 else "rajpurkar/squad"
            train, evaluation = (from_rows(load_hub(hub_name, name, SQUAD_FILES)) for name in ("train", "validation"))
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
            raise ValueError(f"dataset.path={self.path} has {len(found)} files {pattern}; give {SQUAD_FILES}")
        return found[0]

    def _split(self, name: str, questions: list[Question], wanted: TextFormat, at_most: int | None) -> SquadSplit:
        if not questions:
            raise ValueError(f"the {name} split has no questions; check dataset.path and dataset.eval_fraction")
        unanswerable = [question.id for question in questions if not question.answers]
        if unanswerable and not self.version_2:
            raise ValueError(
                f"{len(unanswerable)} questions of the {name} split have no answer, the first is {unanswerable[0]}; "
                "set dataset.version_2=true"
            )
        chosen = [questions[row] for row in choose(len(questions), at_most)]
        windows = cut(chosen, wanted.tokenizer, min(self.max_length, wanted.max_length), self.stride)
        return SquadSplit(name, chosen, windows, self.max_answer_length, self.version_2)


def _flat(articles: list[list[Question]]) -> list[Question]:
    return [question for article in articles for question in article]
