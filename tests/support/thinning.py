"""Which rows of a test every run of the suite does, and which only a thorough one, because others guard the same."""

import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest

MARKERS = (
    "thorough: only a thorough run does it; its docstring or a comment says what guards the same in every run",
    "thinned(*which): of its rows every run does as many as this number, each value of each parameter first; or those"
    " whose ids contain one of these words; without an argument as few as have each value once",
)


def add_option(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_const", const="1/1", default="0/1", help="does all rows of all tests")
    parser.addoption(
        "--thorough-part",
        dest="thorough",
        metavar="I/N",
        help="does, of what only --thorough does, the I-th of N parts",
    )


def thin(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only a thorough run does, but never what is named on the command line."""
    part, num_parts = map(int, config.getoption("thorough").split("/"))
    if part == num_parts == 1:
        return
    named = [word for word in config.args if "::" in word]
    left_out = [
        item
        for item in _further(items)
        if not (part and zlib.crc32(item.nodeid.encode()) % num_parts == part % num_parts)
        and not any(item.nodeid.endswith(word.removeprefix("./")) for word in named)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = {id(item) for item in left_out}
        items[:] = [item for item in items if id(item) not in gone]


def _further(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """What a run that is not thorough leaves out."""
    further, by_test = [], defaultdict(list)
    for item in items:
        if item.get_closest_marker("thorough"):
            further.append(item)
        elif item.get_closest_marker("thinned"):
            by_test[item.nodeid.partition("[")[0]].append(item)
    for rows in by_test.values():
        kept = _kept(rows)
        further += [row for i, row in enumerate(rows) if i not in kept]
    return further


def _kept(rows: Sequence[pytest.Item]) -> set[int]:
    marker = rows[0].get_closest_marker("thinned")
    assert marker is not None
    words = [word for word in marker.args if isinstance(word, str)]
    if not words:
        return set(covering([row.callspec.params for row in rows], *marker.args))  # type: ignore[attr-defined]
    unknown = [word for word in words if not any(word in row.name for row in rows)]
    if unknown and not any("[" in word for word in rows[0].config.args):  # else only rows that are named are collected
        raise pytest.UsageError(f"{rows[0].nodeid.partition('[')[0]} has no row of {unknown}")
    return {i for i, row in enumerate(rows) if any(word in row.name for word in words)}


def covering(rows: Sequence[Mapping[str, object]], most: int | None = None) -> list[int]:
    """Indices of rows that together have each value of each parameter, greedily and always the same ones.

    Args:
        rows: The parameters of each row.
        most: How many rows may be taken.
    """
    values = [{(name, repr(value)) for name, value in row.items()} for row in rows]
    missing, chosen = set[tuple[str, str]]().union(*values), list[int]()
    while missing and (most is None or len(chosen) < most):
        best = max(range(len(rows)), key=lambda i: len(missing & values[i]))  # the first of equals
        chosen.append(best)
        missing -= values[best]
    return chosen
