"""Docstrings begin as PyTorch's do: functions with a verb, everything else with a noun."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.jobs import ROOT

PACKAGE = ROOT / "pipetransformer"
REFUSED = {"What", "Of", "Those", "Has", "Lets", "Whether", "With"}
TO_DO: set[str] = set()
ROOMS = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists() or path.suffix == ".py")


def offenders(path: Path) -> Iterator[str]:
    """Yields the place and the first line of each docstring that begins with a refused word."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            text = _text(node)
            if text and text.split()[0].strip(",.:;") in REFUSED:
                yield f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def _text(node: ast.AST) -> str | None:
    """Returns a string that stands alone: a docstring, or the description below an attribute."""
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return node.value.value if is_text and isinstance(node.value.value, str) else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_begin_with_a_verb_or_a_noun(room: str) -> None:
    found = list(offenders(PACKAGE / room))
    if room in TO_DO:
        assert found, f"{room} is clean: take it off the list"
    else:
        assert not found, "\n".join(found)


def test_the_list_of_rooms_to_do_names_rooms() -> None:
    assert set(ROOMS) >= TO_DO
