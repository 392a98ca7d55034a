"""Measures how long steps wait for their input, and how fast it is read: ``python -m experiments.input.input``.

All arms of a comparison live in one process and take turns, so that whatever else the machine does falls on each.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import yaml

from experiments.input.pictures import SIZE, Ours, Torchvision, pictures, write_pictures
from experiments.ranks import SEED, run_ranks
from experiments.record import markdown, publish, spread
from experiments.step_time.cases import VIT_TINY
from experiments.step_time.loops import OPTIMIZER, make_runtime
from pipetransformer.autodp.sampler import batch_ids
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.base import ImageFormat, Split
from pipetransformer.data.images.datasets import Digits
from pipetransformer.models.base import Head
from pipetransformer.models.stack import LayerStack
from pipetransformer.models.timm import TimmModel
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.training.input_reader import InputReader
from pipetransformer.training.loader import BatchLoader, ComingBatch
from pipetransformer.training.step_log import SHORT_WAIT

NUM_CLASSES, FEWEST_ROUNDS, MAX_STEPS_OF_TURN = 10, 2, 8
WAIT_HEADER = (
    "input", "workers", "step, ms", "waits for input, median", "steps that wait less than 5 %", "step / without",
    "range", "steps",
)  # fmt: skip
READ_HEADER = ("workers", "this package, pictures/s", "torchvision, pictures/s", "ratio, median", "range", "rounds")


@dataclass
class Arm:
    """Training steps with a number of workers.

    Attributes:
        step_s: Seconds of each step, turn by turn.
        wait_s: Of these, seconds in which it waited for its input.
    """

    num_workers: int
    step_s: list[list[float]] = field(default_factory=list)
    wait_s: list[list[float]] = field(default_factory=list)

    @property
    def shares(self) -> np.ndarray:
        """Fraction of each step that was waiting."""
        return np.concatenate(self.wait_s) / np.concatenate(self.step_s)


@dataclass(frozen=True)
class Waiting:
    """Steps on one kind of input, by the number of workers."""

    name: str
    arms: tuple[Arm, ...]

    def rows(self) -> list[tuple[str, ...]]:
        without = self.arms[0]
        return [
            (
                self.name,
                str(arm.num_workers),
                f"{1000 * median(np.concatenate(arm.step_s)):.0f}",
                f"{median(arm.shares):.1%}",
                f"{np.mean(arm.shares < SHORT_WAIT):.0%}",
                *spread([median(own) / median(other) for own, other in zip(arm.step_s, without.step_s, strict=True)]),
                str(len(arm.shares)),
            )
            for arm in self.arms
        ]


@dataclass(frozen=True)
class Reading:
    """Pictures per second in each round, without a model."""

    num_workers: int
    ours: tuple[float, ...]
    torchvision: tuple[float, ...]

    def row(self) -> tuple[str, ...]:
        rates = (f"{median(rates):.0f}" for rates in (self.ours, self.torchvision))
        ratios = [own / other for own, other in zip(self.ours, self.torchvision, strict=True)]
        return (str(self.num_workers), *rates, *spread(ratios), str(len(ratios)))


class Trained:
    """One model that trains on the batches of several loaders in turns."""

    def __init__(self, stack: LayerStack, split: Split, batch_size: int) -> None:
        self._runtime, self._split, self._batch_size = make_runtime(stack), split, batch_size
        self._runtime.apply_plan(Plan(0, 0, ((0, len(stack) - 1),), num_replicas=1, num_microbatches=1))
        self._stack, self._order, self._step = stack, np.random.default_rng(SEED).permutation(len(split)), 0

    def loader(self, reader: InputReader) -> BatchLoader:
        return BatchLoader.uncached(self._split, self._stack.hidden_shape, SEED, reader)

    def turn(self, loader: BatchLoader) -> tuple[list[float], list[float]]:
        """Takes steps on some batches, announced as a run does; the first one, which finds nothing read, is left out.

        Returns:
            Seconds of each step, and how many of them it waited.
        """
        runtime, step_s, wait_s = self._runtime, list[float](), list[float]()
        assert runtime.topology is not None
        num = min(MAX_STEPS_OF_TURN, len(self._order) // self._batch_size)
        batches = [batch_ids(self._order, index, self._batch_size) for index in range(num)]
        coming = (ComingBatch(ids, self._step + number) for number, ids in enumerate(batches))
        loader.prefetch(list(coming), runtime.topology)
        for ids in batches:
            waited_s, start = loader.waited_s, time.perf_counter()
            self._train(runtime, loader, ids)
            step_s.append(time.perf_counter() - start)
            wait_s.append(loader.waited_s - waited_s)
        return step_s[1:], wait_s[1:]

    def _train(self, runtime: ElasticRuntime, loader: BatchLoader, ids: np.ndarray) -> None:
        _ = runtime.train_step(loader, ids, self._step, OPTIMIZER.rate(self._step, num_steps=1)).loss
        self._step += 1

    def close(self) -> None:
        self._runtime.close()


def rounds(turns: Sequence[Callable[[], None]], seconds: float) -> None:
    """Gives everyone a turn for so long, each first in every other round; nothing counts of the round before."""
    for turn in turns:
        turn()
    end_s, number = time.perf_counter() + seconds, 0
    while number < FEWEST_ROUNDS or time.perf_counter() < end_s:
        for turn in turns if number % 2 else turns[::-1]:
            turn()
        number += 1


def measure_waiting(
    name: str, make: Callable[[], tuple[LayerStack, Split]], batch_size: int, workers: Sequence[int], seconds: float
) -> Waiting:
    """Times steps on this rank with each number of workers."""
    arms, (stack, split) = tuple(map(Arm, workers)), make()
    with ExitStack() as closing:
        readers = [closing.enter_context(InputReader([split], arm.num_workers)) for arm in arms]
        trained = Trained(stack, split, batch_size)
        closing.callback(trained.close)

        def turn_of(arm: Arm, loader: BatchLoader) -> Callable[[], None]:
            def turn() -> None:
                step_s, wait_s = trained.turn(loader)
                arm.step_s.append(step_s)
                arm.wait_s.append(wait_s)

            return turn

        rounds([turn_of(arm, trained.loader(reader)) for arm, reader in zip(arms, readers, strict=True)], seconds)
    return Waiting(name, tuple(Arm(arm.num_workers, arm.step_s[1:], arm.wait_s[1:]) for arm in arms))


def measure_reading(folder: Path, order: Sequence[int], batch_size: int, num_workers: int, seconds: float) -> Reading:
    """Times both ways to read all pictures once."""
    both = [kind(folder, order, batch_size, num_workers) for kind in (Ours, Torchvision)]
    rates: list[list[float]] = [[], []]

    def turn_of(number: int) -> Callable[[], None]:
        def turn() -> None:
            start = time.perf_counter()
            num_read = sum(len(inputs) for inputs, _ in both[number].batches())
            rates[number].append(num_read / (time.perf_counter() - start))

        return turn

    try:
        rounds([turn_of(0), turn_of(1)], seconds)
    finally:
        for each in both:
            each.close()
    return Reading(num_workers, tuple(rates[0][1:]), tuple(rates[1][1:]))


def photographs(folder: Path, options: dict[str, Any]) -> tuple[LayerStack, Split]:
    """Returns ViT-Ti/16 at 224 pixels with some options changed, and the pictures of a folder."""
    model = TimmModel(name="vit_tiny_patch16_224", pretrained=False, options=options)
    return model.build(Head("image", NUM_CLASSES), (3, SIZE, SIZE), SEED), pictures(folder)


def digits() -> tuple[LayerStack, Split]:
    """Returns the model and the data of the default run."""
    model = TimmModel(
        name="vit_tiny_patch16_224", pretrained=False, options=yaml.safe_load(VIT_TINY.read_text())["options"]
    )
    return model.build(Head("image", NUM_CLASSES), (1, 8, 8), SEED), Digits().load(ImageFormat()).train


def measure(options: argparse.Namespace) -> tuple[list[Waiting], list[Reading]]:
    """Measures everything on this rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = write_pictures(Path(name), options.pictures)
        order = np.random.default_rng(SEED).permutation(options.pictures).tolist()
        make = partial(photographs, folder, {"depth": options.depth})
        waiting = [
            measure_waiting("JPEG files", make, options.batch_size, options.workers, options.seconds),
            measure_waiting("digits, in memory", digits, 32, options.workers[:2], options.seconds / 4),
        ]
        reading = [
            measure_reading(folder, order, options.batch_size, num_workers, options.seconds / 4)
            for num_workers in options.workers
        ]
    return waiting, reading


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--depth", type=int, default=4, help="blocks of the ViT")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1], help="0 first, with which others compare")
    parser.add_argument("--seconds", type=float, default=20, help="of the comparison of steps; others take a quarter")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    waiting, reading = run_ranks(1, measure, options)
    tables = (
        markdown(WAIT_HEADER, [row for each in waiting for row in each.rows()]),
        markdown(READ_HEADER, [each.row() for each in reading]),
    )
    results = {"waiting": [asdict(each) for each in waiting], "reading": [asdict(each) for each in reading]}
    publish("\n\n".join(tables), results, options.into)


if __name__ == "__main__":
    main()
