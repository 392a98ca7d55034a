import json
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.data.squad_file import from_rows, read_articles

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
