"""Accuracy by storage type: one row for each run of the sweeps."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipetransformer.report.run_folder import CONFIG, Run, read_run

HEADER = (
    "sweep",
    "storage",
    "accuracy",
    "of samples",
    "difference to exact",
    "read from the cache",
    "store, MiB",
    "last loss",
)


@dataclass(frozen=True)
class Accuracy:
    """One run.

    Attributes:
        sweep: Name of its folder.
        hit_rate: Share of the reads that the cache held.
        store_bytes: What it took.
        last_loss: Of the last step; where storing is not exact it differs, even if the accuracy does not.
    """

    sweep: str
    storage: str
    accuracy: float
    num_samples: int
    hit_rate: float
    store_bytes: int
    last_loss: float

    def row(self, exact: "Accuracy") -> tuple[str, ...]:
        return (
            self.sweep,
            self.storage,
            f"{self.accuracy:.4f}",
            f"{self.num_samples:,}",
            f"{self.accuracy - exact.accuracy:+.4f}",
            f"{self.hit_rate:.0%}",
            f"{self.store_bytes / 2**20:.0f}",
            f"{self.last_loss:.4f}",
        )


def read_sweeps(folders: Sequence[Path]) -> list[Accuracy]:
    """All runs of some sweeps.

    Raises:
        ValueError: A folder holds no run, or a run has not completed or stored nothing.
    """
    runs = [read_run(config.parent) for folder in folders for config in sorted(folder.glob(f"*/{CONFIG}"))]
    if len(runs) < len(folders):
        raise ValueError(f"{', '.join(map(str, folders))}: no run in it; give the hydra.sweep.dir of each sweep")
    return [_read(run) for run in runs]


def _read(run: Run) -> Accuracy:
    cache = run.summary.get("cache")
    if run.summary.get("status") != "completed" or cache is None:
        raise ValueError(f"{run.folder} is not a completed run that stored something; run it again")
    metric = run.summary["metric"]
    return Accuracy(
        sweep=run.folder.parent.name,
        storage=run.config["cache"]["storage"],
        accuracy=metric["accuracy"],
        num_samples=metric["num_samples"],
        hit_rate=cache["hit_rate"],
        store_bytes=sum(cache["bytes_by_tier"].values()),
        last_loss=run.events["step"][-1]["loss"],
    )


def rows(runs: Sequence[Accuracy]) -> list[tuple[str, ...]]:
    """Returns a row per run, compared with the exact one on the same data."""
    exact = {run.sweep: run for run in runs if run.storage == "exact"}
    return [run.row(exact[run.sweep]) for run in runs]
