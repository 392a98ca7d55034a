"""Holds the cache against its promises: ``python -m experiments.cache.cache``."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from experiments.cache import accuracy, advancing, beside, bounded, hidden, losses, reading
from experiments.ranks import run_ranks
from experiments.record import markdown, publish
from experiments.step_time.cases import CASES, Case

WORLD = 2
PROMISES = ("promise", "bound", "measured", "kept")
KEPT = {True: "yes", False: "no"}
READ_MS, UNHINDERED, ADVANCE, GROWTH = 5.0, 0.95, 1.2, 1.1
WIDE = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}


@dataclass(frozen=True)
class Size:
    """Size of the measurement.

    Attributes:
        shapes: Features that are read.
        num_reads: Batches that are read from each store.
        cases: Models that are trained.
        num_rounds: Of training.
        num_steps: Of a round; ``None`` for an epoch.
        num_fills: Rounds of filling the cache.
        budgets_mib: Memory of processes that store eleven times as much.
        num_batches: That it reads.
        arms: Precision and storage of the runs whose losses are compared.
        overrides: Of these runs.
    """

    shapes: tuple[reading.FeatureShape, ...]
    batch_size: int
    num_reads: int
    cases: tuple[Case, ...]
    num_rounds: int
    num_steps: int | None
    num_fills: int
    budgets_mib: tuple[int, ...]
    num_batches: int
    arms: tuple[tuple[str, str], ...]
    overrides: tuple[str, ...]


BERT = Case("BERT 384 wide, 6 blocks, 32 tokens", "bert", 32, CASES[3].options | WIDE)
FULL = Size(
    shapes=reading.SHAPES,
    batch_size=256,
    num_reads=9,
    cases=(CASES[0], BERT),
    num_rounds=4,
    num_steps=None,
    num_fills=9,
    budgets_mib=(30, 256),
    num_batches=400,
    arms=losses.ARMS,
    overrides=("epochs=4",),
)
TINY = Size(
    shapes=(reading.FeatureShape("small", 3, 4),),
    batch_size=4,
    num_reads=1,
    cases=(Case("small", "vit", 32, {"embed_dim": 16, "depth": 3, "num_heads": 2}),),
    num_rounds=1,
    num_steps=3,
    num_fills=1,
    budgets_mib=(4,),
    num_batches=20,
    arms=losses.ARMS[:1],
    overrides=(
        "dataset.max_train_samples=96", "dataset.max_eval_samples=32", "epochs=4", "freeze.num_frozen=[1]",
        "model.options={patch_size: 4, embed_dim: 16, depth: 2, num_heads: 2}", "batch_size=16",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Results:
    """All measurements; the accuracies come from sweeps."""

    reading: list[reading.ReadTimes]
    hidden: list[hidden.Steps]
    advancing: list[advancing.Advance]
    beside: list[beside.Beside]
    bounded: list[bounded.Growth]
    losses: list[losses.Difference]
    accuracy: list[accuracy.Accuracy]

    def promises(self) -> list[tuple[str, ...]]:
        """Compares each promise with its measured value."""
        first = self.reading[0]
        read_ms = 1000 * median(first.seconds)
        unhindered = min(steps.unhindered for steps in self.hidden if steps.name in list(hidden.BUDGETS)[:2])
        slowest = max(median(advance.ratios) for advance in self.advancing)
        to_batches = max(median(advance.ratios_to_batches) for advance in self.advancing)
        growth = max(own.of_the_cache / own.budget for own in self.bounded)
        largest = max(self.bounded, key=lambda own: own.budget)
        in_all = largest.total / largest.budget
        batch = f"a batch of {first.shape} features from memory, ms"
        return [
            (batch, f"< {READ_MS:g}", f"{read_ms:.1f}", KEPT[read_ms < READ_MS]),
            (
                "steps that waited less than 5 %",
                f">= {UNHINDERED:.0%}",
                f"{unhindered:.1%}",
                KEPT[unhindered >= UNHINDERED],
            ),
            (
                "advancing / forward of the new blocks, in large parts",
                f"<= {ADVANCE:g}",
                f"{slowest:.2f}",
                KEPT[slowest <= ADVANCE],
            ),
            (
                "the same, forward in batches of training",
                f"<= {ADVANCE:g}",
                f"{to_batches:.2f}",
                KEPT[to_batches <= ADVANCE],
            ),
            ("memory that the cache takes / budget", f"<= {GROWTH:g}", f"{growth:.2f}", KEPT[growth <= GROWTH]),
            (
                f"growth of the process, with buffers of batches / budget of {largest.budget // bounded.MIB} MiB",
                f"<= {GROWTH:g}",
                f"{in_all:.2f}",
                KEPT[in_all <= GROWTH],
            ),
        ]

    def tables(self) -> str:
        """Renders all tables, each under its name."""
        parts = {
            "Promises": markdown(PROMISES, self.promises()),
            "Reading": markdown(reading.HEADER, [own.row() for own in self.reading]),
            "Hidden": markdown(hidden.HEADER, hidden.rows(self.hidden)),
            "Advancing": markdown(advancing.HEADER, [own.row() for own in self.advancing]),
            "Filling beside training": markdown(beside.HEADER, [own.row() for own in self.beside]),
            "Bounded, growth in MiB": markdown(bounded.HEADER, [own.row() for own in self.bounded]),
            "Losses": markdown(losses.HEADER, [own.row() for own in self.losses]),
        }
        if self.accuracy:
            parts["Accuracy"] = markdown(accuracy.HEADER, accuracy.rows(self.accuracy))
        return "\n\n".join(f"### {name}\n{table}" for name, table in parts.items())


def measure(size: Size, sweeps: Sequence[Path]) -> Results:
    """Measures one thing after the other."""
    runs = accuracy.read_sweeps(sweeps)
    return Results(
        run_ranks(1, reading.measure_reading, size.shapes, size.batch_size, size.num_reads),
        run_ranks(WORLD, hidden.measure_hidden, size.cases, size.num_rounds, size.num_steps),
        run_ranks(WORLD, advancing.measure_advancing, size.cases, size.num_fills),
        run_ranks(WORLD, beside.measure_beside, size.cases, size.num_fills),
        run_ranks(1, bounded.measure_bounded, size.budgets_mib, 32, size.num_batches),
        losses.measure_losses(size.arms, size.overrides),
        runs,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a form that takes seconds and shows nothing but that it runs"
    )
    parser.add_argument("--sweeps", type=Path, nargs="+", default=[], help="the hydra.sweep.dir of each accuracy sweep")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    results = measure(TINY if options.tiny else FULL, options.sweeps)
    publish(results.tables(), asdict(results), options.into)


if __name__ == "__main__":
    main()
