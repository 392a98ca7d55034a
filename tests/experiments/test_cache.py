"""The experiment about the cache measures every promise, in a tiny form."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.pool import Pool

from experiments.cache import cache
from experiments.cache.accuracy import Accuracy
from experiments.cache.advancing import Advance, measure_advancing
from experiments.cache.beside import Beside, measure_beside
from experiments.cache.bounded import MIB, Growth, measure_bounded
from experiments.cache.cache import TINY, Results, main
from experiments.cache.hidden import BUDGETS, UNCACHED, Steps, measure_hidden, rows
from experiments.cache.losses import Difference, compare
from experiments.cache.reading import STORAGE, ReadTimes, measure_reading
from experiments.record import BEGIN, END
from pipetransformer.report.run_folder import Run
from pipetransformer.report.sinks import EVENTS

READ = ReadTimes("small", "memory", "exact", 1024, 4096, (0.004, 0.001, 0.002))
STEPS = Steps("small", "memory", (0.1, 0.1, 0.2, 0.1), (0.0, 0.004, 0.1, 0.0), 0.208, 30, 10, (0.1, 0.2))
ADVANCE = Advance("small", "disk", 0, 1, (0.2, 0.3, 0.9), (0.1, 0.3, 0.3), (0.1, 0.2, 0.6))
BESIDE = Beside("small", (0.2, 0.2, 0.1), (0.1, 0.3, 0.1), (0.3, 0.6, 0.4))
GROWTH = Growth(4 * MIB, 44 * MIB, MIB, 4 * MIB, MIB // 4, 3 * MIB, 7 * MIB)
DIFFERENCE = Difference("float32", "exact", 1.0, 24, 18, 1e-6, 2e-6)
EXACT = Accuracy("text", "exact", 0.80, 872, 1.0, 3 * MIB, 0.25)
RESULTS = Results([READ], [STEPS, replace(STEPS, name=UNCACHED)], [ADVANCE], [BESIDE], [GROWTH], [DIFFERENCE], [EXACT])


def test_each_tier_is_read_in_each_storage_type_in_every_round() -> None:
    times = measure_reading(TINY.shapes, TINY.batch_size, 2)
    assert [(own.tier, own.storage) for own in times] == [
        (tier, name) for tier in ("memory", "disk") for name in STORAGE
    ]
    assert [own.sample_bytes for own in times[:4]] == [3 * 4 * 4, 3 * 4 * 2, 3 * 4 * 2, 3 * (4 + 4)]
    assert all(len(own.seconds) == 2 for own in times)


def test_every_room_is_trained_in_and_only_the_small_one_computes(pool: Pool) -> None:
    steps = pool.run(2, measure_hidden, TINY.cases, 2, 3)[0]
    assert [own.name for own in steps] == [*BUDGETS, UNCACHED]
    memory, disk, half, uncached = steps
    assert len(memory.step_s) == len(memory.waited_s) == 2 * 2 * 3, "of both ranks"
    assert (memory.misses, disk.misses, uncached.hits) == (0, 0, 0)
    assert 0.3 < half.hits / (half.hits + half.misses) < 0.7
    assert memory.read_s > 0
    assert sum(uncached.waited_s) == 0


def test_both_levels_are_filled_in_each_tier(pool: Pool) -> None:
    advances = pool.run(2, measure_advancing, TINY.cases, 1)[0]
    levels = [(own.tier, own.from_level, own.to_level) for own in advances]
    assert levels == [("memory", 0, 1), ("memory", 1, 2), ("disk", 0, 1), ("disk", 1, 2)]
    assert all(len(own.advance_s) == len(own.forward_s) == len(own.batches_s) == 1 for own in advances)


def test_filling_first_is_held_against_filling_beside_training(pool: Pool) -> None:
    (beside,) = pool.run(2, measure_beside, TINY.cases, 2)[0]
    assert len(beside.fill_s) == len(beside.cached_s) == len(beside.beside_s) == 2
    assert BESIDE.row()[1:] == ("0.200", "0.100", "0.400", "1.20", "1.00-2.00")


def test_what_a_process_grows_by_is_told_apart() -> None:
    growth = measure_bounded((4,), batch_size=8, num_batches=5)[0]
    assert 3 * MIB < growth.memory_tier <= 4 * MIB, "all of the budget is touched"
    assert growth.file < MIB
    assert growth.store > 9 * growth.budget


def test_a_ratio_of_advancing_is_taken_within_its_round() -> None:
    assert ADVANCE.ratios == pytest.approx([2.0, 1.0, 3.0])
    assert ADVANCE.row()[-3:] == ("2.00", "1.00-3.00", "1.50")


def test_a_step_counts_by_the_share_of_its_time_that_it_waited() -> None:
    assert STEPS.waits == pytest.approx(np.array([0, 0.04, 0.5, 0]))
    row = rows([STEPS, replace(STEPS, name=UNCACHED, round_s=(0.2, 0.4))])[0]
    assert row == ("small", "memory", "75%", "75.0%", "50.0%", "50.0%", "150.0", "1.00", "0.50")


def run_of(losses: list[float], storage: str = "exact", cache_level: int = 0, frozen: int = 1) -> Run:
    steps = [{"loss": loss, "num_frozen": frozen, "cache_level": cache_level} for loss in losses]
    events = {name: [] for name in EVENTS} | {"step": steps}
    summary = {"cache": {"hit_rate": 0.5}} if cache_level else {}
    return Run(Path("none"), {"precision": "float32", "cache": {"storage": storage}}, summary, events)


def test_the_largest_difference_of_two_runs_is_told_absolute_and_relative() -> None:
    found = compare(run_of([2.0, 1.0]), run_of([2.5, 0.6], "int8", 1))
    assert found == Difference("float32", "int8", 0.5, 2, 2, 0.5, pytest.approx(0.4))
    with pytest.raises(AssertionError, match="freeze at the same steps"):
        compare(run_of([2.0]), run_of([2.0], frozen=2))


def test_each_promise_is_held_against_what_was_measured() -> None:
    measured = [row[2:] for row in RESULTS.promises()]
    assert measured == [
        ("2.0", "yes"),
        ("75.0%", "no"),
        ("2.00", "no"),
        ("1.50", "no"),
        ("1.06", "yes"),
        ("1.75", "no"),
    ]


def test_the_command_prints_the_tables_and_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    monkeypatch.setattr(cache, "measure", lambda *_: RESULTS)
    main(["--tiny", "--into", str(tmp_path)])
    printed = capsys.readouterr().out.strip()
    assert printed in (tmp_path / "README.md").read_text()
    assert "| text | exact | 0.8000 | 872 | +0.0000 | 100% | 3 | 0.2500 |" in printed
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    assert results["advancing"][0]["advance_s"] == list(ADVANCE.advance_s)
