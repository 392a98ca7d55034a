"""Difference between the losses of cached and uncached runs, step by step."""

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipetransformer.report.run_folder import Run, read_run

ROOT = Path(__file__).parents[2]
HEADER = (
    "precision",
    "storage",
    "hit rate",
    "steps",
    "steps read from the cache",
    "largest difference of the loss",
    "relative",
)
RUN = ("logger=none", "freeze=schedule", "freeze.num_frozen=[2,4]", "freeze.interval=0.3", "parallel.world_size=2")
ARMS = (
    ("float32", "exact"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "int8"),
    ("float64", "exact"),
)


@dataclass(frozen=True)
class Difference:
    """Difference of the losses of two runs that freeze alike, one of them with a cache.

    Attributes:
        largest: In size, over the steps.
        relative: Largest part of the uncached loss.
    """

    precision: str
    storage: str
    hit_rate: float
    num_steps: int
    num_cached_steps: int
    largest: float
    relative: float

    def row(self) -> tuple[str, ...]:
        return (
            self.precision,
            self.storage,
            f"{self.hit_rate:.0%}",
            f"{self.num_steps}",
            f"{self.num_cached_steps}",
            f"{self.largest:.1e}",
            f"{self.relative:.1e}",
        )


def measure_losses(arms: tuple[tuple[str, str], ...], overrides: tuple[str, ...]) -> list[Difference]:
    """Runs the default job once without a cache for each precision, and once with each storage type."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plain = {
            precision: _run(folder / precision, f"precision={precision}", "cache=off", *overrides)
            for precision in dict.fromkeys(precision for precision, _ in arms)
        }
        return [
            compare(plain[precision], _run(folder / f"{precision} {storage}", *_cached(precision, storage), *overrides))
            for precision, storage in arms
        ]


def _cached(precision: str, storage: str) -> tuple[str, ...]:
    return (f"precision={precision}", f"cache.storage={storage}")


def _run(folder: Path, *overrides: str) -> Run:
    command = [sys.executable, str(ROOT / "train.py"), *RUN, *overrides, f"hydra.run.dir={folder}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr[-2000:]}")
    return read_run(folder)


def compare(plain: Run, cached: Run) -> Difference:
    """Compares step by step; both runs freeze at the same steps."""
    expected, steps = plain.events["step"], cached.events["step"]
    frozen = [[step["num_frozen"] for step in run] for run in (expected, steps)]
    assert frozen[0] == frozen[1], "both runs freeze at the same steps"
    losses, found = (np.array([step["loss"] for step in run]) for run in (expected, steps))
    difference = np.abs(found - losses)
    return Difference(
        precision=cached.config["precision"],
        storage=cached.config["cache"]["storage"],
        hit_rate=cached.summary.get("cache", {}).get("hit_rate") or 0.0,
        num_steps=len(steps),
        num_cached_steps=sum(step["cache_level"] > 0 for step in steps),
        largest=float(difference.max()),
        relative=float((difference / losses).max()),
    )
