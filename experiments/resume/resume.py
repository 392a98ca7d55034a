"""Times saving and resuming: ``python -m experiments.resume.resume``."""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification

import pipetransformer as pt
from experiments.ranks import TIMEOUT_S, run_ranks
from experiments.record import markdown, publish
from pipetransformer.config.compose import compose_training

NUM_STEPS, NUM_SAVES, NUM_TOKENS, NUM_SAMPLES = 3, 3, 16, 4096
EVERY_S = 15 * 60.0  # the default interval
WORLDS = (1, 2, 4)
HEADER = ("model", "processes", "MB", "step s", "waited s", "written s", "waited / interval", "start s", "resume s")


@dataclass(frozen=True)
class Case:
    """A model to be saved.

    Attributes:
        options: Of BERT's configuration; empty for the default run's ViT.
        batch_size: Of a step over all processes.
    """

    name: str
    options: dict[str, int]
    batch_size: int = 8

    def trainer(self, folder: Path, resume: bool) -> pt.ElasticTrainer:
        checkpoint = pt.Checkpointing(every_minutes=None)
        if not self.options:
            run = pt.Resume(run="auto" if resume else None)
            config = compose_training(["logger=none", "freeze=none", "cache=off"])
            parallel = replace(config.parallel, timeout_s=TIMEOUT_S)
            return pt.ElasticTrainer.from_config(
                replace(config, resume=run, checkpoint=checkpoint, parallel=parallel), folder
            )
        torch.manual_seed(1)
        model = BertForSequenceClassification(BertConfig(num_labels=2, **self.options))
        data = [{"input_ids": torch.full((NUM_TOKENS,), i % 100), "labels": i % 2} for i in range(NUM_SAMPLES)]
        return pt.ElasticTrainer(
            model, loss=_loss, train=data, optimizer=pt.AdamW(lr=1e-4), batch_size=self.batch_size, epochs=1,
            freeze=pt.NoFreezing(), cache=pt.Cache(enabled=False), parallel=pt.Parallel(timeout_s=TIMEOUT_S),
            run_dir=folder, checkpoint=checkpoint, resume=resume,
        )  # fmt: skip


CASES = (
    Case("default", {}),
    Case("MiniLM", {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}),
    Case("BERT-base", {} | {"hidden_size": 768, "num_hidden_layers": 12}),
)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return cross_entropy(output, target, reduction="none")


@dataclass(frozen=True)
class Measured:
    """Figures of a model on a number of processes; seconds.

    Attributes:
        num_bytes: Size of a checkpoint.
        step_s: Median of a step.
        waited_s: Median wait of training for a checkpoint: the copy to host memory.
        written_s: Median time until a checkpoint is published, behind the training.
        start_s: From the model to the first step, without a checkpoint.
        resume_s: The same from a checkpoint.
    """

    num_bytes: int
    step_s: float
    waited_s: float
    written_s: float
    start_s: float
    resume_s: float


def measure(case: Case, folder: Path) -> Measured:
    """Measures a case; every rank calls it."""
    waits: list[float] = []
    writes: list[float] = []
    start = time.perf_counter()
    with case.trainer(folder, resume=False) as trainer:
        start_s, seconds, steps = time.perf_counter() - start, list[float](), iter(trainer)
        for _ in range(NUM_SAVES):
            for _ in range(NUM_STEPS):
                begun = time.perf_counter()
                next(steps)
                seconds.append(time.perf_counter() - begun)
            begun = time.perf_counter()
            trainer.checkpoints.save(trainer.state)
            waits.append(time.perf_counter() - begun)
            trainer.checkpoints.wait_for_all()
            writes.append(time.perf_counter() - begun)
        num_bytes = trainer.checkpoints.figures()["bytes"]
    start = time.perf_counter()
    with case.trainer(folder, resume=True) as trainer:
        resume_s = time.perf_counter() - start
        assert trainer.state.step == NUM_SAVES * NUM_STEPS
    return Measured(num_bytes, median(seconds[1:]), median(waits), median(writes), start_s, resume_s)


def row(case: Case, world: int, found: Measured) -> tuple[str, ...]:
    """Returns the cells of a line of the table."""
    share = f"{found.waited_s / EVERY_S:.2%}"
    times = (f"{value:.3g}" for value in (found.step_s, found.waited_s, found.written_s))
    return (
        case.name,
        str(world),
        f"{found.num_bytes / 1e6:.3g}",
        *times,
        share,
        f"{found.start_s:.3g}",
        f"{found.resume_s:.3g}",
    )


def main(arguments: Sequence[str] | None = None, cases: Sequence[Case] = CASES, worlds: Sequence[int] = WORLDS) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--into", type=Path, help="folder whose README and results.json take the figures")
    into = parser.parse_args(arguments).into
    rows, results = [], {}
    for case in cases:
        for world in worlds:
            with tempfile.TemporaryDirectory() as name:
                found = run_ranks(world, measure, case, Path(name) / "run")
            rows.append(row(case, world, found))
            results[f"{case.name} on {world}"] = asdict(found)
    publish(markdown(HEADER, rows), results, into)


if __name__ == "__main__":
    main()
