import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipetransformer.data.base import Data, Split, TextFormat
from pipetransformer.data.text import squad
from pipetransformer.data.text.squad import Squad, from_rows, read_articles
from pipetransformer.data.text.squad_split import SquadSplit


def content(num_articles: int, first: int = 0, answered: bool = True) -> str:
    articles = []
    for number in range(first, first + num_articles):
        context = f"it is {number} of it"
        answers = [{"text": str(number), "answer_start": 6}] if answered else []
        qas = [{"id": f"{number}{letter}", "question": "it?", "answers": answers} for letter in "ab"]
        articles.append({"title": str(number), "paragraphs": [{"context": context, "qas": qas}]})
    return json.dumps({"data": articles})


def contexts(split: Split) -> list[str]:
    assert isinstance(split, SquadSplit)
    return [question.context for question in split.questions]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "squad.json").write_text(content(10))
    return tmp_path / "squad.json"


def load(text: TextFormat, **options: Any) -> Data:
    small: dict[str, Any] = {"max_length": 64, "stride": 16}
    spec = Squad(**small | options)
    spec.check()
    return spec.load(text)


def test_a_single_file_is_split_by_article_from_its_end(file: Path, text: TextFormat) -> None:
    data = load(text, path=str(file))
    assert (data.task.name, data.task.head.num_outputs, data.input_shape) == ("question_answering", 2, ())
    assert contexts(data.train) == [f"it is {number} of it" for number in range(8) for _ in "ab"]
    assert contexts(data.evaluation[0]) == [f"it is {number} of it" for number in (8, 9) for _ in "ab"]
    assert data.evaluation[0].name == "held_out_articles"


def test_a_byte_order_mark_is_none_of_the_json(tmp_path: Path, file: Path) -> None:
    marked = tmp_path / "marked.json"
    marked.write_text(content(10), encoding="utf-8-sig")
    assert read_articles(marked) == read_articles(file)


@given(st.integers(2, 10), st.floats(0.01, 0.99))
def test_no_article_is_on_both_sides(tmp_path_factory: pytest.TempPathFactory, count: int, fraction: float) -> None:
    file = tmp_path_factory.mktemp("squad") / "squad.json"
    file.write_text(content(count))
    train, _, evaluation = Squad(path=str(file), eval_fraction=fraction)._questions()
    assert {question.context for question in train}.isdisjoint(question.context for question in evaluation)
    assert len(train) + len(evaluation) == 2 * count
    assert len(evaluation) > 0


def test_a_folder_brings_its_own_evaluation(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "train-v1.1.json").write_text(content(3))
    (tmp_path / "dev-v1.1.json").write_text(content(2, first=3))
    data = load(text, path=str(tmp_path))
    assert (len(data.train), len(data.evaluation[0]), data.evaluation[0].name) == (6, 4, "dev")


@pytest.mark.parametrize(
    ("files", "message"), [(["dev.json"], r"0 files train\*\.json"), (["train.json", "train-2.json"], "2 files")]
)
def test_a_folder_with_other_files_is_refused_at_once(tmp_path: Path, files: list[str], message: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message):
        Squad(path=str(tmp_path)).check()


def test_limits_count_questions(file: Path, text: TextFormat) -> None:
    data = load(text, path=str(file), max_length=16, stride=3, max_train_samples=5, max_eval_samples=1)
    assert (len(contexts(data.train)), len(contexts(data.evaluation[0]))) == (5, 1)


def test_unanswered_questions_need_version_2(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "train.json").write_text(content(2))
    (tmp_path / "dev.json").write_text(content(2, answered=False))
    with pytest.raises(ValueError, match=r"4 questions of the dev split .* is 0a; set dataset\.version_2=true"):
        load(text, path=str(tmp_path))
    assert load(text, path=str(tmp_path), version_2=True).evaluation[0].targets([0])[:, :2].tolist() == [[0, 0]]


@pytest.mark.parametrize("blank", ["", " "])
def test_a_blank_answer_is_none(tmp_path: Path, text: TextFormat, blank: str) -> None:
    asked = question("a", (blank, 3)), question("b", ("cat", 4), (blank, 0))
    file = write(tmp_path, *[article(*asked)] * 5)
    assert [each.answers for each in read_articles(file)[0]] == [(), ("cat",)]
    row = {"id": "a", "question": "a?", "context": CONTEXT, "answers": {"text": [blank], "answer_start": [3]}}
    assert (from_rows([row])[0].answers, from_rows([row])[0].starts) == ((), ())
    with pytest.raises(ValueError, match=r"4 questions of the train split have no answer, the first is a; set dataset"):
        load(text, path=str(file))
    assert len(load(text, path=str(file), version_2=True).train) == 8


def test_a_file_of_one_article_cannot_be_split(tmp_path: Path, text: TextFormat) -> None:
    (tmp_path / "one.json").write_text(content(1))
    with pytest.raises(
        ValueError, match=r"train split has no questions; check dataset\.path and dataset\.eval_fraction"
    ):
        load(text, path=str(tmp_path / "one.json"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 7}, r"dataset\.max_length=7 is too short"),
        ({"stride": -1}, r"dataset\.stride=-1 must be from 0 to below dataset\.max_length=384"),
        ({"stride": 384}, r"dataset\.stride=384"),
        ({"max_answer_length": 0}, r"dataset\.max_answer_length=0 allows no answer"),
        ({"eval_fraction": 0.0}, r"dataset\.eval_fraction=0\.0 must lie between 0 and 1"),
        ({"eval_fraction": 1.0}, r"dataset\.eval_fraction=1\.0"),
    ],
)
def test_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Squad(**options).check()


@pytest.mark.parametrize(("version_2", "name"), [(False, "rajpurkar/squad"), (True, "rajpurkar/squad_v2")])
def test_the_hub_is_asked_for_the_version(
    text: TextFormat, monkeypatch: pytest.MonkeyPatch, version_2: bool, name: str
) -> None:
    asked = []

    def load_hub(*question: str) -> datasets.Dataset:
        asked.append(question[:2])
        answers = [{"text": ["is"], "answer_start": [3]}]
        return datasets.Dataset.from_dict({"id": ["a"], "question": ["it?"], "context": ["it is"], "answers": answers})

    monkeypatch.setattr(squad, "load_hub", load_hub)
    data = load(text, version_2=version_2)
    assert asked == [(name, "train"), (name, "validation")]
    assert data.evaluation[0].name == "validation"


def test_real_questions_are_split_by_article_and_their_answers_found(shared_data: Path, text: TextFormat) -> None:
    path = str(shared_data / "xquad" / "xquad.en.json")
    options = {"path": path, "max_length": 512, "stride": 192, "max_answer_length": 190}
    data = load(text, **options, max_train_samples=100)
    split = data.evaluation[0]
    assert isinstance(split, SquadSplit)
    whole = Squad(path=path)._questions()
    assert (len(whole[0]) + len(whole[2]), len(split.questions)) == (1190, len(whole[2]))
    assert {*contexts(split)}.isdisjoint(question.context for question in whole[0])
    spans = split.targets(range(len(split)))[:, :2].numpy()
    perfect = np.concatenate([spans, np.ones((len(split), 1))], axis=1)[:, None]
    assert split.score(perfect) == {"f1": 1.0, "exact_match": 1.0}
    assert split.score(np.zeros_like(perfect)) == {"f1": 0.0, "exact_match": 0.0}


CONTEXT = "The cat sat on the mat."


def article(*questions: dict[str, Any]) -> dict[str, Any]:
    return {"title": "t", "paragraphs": [{"context": CONTEXT, "qas": [*questions]}]}


def question(name: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    given = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"{name}?", "answers": given, **more}


def write(folder: Path, *articles: dict[str, Any]) -> Path:
    file = folder / "file.json"
    file.write_text(json.dumps({"version": "1.1", "data": [*articles]}))
    return file


def test_questions_are_read_by_article(tmp_path: Path) -> None:
    first = article(question("a", ("cat", 4), ("The cat", 0)), question("b", ("mat", 19)))
    articles = read_articles(write(tmp_path, first, article(question("c", ("sat", 8)))))
    assert [[each.id for each in questions] for questions in articles] == [["a", "b"], ["c"]]
    assert (articles[0][0].text, articles[0][0].context) == ("a?", CONTEXT)
    assert (articles[0][0].answers, articles[0][0].starts) == (("cat", "The cat"), (4, 0))


def test_plausible_answers_are_no_answers(tmp_path: Path) -> None:
    marked = question("a", is_impossible=True, plausible_answers=[{"text": "cat", "answer_start": 4}])
    assert read_articles(write(tmp_path, article(marked)))[0][0].answers == ()


@pytest.mark.parametrize("answer", [("cat", 3), ("mat", -4), ("cat", 100)])
def test_answers_that_are_not_in_their_context_are_counted_and_named(tmp_path: Path, answer: tuple[str, int]) -> None:
    wrong = article(question("good", ("cat", 4)), question("bad", answer), question("worse", ("dog", 4)))
    with pytest.raises(ValueError, match=r"2 answers do not stand in their context .* of question bad"):
        read_articles(write(tmp_path, wrong))


@pytest.mark.parametrize("content", ["hello", "[]", '{"data": [{}]}', '{"version": 1}', '{"data": 3}'])
def test_a_file_of_another_format_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ValueError, match=r"file\.json is not in SQuAD format"):
        read_articles(tmp_path / "file.json")


def test_rows_of_the_hub_are_read() -> None:
    row = {"id": "a", "question": "a?", "context": CONTEXT, "answers": {"text": ["cat"], "answer_start": [4]}}
    (found,) = from_rows([row])
    assert (found.answers, found.starts) == (("cat",), (4,))
    with pytest.raises(ValueError, match="1 answers do not stand"):
        from_rows([row | {"answers": {"text": ["cat"], "answer_start": [5]}}])


def test_the_launcher_refuses_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    wrong = write(tmp_path, *[article(question("bad", ("cat", 3)))] * 5)
    with pytest.raises(ValueError, match="do not stand in their context"):
        Squad(path=str(wrong)).preflight()
    alone = write(tmp_path, article(question("a", ("cat", 4))))
    with pytest.raises(ValueError, match="the train split has no questions"):
        Squad(path=str(alone)).preflight()
    assert Squad(path=str(write(tmp_path, *[article(question("a", ("cat", 4)))] * 5))).preflight() is None
