"""The benchmark of input runs, gives both libraries the same pictures, and counts what it says it counts."""

import json
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from support.experiments import printed_by_command, printed_in_pool
from support.input_runs import with_children
from support.pool import Pool

from experiments.input.input import Arm, Reading, Waiting, measure_reading, measure_waiting, photographs
from experiments.input.pictures import SIZE, Ours, Torchvision, write_pictures
from experiments.record import BEGIN, END

SMALL = {"depth": 1, "embed_dim": 12, "num_heads": 2}
ORDER = [3, 0, 2, 1, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pictures(tmp_path_factory.mktemp("pictures"), len(ORDER), width=300, height=240)


def test_both_read_the_same_pictures_in_the_same_order(folder: Path) -> None:
    ours, other = Ours(folder, ORDER, 2, 0), Torchvision(folder, ORDER, 2, 0)
    pairs = list(zip(ours.batches(), other.batches(), strict=True))
    assert len(pairs) == 2
    for (inputs, labels), (their_inputs, their_labels) in pairs:
        assert inputs.shape == (2, 3, SIZE, SIZE)
        assert torch.equal(inputs, their_inputs)
        assert labels.tolist() == their_labels.tolist()


def test_reading_is_timed_in_rounds_and_leaves_no_process(folder: Path) -> None:
    before = multiprocessing.active_children()
    reading = measure_reading(folder, ORDER, 2, 1, 0.0)
    assert len(reading.ours) == len(reading.torchvision) == 2
    assert min(reading.ours + reading.torchvision) > 0
    for left in set(multiprocessing.active_children()) - set(before):
        left.join(60)  # on a busy machine one that has been ended takes a while
        assert not left.is_alive()


def test_every_round_times_steps_with_each_number_of_workers(folder: Path, pool: Pool) -> None:
    make = partial(photographs, folder, SMALL)
    (waiting,) = pool.run(1, with_children, measure_waiting, "pictures", make, 2, (0, 1), 0.0)
    assert [arm.num_workers for arm in waiting.arms] == [0, 1]
    for arm in waiting.arms:
        assert [len(turn) for turn in arm.step_s] == [len(turn) for turn in arm.wait_s] == [1, 1]
        assert all(0 < share < 1 for share in arm.shares)


def test_a_table_has_the_steps_that_hardly_wait_and_ratios_within_rounds() -> None:
    without = Arm(0, [[1.0, 1.0], [2.0, 2.0]], [[0.1, 0.2], [0.0, 0.02]])
    ahead = Arm(2, [[0.5, 0.5], [2.0, 4.0]], [[0.0, 0.0], [0.0, 2.0]])
    rows = Waiting("pictures", (without, ahead)).rows()
    assert rows[0] == ("pictures", "0", "1500", "5.5%", "50%", "1.00", "1.00-1.00", "4")
    assert rows[1] == ("pictures", "2", "1250", "0.0%", "75%", "1.00", "0.50-1.50", "4")
    assert Reading(1, (2.0, 4.0), (4.0, 4.0)).row() == ("1", "3", "4", "0.75", "0.50-1.00", "2")


@pytest.mark.parametrize("printed", [printed_in_pool, pytest.param(printed_by_command, marks=pytest.mark.thorough)])
def test_the_command_prints_both_tables_and_keeps_them(
    printed: Callable[[Pool, str, Sequence[str]], str], pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    options = ["--pictures", "4", "--batch-size", "2", "--depth", "1", "--workers", "0", "--seconds", "0"]
    out = printed(pool, "experiments.input.input", [*options, "--into", str(tmp_path)])
    assert "| digits, in memory | 0 |" in out
    assert out.strip() in (tmp_path / "README.md").read_text()
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [arm["num_workers"] for each in results["waiting"] for arm in each["arms"]] == [0, 0]
    assert len(results["reading"][0]["ours"]) == 2
