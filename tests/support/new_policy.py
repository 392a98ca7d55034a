"""A policy and its signal as somebody adds them: one file each would be enough, and a row in COLLECTORS."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import pipetransformer as pt
from pipetransformer.freeze.base import Decision, FreezePolicy, Signals, State
from pipetransformer.planning.foresight import falling_norms
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.signals.base import Collector
from pipetransformer.runtime.signals.collect import COLLECTORS
from support.jobs import loaded, with_made_up_times


class WeightNorm(Collector):
    """The norm of each block's weights."""

    @torch.no_grad()
    def read(self) -> Sequence[float]:
        runtime = self.context.runtime
        sums = torch.zeros(runtime.num_layers, dtype=torch.float64)
        for layer, own in runtime.measured_blocks.items():
            for parameter in own:
                sums[layer] += local_part(parameter).double().square().sum()
        return runtime.sum_over_parts(sums).sqrt()[1:-1].tolist()


@dataclass(frozen=True, kw_only=True)
class SmallWeights(FreezePolicy):
    """Freezes the lowest block whenever its weights are no larger than those of the topmost one times ``ratio``."""

    interval: float | None = 0.2
    ratio: float = 2.0

    @property
    def signals(self) -> tuple[str, ...]:
        return ("weight_norm",)

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        norms, lowest = signals["weight_norm"], signals.num_frozen
        if lowest == signals.num_blocks or norms[lowest] > self.ratio * norms[-1]:
            return Decision(lowest, "norm", "large"), state
        return Decision(lowest + 1, "norm", f"{norms[lowest]:.3g} is small", {"norm": norms[lowest]}), state


@dataclass(frozen=True, kw_only=True)
class TooMany(FreezePolicy):
    """Freezes more blocks than there are, where it is asked in a run and not before one."""

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        foreseen = signals["gradient_norm"] == falling_norms(signals.num_blocks, signals.num_frozen)
        return Decision(signals.num_frozen if foreseen else 99, "own", "a reason"), state


@dataclass(frozen=True, kw_only=True)
class ByRank(FreezePolicy):
    """Freezes a block on rank 1 alone."""

    interval: float | None = 0.2

    def decide(self, signals: Signals, state: State) -> tuple[Decision, State]:
        return Decision(signals.num_frozen + (dist.get_rank() == 1), "own", "a reason"), state


def refusal_of_policy(overrides: tuple[str, ...], folder: Path) -> str:
    """One rank of a run whose policy decides otherwise on each rank; gives the error."""
    config = replace(loaded(*overrides, "checkpoint=off", "parallel.timeout_s=20"), freeze=ByRank())
    with with_made_up_times():
        trainer = pt.ElasticTrainer.from_config(config, folder)
        with trainer, pytest.raises(pt.UserError) as error:
            for _ in trainer:
                pass
    return str(error.value)


@contextmanager
def row() -> Iterator[None]:
    with mock.patch.dict(COLLECTORS, {"weight_norm": WeightNorm}):
        yield


def run_with_new_policy(overrides: tuple[str, ...], folder: Path) -> list[tuple[Any, ...]]:
    """One rank of a run; gives what the policy saw and decided."""
    seen: list[tuple[Any, ...]] = []

    class Seen(pt.Callback):
        def on_decision(self, trainer: Any, signals: Signals, decision: Decision) -> None:
            seen.append((signals["weight_norm"], decision.num_frozen))

    config = replace(loaded(*overrides, "checkpoint=off"), freeze=SmallWeights())
    with row(), with_made_up_times():
        trainer = pt.ElasticTrainer.from_config(config, folder, [Seen()])
        with trainer:
            for _ in trainer:
                pass
    return seen
