"""Runs that stop after a number of steps and go on in another world, with what is restored compared bit for bit."""

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file

import pipetransformer as pt
from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import layer_file, read_manifest
from pipetransformer.config.schema import Config
from pipetransformer.config.sections import Checkpointing, Resume
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.runtime.elastic import ElasticRuntime
from support.jobs import composed, with_made_up_times

CHANGES = {
    "history",
    "overhead_s",
    "cache_level",
    "num_resumes",
    "num_steps_lost",
}  # of the state: what a resumed run plans and measures anew


@dataclass(frozen=True, kw_only=True)
class FreezeAndUnfreeze(FreezePolicy):
    """Freezes and unfreezes by a list; remembers the sum of all norms, so that it has a memory."""

    prefixes: list[int] = field(default_factory=list)

    @property
    def may_unfreeze(self) -> bool:
        return True

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        total = state.get("sum", 0.0) + sum(signals["gradient_norm"])
        prefix = self.prefixes[min(signals.decision, len(self.prefixes) - 1)]
        return Decision(prefix, "list", f"sum of norms {total:.17g}"), {"sum": total}


@dataclass(frozen=True)
class Ran:
    """A run, or a part of it.

    Attributes:
        first: Step at which it began.
        losses: Of its steps.
        plans: Frozen prefix, cache level, stages and replicas of each plan.
        differences: Names of what was not restored bit for bit.
        end: State of the run without what it measures.
    """

    first: int
    losses: list[float]
    plans: list[tuple[int, int, int, int]]
    differences: list[str]
    end: dict[str, Any]


def run_on(
    overrides: tuple[str, ...], folder: Path, prefixes: list[int], at_most: int | None = None, every: int | None = 1,
    on_unfreeze: str = "keep",
) -> Ran:  # fmt: skip
    """One rank of a run that starts, or goes on from its newest checkpoint; ends after ``at_most`` of its steps."""
    with with_made_up_times():
        trainer = pt.ElasticTrainer.from_config(_config(overrides, prefixes, every, on_unfreeze), folder)
    with trainer:
        first, differences = trainer.state.step, []
        if first:
            differences = _differences(trainer, folder)
        losses = []
        for result in trainer:
            losses.append(result.loss)
            if len(losses) == at_most:
                break
        trainer.checkpoints.wait()
        plans = [record.plan for record in trainer.state.history.entries]
        shapes = [(plan.num_frozen, plan.cache_level, plan.num_stages, plan.num_replicas) for plan in plans]
        return Ran(first, losses, shapes, differences, _comparable(trainer.state.state_dict()))


def resume_own(overrides: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """Goes on with a run by the trainer of a script, to the end; returns the figures of its checkpoints."""
    with with_made_up_times(), pt.ElasticTrainer.from_config(composed(overrides), folder) as trainer:
        for _ in trainer:
            pass
        return trainer.summary()["checkpoints"]


def run_on_from(
    overrides: tuple[str, ...], whole: Path, folder: Path, steps: list[int], prefixes: list[int], on_unfreeze: str
) -> list[Ran]:
    """One rank of several runs, each of which goes on from another step of a whole one."""
    ran = []
    for step in steps:
        own = folder / str(step)
        if dist.get_rank() == 0:
            name = f"step-{step:08d}"
            shutil.copytree(whole / FOLDER / name, own / FOLDER / name)
        dist.barrier()
        ran.append(run_on(overrides, own, prefixes, None, None, on_unfreeze))
    return ran


def run_on_forgetting(*arguments: Any) -> list[Ran]:
    """Runs that go on without what is parked in their checkpoints."""
    with mock.patch.object(ElasticRuntime, "_has_state", lambda _, layer, plan: layer >= plan.first_active_layer):
        return run_on_from(*arguments)


def _config(overrides: tuple[str, ...], prefixes: list[int], every: int | None, on_unfreeze: str) -> Config:
    config = composed(overrides)
    policy = FreezeAndUnfreeze(interval=config.freeze.interval, prefixes=prefixes, on_unfreeze=on_unfreeze)
    checkpoint = Checkpointing(every_steps=every, every_minutes=None, keep=1000, keep_best=0)
    return replace(config, freeze=policy, checkpoint=checkpoint, resume=Resume(run="auto"))


def _comparable(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if name not in CHANGES}


def _differences(trainer: pt.ElasticTrainer, folder: Path) -> list[str]:
    """Compares what this rank holds after it has resumed with the files of the checkpoint."""
    checkpoint = CheckpointFolder(folder / FOLDER).published()[-1]
    manifest, found = read_manifest(checkpoint), []
    for layer, copies in trainer.runtime.snapshot().items():
        written = load_file(checkpoint / layer_file(layer))
        found += sorted(written.keys() ^ copies.keys())
        found += [name for name in written.keys() & copies.keys() if not torch.equal(written[name], copies[name])]
    before, now = _comparable(manifest.train), _comparable(trainer.state.state_dict())
    return found + [name for name in before if before[name] != now[name]]
