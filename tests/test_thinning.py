"""Which rows of the suite a run does."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.thinning import covering

SUITE = """
import pytest

@pytest.mark.thinned
@pytest.mark.parametrize("kind", ["a", "b", "c"])
@pytest.mark.parametrize("size", [1, 2])
def test_each_value(kind, size): pass

@pytest.mark.thinned(2)
@pytest.mark.parametrize("row", [1, 2, 3, 4])
def test_two(row): pass

@pytest.mark.thinned("bert")
@pytest.mark.parametrize("row", ["bert", "bert with adapters", "vit"])
def test_named(row): pass

@pytest.mark.thorough
def test_further(): pass

@pytest.mark.parametrize("row", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_a_row(row): pass
"""
FEW = {
    "each_value[1-a]", "each_value[2-b]", "each_value[1-c]", "two[1]", "two[2]", "named[bert]",
    "named[bert with adapters]", "a_row[1]",
}  # fmt: skip
FURTHER = {
    "each_value[2-a]", "each_value[1-b]", "each_value[2-c]", "two[3]", "two[4]", "named[vit]", "further", "a_row[2]",
}  # fmt: skip


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text("from support.thinning import *\npytest_addoption = add_option\n"
        "def pytest_collection_modifyitems(config, items): thin(config, items)\n")  # fmt: skip
    (tmp_path / "test_rows.py").write_text(SUITE)
    return tmp_path


def ran(suite: Path, *words: str) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-o", "addopts=", *words]
    support = f"pythonpath={Path(__file__).parent}"
    done = subprocess.run([*command, "-o", support], cwd=suite, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        line.partition("::test_")[2].partition(" PASSED")[0] for line in done.stdout.splitlines() if "PASSED" in line
    }


def test_a_run_does_what_guards_everything_once(suite: Path) -> None:
    assert ran(suite) == FEW


def test_a_thorough_run_does_everything(suite: Path) -> None:
    assert ran(suite, "--thorough") == FEW | FURTHER


def test_parts_of_a_thorough_run_make_the_whole_and_do_no_further_row_twice(suite: Path) -> None:
    parts = [ran(suite, "--thorough-part", f"{part}/3") for part in (1, 2, 3)]
    assert set().union(*parts) == FEW | FURTHER
    assert sum(len(part - FEW) for part in parts) == len(FURTHER)


def test_what_is_named_is_run(suite: Path) -> None:
    named = "two[4]", "named[vit]", "further"
    assert ran(suite, *(f"test_rows.py::test_{name}" for name in named)) == set(named)


def test_a_word_that_no_row_has_is_told(suite: Path) -> None:
    (suite / "test_rows.py").write_text(SUITE.replace('thinned("bert")', 'thinned("berta")'))
    with pytest.raises(AssertionError, match=r"test_rows.py::test_named has no row of \['berta'\]"):
        ran(suite)


def test_covering_rows_have_each_value_and_no_more_than_allowed() -> None:
    rows = [{"a": a, "b": b} for a in range(3) for b in range(4)]
    chosen = [rows[i] for i in covering(rows)]
    assert {row["a"] for row in chosen} == {0, 1, 2}
    assert {row["b"] for row in chosen} == {0, 1, 2, 3}
    assert len(chosen) == 4
    assert len(covering(rows, 2)) == 2
