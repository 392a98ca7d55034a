"""Times transitions between plans: ``python -m experiments.transition.transition``."""

import argparse
import gc
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from experiments.ranks import SEED, run_ranks
from experiments.record import markdown, publish
from experiments.step_time.cases import NUM_CLASSES, RandomText, write_bert
from experiments.step_time.loops import make_runtime
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.tasks import text_classification
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.result import TransitionReport
from pipetransformer.training.loader import BatchLoader

NUM_ROUNDS, BATCH_SIZE = 3, 4
MINILM = {"vocab_size": 30522, "hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
BASE = {"vocab_size": 30522, "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
HEADER = ("model", "transition", "MB sent", "seconds", "groups", "moving", "rebuilding")


@dataclass(frozen=True)
class Case:
    """A model, and the plans that are gone through in a round.

    Attributes:
        stages: For each plan its frozen blocks, number of stages and replicas.
    """

    name: str
    num_blocks: int
    options: dict[str, int]
    world: int
    stages: tuple[tuple[int, int, int], ...]

    def plans(self) -> list[Plan]:
        return [self._plan(*stage) for stage in self.stages]

    def _plan(self, num_frozen: int, num_stages: int, num_replicas: int) -> Plan:
        """Frozen blocks stay in the first stage, as without a cache."""
        ends = np.linspace(0, self.num_blocks + 2, num_stages + 1).astype(int).tolist()
        stages = tuple((first, end - 1) for first, end in pairwise(ends))
        return Plan(num_frozen, 0, stages, num_replicas, BATCH_SIZE // num_replicas, "gpipe")

    def stack(self, folder: Path) -> LayerStack:
        options = {**self.options, "num_hidden_layers": self.num_blocks}
        spec = HuggingFaceModel(name=str(folder), pretrained=False, options=options)
        return spec.build(text_classification(NUM_CLASSES).head, (), seed=1)


CASES = (
    Case("MiniLM", 6, MINILM, 2, ((0, 2, 1), (2, 1, 2))),
    Case("BERT-base", 12, BASE, 4, ((0, 4, 1), (4, 2, 2), (8, 1, 4))),
)


def measure(case: Case) -> list[TransitionReport]:
    """Goes through the plans of a case round and round; the reports of this rank."""
    with tempfile.TemporaryDirectory() as name:
        write_bert(Path(name))
        stack = case.stack(Path(name))
    loader = BatchLoader.uncached(RandomText(), stack.hidden_shape, SEED)
    reports = []
    with make_runtime(stack) as runtime:
        gc.freeze()  # as a run does before its first step, so that transitions collect the rest quickly
        for _ in range(NUM_ROUNDS):
            for plan in case.plans():
                reports.append(runtime.apply_plan(plan))
                runtime.train_step(loader, np.arange(BATCH_SIZE), step=0, rate=1e-4)
    return reports[1:]  # the first plan is no transition


def rows(case: Case, reports: list[TransitionReport]) -> Iterator[tuple[str, ...]]:
    num_plans = len(case.stages)
    for target in [*range(1, num_plans), 0]:
        own = [report for number, report in enumerate(reports, start=1) if number % num_plans == target]
        parts = [median(getattr(report, name) for report in own) for name in ("group_s", "move_s", "rebuild_s")]
        before, after = (case.stages[index] for index in ((target - 1) % num_plans, target))
        yield (
            f"{case.name}, {case.world} processes",
            f"{_describe(before)} to {_describe(after)}",
            f"{median(report.bytes_moved for report in own) / 1e6:.0f}",
            f"{sum(parts):.2f}",
            *(f"{part / sum(parts):.0%}" for part in parts),
        )


def _describe(stage: tuple[int, int, int]) -> str:
    return f"{stage[1]} x {stage[2]}, {stage[0]} frozen"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases", type=int, nargs="+", choices=range(len(CASES)), default=range(len(CASES)), help="models, from 0"
    )
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    cases = [CASES[index] for index in options.cases]
    reports = {case.name: run_ranks(case.world, measure, case) for case in cases}
    table = markdown(HEADER, [row for case in cases for row in rows(case, reports[case.name])])
    publish(table, {name: [asdict(report) for report in own] for name, own in reports.items()}, options.into)


if __name__ == "__main__":
    main()
