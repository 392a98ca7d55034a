"""Trainings on data with samples that break a step, and the same by a plain loop."""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pipetransformer as pt
from pipetransformer.autodp.sampler import batch_ids, epoch_order, num_batches
from pipetransformer.checkpoint.folder import FOLDER, open_checkpoints
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.runtime.elastic import ElasticRuntime
from support.jobs import with_made_up_times
from support.own import BATCH_SIZE, NUM_BLOCKS, NUM_CLASSES, OPTIMIZER, SEED, WIDTH, Block, Head, loss

NUM_SAMPLES, EPOCHS = 40, 4
STEPS = EPOCHS * num_batches(NUM_SAMPLES, BATCH_SIZE)


class Points(torch.utils.data.Dataset[Any]):
    """Tokens of random numbers (5, WIDTH); some samples are multiplied by a factor, which may be NaN."""

    def __init__(self, factors: Mapping[int, float]) -> None:
        self.inputs = torch.randn(NUM_SAMPLES, 5, WIDTH, generator=torch.Generator().manual_seed(3))
        self.targets = self.inputs[:, 0, 0].gt(0).long()
        for index, factor in factors.items():
            self.inputs[index] *= factor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.targets[index]) % NUM_CLASSES


def model() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(NUM_BLOCKS)]
    blocks[1].same = blocks[1].linear  # a parameter under two names, of which a checkpoint has one
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks, Head())


@dataclass
class Guarded:
    """What one rank sees of a training.

    Attributes:
        losses: Of each step in the order in which they were trained.
        decisions: Events of the guard in the log.
        steps: Numbers of the steps in the log.
        transitions: Events in the log.
        summary: Figures of the run.
        error: Why it ended early.
        num_frozen: Blocks that are frozen at the end.
    """

    losses: list[float] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    transitions: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    num_frozen: int = 0


@dataclass
class Scores:
    """Metrics of a training: one that stays, and others that rise with each evaluation."""

    rising: tuple[str, ...] = ()
    num_evaluations: int = 0

    def __call__(self, *_: Any) -> dict[str, float]:
        self.num_evaluations += 1
        return {"constant": 0.9} | dict.fromkeys(self.rising, self.num_evaluations / 10)


def train_guarded(
    folder: Path, parallel: pt.Parallel, factors: Mapping[int, float], options: dict[str, Any],
    accuracy: Mapping[int, float] | None = None, at_most: int = 10**9,
) -> Guarded:  # fmt: skip
    """One rank of a training.

    Args:
        factors: Of the samples that are changed.
        options: Of the trainer.
        accuracy: By the number of frozen blocks; by default what the model reaches.
        at_most: Steps after which it is left.
    """
    seen, data = Guarded(), Points(factors)
    given: dict[str, Any] = {
        "freeze": pt.NoFreezing(),
        "checkpoint": pt.Checkpointing(every_steps=5, keep=1),
        "evaluate": pt.Evaluation(),
    }
    try:
        short = mock.patch("pipetransformer.planning.guard.NUM_WARMUP_NORMS", 3)
        with short, with_made_up_times(), _made_up(accuracy), pt.ElasticTrainer(
            model(), loss=loss, train=data, evaluation={"dev": data}, optimizer=OPTIMIZER,
            batch_size=BATCH_SIZE, epochs=EPOCHS, seed=SEED, parallel=parallel, precision="float64",
            run_dir=folder, **given | options,
        ) as trainer:  # fmt: skip
            for result in trainer:
                seen.losses.append(result.loss)
                if len(seen.losses) == at_most:
                    break
            trainer.checkpoints.wait()
            seen.num_frozen, seen.summary = trainer.plan.num_frozen, trainer.summary()
    except pt.UserError as error:
        seen.error = str(error)
    events = [json.loads(line) for line in (folder / EVENT_LOG).read_text().splitlines()]
    seen.decisions = [event for event in events if event["event"] == "decision" and event["bound"] == "guard"]
    seen.steps = [event["step"] for event in events if event["event"] == "step"]
    seen.transitions = [event for event in events if event["event"] == "transition"]
    return seen


def evaluation_due_after_roll_back(folder: Path, factors: Mapping[int, float], options: dict[str, Any]) -> bool:
    """Whether the checkpoint that the first roll-back writes, at step 5, knows of the evaluation there."""
    train_guarded(folder, pt.Parallel(), factors, options, at_most=5)
    manifests = {manifest.step: manifest for _, manifest in open_checkpoints(folder / FOLDER)}  # type: ignore[union-attr]
    return manifests[5].train["evaluation_due"]


class LosesCheckpoints(pt.Callback):
    """Removes all checkpoints at each transition."""

    def on_transition(self, trainer: Any, before: Any, after: Any) -> None:
        trainer.checkpoints.wait()
        dist.barrier()
        shutil.rmtree(trainer.checkpoints.folder.path, ignore_errors=True)


@contextmanager
def _made_up(accuracy: Mapping[int, float] | None) -> Iterator[None]:
    """Evaluations give these values."""
    if accuracy is None:
        yield
        return

    def evaluate(runtime: ElasticRuntime, *_: Any) -> dict[str, float]:
        assert runtime.plan is not None
        return {"accuracy": accuracy[runtime.plan.num_frozen]}

    with mock.patch("pipetransformer.training.evaluations.evaluate", evaluate):
        yield


def train_plainly(factors: Mapping[int, float], rolls_back_every: int | None = None) -> list[float]:
    """Losses by a plain loop in float64 that passes over batches with a changed sample.

    Args:
        rolls_back_every: After such a batch, go on from the weights of the last multiple of so many steps.
    """
    trained, data = model().double(), Points(factors)
    optimizer = OPTIMIZER.build(trained.parameters())
    assert optimizer is not None
    steps, losses = num_batches(len(data), BATCH_SIZE), []
    saved = copy.deepcopy((trained.state_dict(), optimizer.state_dict()))
    for step in range(STEPS):
        epoch, index = divmod(step, steps)
        ids = batch_ids(epoch_order(len(data), epoch, SEED), index, BATCH_SIZE)
        value = loss(trained(data.inputs[ids].double()), data.targets[ids]).mean()
        losses.append(value.item())
        is_bad = any(factors.get(int(i), 1.0) != 1 for i in ids)
        if not is_bad:
            optimizer.zero_grad(set_to_none=True)
            value.backward()
            nn.utils.clip_grad_norm_(trained.parameters(), OPTIMIZER.clip_norm or math.inf)
            optimizer.step()
        elif rolls_back_every:
            trained.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
        if rolls_back_every and (is_bad or (step + 1) % rolls_back_every == 0 or (step + 1) % steps == 0):
            saved = copy.deepcopy((trained.state_dict(), optimizer.state_dict()))
    return losses
