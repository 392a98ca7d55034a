"""The ablation as a table: ``python -m experiments.components.table <sweep folder>``."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median

import yaml

from experiments.record import markdown, publish
from pipetransformer.report.run_folder import CONFIG, read_run

GROUP = "experiment=components/"
BASELINE = "baseline"
KEEPING = "hydra.output_subdir=.hydra"  # each job's overrides
ARMS = {  # in the order of the table, as the paper names them
    BASELINE: "no freezing",
    "freeze": "freeze only",
    "autopipe": "+ AutoPipe",
    "autopipe_autocache": "+ AutoPipe + AutoCache",
    "autopipe_autodp": "+ AutoPipe + AutoDP",
    "all": "all",
    "shorter": "control: no freezing, fewer epochs",
}
PAPER = {BASELINE: 1.00, "freeze": 0.95, "autopipe_autocache": 1.26, "autopipe_autodp": 2.27, "all": 2.83}
"""Throughput relative to no freezing, ViT-B/16 on ImageNet: the paper's ablation."""

HEADER = (
    "arm",
    "accuracy, mean (min-max)",
    "training, s",
    "times as fast as no freezing",
    "in the paper",
    "speed-up over best static plan",
    "limit",
    "share of limit",
    "mean frozen",
)


@dataclass(frozen=True)
class Job:
    """One run of the sweep; the figures are those of its ``summary.json``."""

    arm: str
    seed: int
    accuracy: float
    train_seconds: float
    speedup_vs_static: float
    limit: float
    share_of_limit: float
    mean_frozen_fraction: float
    plans: tuple[str, ...]


def read_sweep(folder: Path) -> list[Job]:
    """Returns all jobs of a sweep.

    Raises:
        ValueError: The folder holds no job of this experiment, a job has not completed, or an arm has no baseline.
    """
    jobs = [_read_job(config.parent) for config in sorted(folder.glob(f"*/{CONFIG}"))]
    if not jobs:
        raise ValueError(f"{folder} holds no run; give the hydra.sweep.dir of the sweep")
    alone = {job.seed for job in jobs} - {job.seed for job in jobs if job.arm == BASELINE}
    if alone:
        raise ValueError(f"{folder} has no {GROUP}{BASELINE} with seed {sorted(alone)} to compare with; run it as well")
    return jobs


def _read_job(folder: Path) -> Job:
    run, arm = read_run(folder), _arm(folder)
    if run.summary.get("status") != "completed":
        raise ValueError(f"{folder} ({arm}) is {run.summary.get('status', 'unfinished')}; run it again")
    copied = {name: run.summary[name] for name in Job.__annotations__ if name in run.summary and name != "plans"}
    plans = tuple(_plan(plan) for _, plan in run.plans)
    return Job(arm=arm, seed=run.config["seed"], accuracy=run.summary["metric"]["value"], plans=plans, **copied)


def _arm(folder: Path) -> str:
    file = folder / ".hydra" / "overrides.yaml"
    if not file.is_file():
        raise ValueError(f"{folder} has no {file.name}, so nothing names its arm; run the sweep with {KEEPING}")
    overrides = yaml.safe_load(file.read_text(encoding="utf-8"))
    arms = [text.removeprefix(GROUP) for text in overrides if text.startswith(GROUP)]
    if not arms or arms[0] not in ARMS:
        raise ValueError(f"{folder} is no arm of this experiment: {GROUP}... is not among its overrides {overrides}")
    return arms[0]


def _plan(plan: dict[str, int | list[list[int]]]) -> str:
    """Returns frozen and cached blocks, stages, replicas and micro-batches, for example ``2f 2c 2x2 m4``."""
    stages = plan["stages"]
    assert isinstance(stages, list)
    grid = f"{len(stages)}x{plan['num_replicas']} m{plan['num_microbatches']}"
    return f"{plan['num_frozen']}f {plan['cache_level']}c {grid}"


def rows(jobs: Sequence[Job]) -> Iterator[tuple[str, ...]]:
    """Returns a row of cells for each arm that the sweep has; ratios are taken within a seed, then their median."""
    baseline_s = {job.seed: job.train_seconds for job in jobs if job.arm == BASELINE}
    for arm, name in ARMS.items():
        own = [job for job in jobs if job.arm == arm]
        if own:
            ratio = median(baseline_s[job.seed] / job.train_seconds for job in own)
            paper = f"{PAPER[arm]:.2f}" if arm in PAPER else ""
            yield (
                name,
                _accuracy(own),
                _median(own, lambda job: job.train_seconds, ".1f"),
                f"{ratio:.2f}",
                paper,
                *(
                    _median(own, lambda job: job.speedup_vs_static, ".2f"),
                    _median(own, lambda job: job.limit, ".2f"),
                    _median(own, lambda job: job.share_of_limit, ".0%"),
                    _median(own, lambda job: job.mean_frozen_fraction, ".0%"),
                ),
            )


def _accuracy(jobs: Sequence[Job]) -> str:
    values = [job.accuracy for job in jobs]
    return f"{mean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _median(jobs: Sequence[Job], value: Callable[[Job], float], form: str) -> str:
    return format(median(value(job) for job in jobs), form)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sweep", type=Path, help="the hydra.sweep.dir of the sweep")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    try:
        jobs = read_sweep(options.sweep)
        table = markdown(HEADER, rows(jobs))
        publish(table, [asdict(job) for job in jobs], options.into)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
