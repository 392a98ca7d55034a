import json
from pathlib import Path
from typing import Any

import pytest

from pipetransformer.report.trace import Event, write_trace

EVENTS = [
    Event("F0", 0.0, 0.25, 0, "forward"),
    Event("send F0", 0.25, 0.5, 0, "transfer"),
    Event("F0", 0.75, 0.25, 3, "forward"),
]


def written(folder: Path) -> list[dict[str, Any]]:
    file = write_trace(EVENTS, folder, 2)
    assert file == folder / "trace_2.json"
    return json.loads(file.read_text())["traceEvents"]


def test_spans_are_in_microseconds_on_their_device(tmp_path: Path) -> None:
    spans = [row for row in written(tmp_path) if row["ph"] == "X"]
    assert [(row["name"], row["pid"], row["ts"], row["dur"]) for row in spans] == [
        ("F0", 0, 0, 250_000),
        ("send F0", 0, 250_000, 500_000),
        ("F0", 3, 750_000, 250_000),
    ]


def test_communication_has_a_row_of_its_own(tmp_path: Path) -> None:
    rows = written(tmp_path)
    names = {(row["pid"], row["tid"]): row["args"]["name"] for row in rows if row["name"] == "thread_name"}
    assert [names[row["pid"], row["tid"]] for row in rows if row["ph"] == "X"] == [
        "compute",
        "communication",
        "compute",
    ]


def test_devices_are_named_once(tmp_path: Path) -> None:
    names = [row["args"]["name"] for row in written(tmp_path) if row["name"] == "process_name"]
    assert names == ["device 0", "device 3"]


def test_an_unknown_category_is_refused() -> None:
    with pytest.raises(AssertionError):
        Event("F0", 0.0, 1.0, 0, "lunch")
