"""Times whole runs on one GPU, without freezing, with it, and with the cache: ``python -m experiments.gpu.runs``.

A run is what a user's script is: ``pt.ElasticTrainer`` with a model of timm or transformers and data in memory. Its
schedule freezes a quarter of the blocks after each quarter of the run.
"""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import pipetransformer as pt
from experiments.gpu.__main__ import NO_GPU, chosen_cases, parser_of, title
from experiments.gpu.cases import CASES, SEED, SMALL, Case
from experiments.record import markdown, publish
from pipetransformer.config.sections import Cache, Loading, Parallel

NUM_QUARTERS, RATE = 4, 1e-5
MAX_WORKERS, SHARED = 4, Path("/dev/shm")
PLAIN, FROZEN, CACHED = "no freezing", "freezing", "freezing and cache"
ARMS = (PLAIN, FROZEN, CACHED)
HEADER = (
    "model", "arm", "training, s", "times as fast", "in steps, s", "transitions, s", "share of limit",
    "predicted / measured step", "last loss",
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """A run.

    Attributes:
        losses: Of the steps.
        summary: As in ``summary.json``.
    """

    name: str
    arm: str
    losses: tuple[float, ...]
    summary: dict[str, Any]

    @property
    def seconds(self) -> float:
        return self.summary["train_seconds"]

    def predictions(self) -> list[float]:
        """Returns the predicted over the measured step, of each plan that was measured."""
        plans = self.summary["plans"]
        return [plan["predicted_step_s"] / plan["median_step_s"] for plan in plans if plan["median_step_s"]]


class Samples(Dataset[dict[str, Any]]):
    """Random pictures, or texts of one length, with random classes."""

    def __init__(self, case: Case, num_samples: int) -> None:
        self._reads_images = case.reads_images
        self._inputs, self._labels = case.samples(num_samples)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._inputs[index], self._labels[index]
        if self._reads_images:
            return inputs, label
        return {"input_ids": inputs, "attention_mask": torch.ones_like(inputs), "labels": label}


def num_workers(case: Case, shared: Path = SHARED) -> int:
    """Returns how many processes read ahead: their batches lie in shared memory, of which a container may have little.

    Args:
        shared: Where it is.
    """
    batch_bytes = case.batch_size * sum(each.nbytes for each in case.samples(1))
    most = batch_bytes * (Loading().prefetch_factor + 1)  # of each: those that are ready, and the one that is taken
    return min(MAX_WORKERS, shutil.disk_usage(shared).free // most) if shared.is_dir() else MAX_WORKERS


def run(
    case: Case, arm: str, num_samples: int, epochs: int, parallel: Parallel, precision: str, folder: Path,
    workers: int,
) -> Outcome:  # fmt: skip
    """Trains once."""
    model = case.original(case.stack(folder))
    quarter = max(1, case.num_blocks // NUM_QUARTERS)
    freeze = pt.FixedSchedule(
        num_frozen=[quarter * number for number in range(1, NUM_QUARTERS)], interval=1 / NUM_QUARTERS
    )
    with pt.ElasticTrainer(
        model,
        loss=nn.CrossEntropyLoss(reduction="none"),
        train=Samples(case, num_samples),
        optimizer=pt.AdamW(lr=RATE, clip_norm=1.0),
        batch_size=case.batch_size,
        epochs=epochs,
        freeze=pt.NoFreezing() if arm == PLAIN else freeze,
        parallel=parallel,
        cache=Cache(enabled=arm == CACHED, memory_gib=8.0),
        loader=Loading(num_workers=workers),
        precision=precision,
        seed=SEED,
    ) as trainer:
        losses = tuple(step.loss for step in trainer)
        return Outcome(case.name, arm, losses, trainer.summary())


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """Returns the cells of the table; times as fast is against the run of the same round without freezing."""
    plain: dict[str, float] = {}
    found = []
    for each in outcomes:
        if each.arm == PLAIN:
            plain[each.name] = each.seconds
        predictions, share = each.predictions(), each.summary.get("share_of_limit")
        found.append(
            (
                each.name,
                each.arm,
                f"{each.seconds:.1f}",
                f"{plain[each.name] / each.seconds:.2f}",
                f"{each.summary['step_seconds']:.1f}",
                f"{each.summary['time_parts']['transitions']:.1f}",
                "" if share is None else f"{share:.0%}",
                f"{min(predictions):.2f}-{max(predictions):.2f}",
                f"{each.losses[-1]:.4f}",
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.gpu.runs", __doc__)
    parser.add_argument("--batches", type=int, default=16, help="of an epoch")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2, help="how often all arms run, one after another")
    options = parser.parse_args(arguments)
    cases = [case for case in (SMALL if options.small else CASES) if not case.draws]
    chosen = chosen_cases(parser, options, cases)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return
    parallel, outcomes = Parallel(device=options.device, world_size=1), list[Outcome]()
    with TemporaryDirectory() as folder:
        for case in chosen:
            settings = options.batches * case.batch_size, options.epochs, parallel, options.precision, Path(folder)
            workers = 0 if options.device == "cpu" else num_workers(case)
            print(f"{case.name}: {workers} processes read ahead", flush=True)
            for arm in ARMS * options.rounds:
                outcomes.append(run(case, arm, *settings, workers))
                print(" | ".join(rows(outcomes)[-1]), flush=True)
    table = title(options) + markdown(HEADER, rows(outcomes))
    publish(table, [asdict(each) for each in outcomes], options.into)


if __name__ == "__main__":
    main()
