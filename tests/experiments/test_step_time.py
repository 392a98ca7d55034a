"""The step-time benchmark runs, and compares like with like."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support.experiments import printed_by_command, printed_in_pool
from support.pool import Pool

from experiments.record import BEGIN, END
from experiments.step_time.allocator import __main__ as allocator
from experiments.step_time.cases import CASES, Case, write_bert
from experiments.step_time.frozen import __main__ as frozen
from experiments.step_time.loops import ElasticLoop
from experiments.step_time.receives import __main__ as receives
from experiments.step_time.scheduler import __main__ as scheduler
from experiments.step_time.step_time import CPU, WALL, Times, measure, row
from pipetransformer.autopipe.plan import Plan

VIT = Case("small", "vit", 8, {"embed_dim": 16, "depth": 1, "num_heads": 2})
TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.thinned("small", "dropout")
@pytest.mark.parametrize(
    "case",
    [VIT, Case("text", "bert", 8, CASES[3].options | TEXT), Case("dropout", "bert", 8, CASES[4].options | TEXT)],
    ids=lambda case: case.name,
)
def test_every_round_times_both_loops_on_the_same_training(case: Case, pool: Pool, tmp_path: Path) -> None:
    write_bert(tmp_path)
    times = pool.run(2, measure, case, tmp_path, 0.0, 3)[0]
    assert len(times.plain) == len(times.elastic) == 2
    assert all(seconds > 0 for turn in times.plain + times.elastic for seconds in turn)


@pytest.mark.thinned
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("num_frozen", "cached"), [(0, False), (1, False), (2, True)])
def test_a_frozen_level_is_timed_on_the_same_training(world: int, num_frozen: int, cached: bool, pool: Pool) -> None:
    case = Case("small", "vit", 8, VIT.options | {"depth": 2, "proj_drop_rate": 0.0})
    level = pool.run(world, frozen.measure, case, num_frozen, cached, 0.0)[0]
    assert (level.num_ranks, level.num_frozen, level.cached) == (world, num_frozen, cached)
    assert len(level.plain) == len(level.elastic) == 2
    assert len(level.row()) == len(frozen.HEADER)


def test_steps_are_timed_with_freed_memory_kept_and_not(pool: Pool) -> None:
    name = next(iter(allocator.CASES))
    plain, kept = (pool.run(1, allocator.measure, name, keeps, 2)[0] for keeps in (False, True))
    assert plain.seconds > 0
    assert len(allocator.row(name, [(plain, kept)])) == len(allocator.HEADER)


def test_steps_and_sums_are_timed_under_both_policies_of_scheduling(pool: Pool) -> None:
    steps = pool.run(2, scheduler.measure, VIT, 2, 1)[0]
    sums = pool.run(2, scheduler.measure_sums, 2)[0]
    assert len(steps + sums) == 4 + len(scheduler.SIZES)
    for timed in steps + sums:
        assert all(seconds > 0 for turn in timed.before + timed.after for seconds in turn[:1])
        assert len(timed.row()) == len(scheduler.HEADER)


def test_every_pipeline_is_timed_with_messages_asked_for_late_and_early(pool: Pool) -> None:
    case = Case("small", "vit", 8, {"embed_dim": 16, "depth": 3, "num_heads": 2})
    timed = pool.run(2, receives.measure, case, 2, 1)[0]
    assert [one.name for one in timed] == [*receives.plans(num_layers=5)]
    assert all(seconds > 0 for one in timed for turn in one.before + one.after for seconds in turn[:1])
    assert {len(one.row()) for one in timed} == {len(receives.HEADER)}


def losses(case: Case, folder: Path, replicas: tuple[int, ...]) -> list[float]:
    """A loop with so many replicas in each step; one of them leaves the second rank idle."""
    loop = ElasticLoop(case.stack(folder), case.split(), case.batch_size)
    last = len(case.stack(folder)) - 1
    seen = []
    for num_replicas in replicas:
        loop.runtime.apply_plan(Plan(0, 0, ((0, last),), num_replicas, num_microbatches=1))
        loop.step()
        seen.append(loop.loss())
    loop.close()
    return seen


def test_a_loop_goes_on_with_the_same_training_where_a_plan_leaves_a_rank_idle(pool: Pool, tmp_path: Path) -> None:
    case = Case("small", "vit", 8, VIT.options | {"proj_drop_rate": 0.0})
    found, expected = (pool.run(2, losses, case, tmp_path, replicas) for replicas in ((2, 1, 2), (2, 2, 2)))
    assert found[0] == found[1], "an idle rank sees the loss, too"
    assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_a_ratio_is_taken_within_its_round() -> None:
    times = Times("a", 1000, plain=((0.1, 0.1), (0.2, 0.1), (0.4, 0.1)), elastic=((0.1, 0.2), (0.22, 0.1), (0.8, 0.3)))
    assert times.ratios(WALL) == pytest.approx([1.0, 1.1, 2.0])
    assert times.ratios(CPU) == pytest.approx([2.0, 1.0, 3.0])
    assert row(times) == ("a", "1,000", "200.0", "220.0", "1.100", "1.050-1.550", "2.000", "3")


@pytest.mark.parametrize("printed", [printed_in_pool, pytest.param(printed_by_command, marks=pytest.mark.thorough)])
def test_the_command_prints_the_table_and_keeps_it(
    printed: Callable[[Pool, str, Sequence[str]], str], pool: Pool, tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(f"{BEGIN}\n{END}\n")
    arguments = ["--seconds", "0", "--steps", "3", "--cases", "0", "--into", str(tmp_path)]
    out = printed(pool, "experiments.step_time.step_time", arguments)
    assert f"| {CASES[0].name} |" in out
    assert out.strip() in (tmp_path / "README.md").read_text()
    assert len(json.loads((tmp_path / "results.json").read_text())["results"][0]["plain"]) == 2
