"""The four ways to use one frozen prefix are one mathematics, and the table shows each job with each of them."""

from pathlib import Path
from unittest import mock

import pytest
from support.jobs import run_job
from support.pool import Pool
from support.texts import text_run, write_encoder, write_table

from experiments.one_store import __main__ as experiment
from experiments.one_store import plain
from experiments.one_store.__main__ import Job
from experiments.one_store.plain import FILE, RECOMPUTES

RATES = (0.01, 0.001)
OPTIONS = ("precision=float64", "epochs=2", "batch_size=4", "freeze=prefix", "freeze.num_blocks=1")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run on a small table, whose last batch is smaller."""
    folder = tmp_path_factory.mktemp("data")
    for name, count in (("train.tsv", 14), ("dev.tsv", 6)):
        write_table(folder / name, [row % 2 for row in range(count)])
    run = text_run(write_encoder(folder / "encoder"), "sst2", folder)
    return [*(one for one in run if one != "batch_size=2"), *OPTIONS, *experiment.COMMON]


@pytest.fixture(scope="module")
def jobs(pool: Pool, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """The losses of a job without a store and of one with."""
    folder = tmp_path_factory.mktemp("runs")
    rate = f"optim.lr={RATES[0]}"
    without = run_job(pool, 1, folder / "without", *options, rate, "cache=off", "checkpoint=off")
    kept = f"cache.path={folder / 'stores'}"
    store = run_job(pool, 1, folder / "store", *options, rate, kept, "checkpoint=off", made_up_times=True)
    assert not without.error + store.error
    assert store.summary["cache"]["hit_rate"] == 1
    return {"without": without.losses, "store": store.losses}


@pytest.mark.parametrize("way", [RECOMPUTES, FILE])
def test_a_loop_by_hand_gives_the_losses_of_a_run(
    way: str, jobs: dict[str, list[float]], options: list[str], tmp_path: Path
) -> None:
    found = plain.main(way, tmp_path / "jobs", RATES, options)
    assert [one["lr"] for one in found] == [*RATES]
    assert found[0]["losses"] == pytest.approx(jobs["without"], rel=0, abs=1e-10)
    assert jobs["store"] == pytest.approx(jobs["without"], rel=0, abs=1e-10)
    assert found[1]["losses"] != pytest.approx(jobs["without"], rel=0, abs=1e-10)
    assert (tmp_path / "features.pt").exists() == (way == FILE)


def test_features_of_another_level_give_other_losses(
    jobs: dict[str, list[float]], options: list[str], tmp_path: Path
) -> None:
    prefix = plain.prefix
    with mock.patch.object(plain, "prefix", lambda stack, _, *given: prefix(stack, 1, *given)):  # the embedding alone
        found = plain.main(FILE, tmp_path / "jobs", RATES[:1], options)
    assert found[0]["losses"] != pytest.approx(jobs["without"], rel=0, abs=1e-10)


@pytest.mark.parametrize("way", experiment.WAYS)
def test_a_way_takes_all_rates_with_one_command(way: str, tmp_path: Path) -> None:
    command = experiment.command(way, 2, tmp_path / "jobs", ["epochs=3"])
    assert {"epochs=3", "seed=2"} < set(command)
    assert (f"cache.path={tmp_path / 'stores'}" in command) == (way == "store")
    assert ("cache=off" in command) == (way == "without")
    swept = [f"optim.lr={','.join(map(str, experiment.RATES))}"]
    assert [one for one in command if one.startswith("optim.lr=")] == (swept if way in ("store", "without") else [])


def test_the_table_shows_every_job_and_how_far_the_ways_are_apart() -> None:
    made = [
        Job(way, seed, rate, 0.5 + rate, 10.0, (0.7, 0.6 + 1e-7 * number))
        for number, way in enumerate(experiment.WAYS)
        for seed in experiment.SEEDS
        for rate in experiment.RATES
    ]
    seconds = dict(zip(experiment.WAYS, (90.0, 180.0, 135.0, 45.0), strict=True))
    rows = experiment.table(made, seconds).splitlines()[2:]
    assert len(rows) == 9 + 4
    assert rows[0] == "| seed 1, rate 0.0001 | 0.5001 · 10 | 0.5001 · 10 | 0.5001 · 10 | 0.5001 · 10 |"
    assert rows[-3].endswith("| 1.0e-07 | 0.0e+00 | 1.0e-07 | 2.0e-07 |")
    assert rows[-1].endswith("| 1.00 | 2.00 | 1.50 | 0.50 |")
