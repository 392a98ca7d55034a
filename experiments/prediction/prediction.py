"""Holds the cost model against the clock: ``python -m experiments.prediction.prediction``."""

import argparse
import gc
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch

from experiments.ranks import SEED, run_ranks
from experiments.record import markdown, publish
from experiments.step_time.cases import CASES as STEPS
from experiments.step_time.cases import NUM_TEXTS, Case, write_bert
from experiments.step_time.loops import OPTIMIZER, ElasticLoop
from pipetransformer.autocache.bandwidth import read_times
from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.capacity import CacheCapacity, FeatureFormat
from pipetransformer.autocache.layout import Budgets
from pipetransformer.autopipe.constraints import PlanConstraints
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.search.search import best_plan
from pipetransformer.config.sections import Parallel
from pipetransformer.data.base import Split
from pipetransformer.data.tasks import Task
from pipetransformer.data.text.document_split import Documents, DocumentSplit
from pipetransformer.data.text.split import Ragged, Tokens
from pipetransformer.data.token_tasks import causal_language_modelling
from pipetransformer.models.huggingface import HuggingFaceModel
from pipetransformer.models.stack import LayerStack
from pipetransformer.planning.planner import Planner
from pipetransformer.runtime.host_memory import keep_freed_memory
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.cache_setup import CacheSetup, WorldCommunicator
from pipetransformer.training.loader import BatchLoader, sample_source
from pipetransformer.training.planner_setup import make_planner
from pipetransformer.training.world import NodeLayout

WORLD, NUM_WARMUP_STEPS, CPU, FLOAT32 = 2, 2, torch.device("cpu"), PRECISIONS["float32"]
HEADER = ("model", "plan", "predicted, ms", "measured, ms", "predicted / measured", "quartiles")


@dataclass(frozen=True)
class Decoder(Case):
    """A GPT-2 that learns the next token: its head and its loss over the vocabulary take half as long as its blocks."""

    def stack(self, bert_folder: Path) -> LayerStack:
        folder = bert_folder / "decoder"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2", **self.options}), encoding="utf-8")
        return HuggingFaceModel(name=str(folder), pretrained=False).build(self.task.head, (), seed=1)

    @property
    def task(self) -> Task:
        return causal_language_modelling(self.options["vocab_size"])

    def split(self) -> Split:
        sizes = NUM_TEXTS, self.options["n_positions"]
        tokens = np.random.default_rng(0).integers(5, self.options["vocab_size"], sizes)
        documents = Documents(Tokens(Ragged.of([*tokens]), None, 0), np.ones(NUM_TEXTS, np.int64), 0, [])
        return DocumentSplit("train", documents, self.task)


NO_DROPOUT = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
IDS = {"bos_token_id": 1, "eos_token_id": 2}
SIZES = {**IDS, "n_embd": 192, "n_layer": 6, "n_head": 4, "n_positions": 64, "vocab_size": 8000}
CASES = (*STEPS, Decoder("GPT-2 192 wide, 6 blocks, 64 tokens, 8,000 words", "gpt2", 16, SIZES | NO_DROPOUT))


@dataclass(frozen=True)
class Wanted:
    """A plan but for where its stages end.

    Attributes:
        frozen: Share of the blocks.
    """

    name: str
    constraints: PlanConstraints
    frozen: float = 0.0
    cached: bool = False

    def plan(self, planner: Planner, num_blocks: int, batch_size: int) -> Plan:
        num_frozen = round(self.frozen * num_blocks)
        level = num_frozen if self.cached else 0
        return best_plan(planner.profile, planner.cluster, batch_size, num_frozen, level, self.constraints)


DATA, SINGLE = (
    PlanConstraints(num_stages=1, num_replicas=2, num_microbatches=1),
    PlanConstraints(num_stages=1, num_replicas=1),
)
PLANS = (
    Wanted("data", DATA),
    Wanted("data, 4 micro-batches", PlanConstraints(num_stages=1, num_replicas=2, num_microbatches=4)),
    Wanted("data, a third frozen", DATA, 1 / 3),
    Wanted("data, a third frozen and cached", DATA, 1 / 3, cached=True),
    Wanted("data, two thirds frozen and cached", DATA, 2 / 3, cached=True),
    Wanted("data, checkpointing", PlanConstraints(num_stages=1, num_replicas=2, num_microbatches=1, recompute=True)),
    Wanted("single device", PlanConstraints(num_stages=1, num_replicas=1, num_microbatches=1)),
    Wanted("2 stages, 2 micro-batches, 1F1B", PlanConstraints(2, 1, 2, "1f1b")),
    Wanted("2 stages, 4 micro-batches, 1F1B", PlanConstraints(2, 1, 4, "1f1b")),
    Wanted("2 stages, 8 micro-batches, GPipe", PlanConstraints(2, 1, 8, "gpipe")),
    Wanted("2 stages, 4 micro-batches, a third frozen", PlanConstraints(2, 1, 4, "1f1b"), 1 / 3),
    Wanted(
        "2 stages, 4 micro-batches, a third frozen and cached", PlanConstraints(2, 1, 4, "1f1b"), 1 / 3, cached=True
    ),
    Wanted(
        "4 stages, 2 on each device, 4 micro-batches", PlanConstraints(4, 1, 4, "interleaved1f1b", stages_per_rank=2)
    ),
)


@dataclass(frozen=True)
class Times:
    """Seconds of a step under one plan, a number for each round."""

    case: str
    plan: str
    predicted: tuple[float, ...]
    measured: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [one / two for one, two in zip(self.predicted, self.measured, strict=True)]


class Bench:
    """One rank's model under one plan after the other."""

    def __init__(self, case: Case, folder: Path) -> None:
        write_bert(folder)
        keep_freed_memory()  # as a run does
        self.case, self.stack = case, case.stack(folder)
        split = case.split()
        source = sample_source(split, self.stack.hidden_shape)
        feature_format = FeatureFormat(source.hidden_size, FLOAT32.param_dtype)
        capacity = CacheCapacity([source], feature_format, Budgets(1 << 30, disk_bytes=0), persistent=False)
        num_tokens, share = int(np.median(source.lengths)), case.batch_size // WORLD
        read = read_times(feature_format, num_tokens, capacity.bytes_by_tier, folder, share)
        self._cache = AutoCache(capacity, {source.name: folder}, WorldCommunicator())
        self._cache_setup = CacheSetup(self._cache, read=read)
        self._cache.open()
        self._loader = BatchLoader(split, source, SEED, self._cache.reader)
        self._loop = ElasticLoop(case.stack(folder), split, case.batch_size, self._loader, case.task)
        self._runtime = self._loop.runtime

    def planner(self) -> Planner:
        """Measures layers and links anew."""
        about = self.stack, self.case.task.loss, self._loader, OPTIMIZER, Parallel(), self.case.batch_size, CPU, FLOAT32
        return make_planner(*about, NodeLayout.here(), self._cache_setup)

    def seconds(self, plan: Plan, num_steps: int) -> float:
        """Returns the median step, as this rank sees it."""
        if plan.cache_level != self._cache.level:
            self._cache.clear()
        if plan.cache_level > self._cache.level:
            with self._runtime.frozen_forward(0, plan.cache_level) as compute:
                wanted = [(self._loader.source, np.arange(len(self._loader.split)))]
                self._cache.advance(plan.cache_level, wanted, compute)
            self._cache.start_reading(None)
        self._runtime.apply_plan(plan)
        self._loop.read_ahead()
        seconds = [self._one_step() for _ in range(NUM_WARMUP_STEPS + num_steps)]
        return median(seconds[NUM_WARMUP_STEPS:])

    def _one_step(self) -> float:
        start = time.perf_counter()
        self._loop.step()
        seconds = time.perf_counter() - start
        self._loop.loss()  # ends what is still on its way
        return seconds

    def close(self) -> None:
        self._cache.close()
        self._loop.close()


def measure(case: Case, wanted: Sequence[Wanted], num_rounds: int, num_steps: int) -> list[Times]:
    """Predicts and times every plan in every round; the plans are those that the first profile gives."""
    with tempfile.TemporaryDirectory() as own:
        bench = Bench(case, Path(own))
        times = _measure(bench, wanted, num_rounds, num_steps)
        bench.close()
    return times


def _measure(bench: Bench, wanted: Sequence[Wanted], num_rounds: int, num_steps: int) -> list[Times]:
    case, planner = bench.case, bench.planner()
    plans = [one.plan(planner, bench.stack.num_blocks, case.batch_size) for one in wanted]
    predicted: list[list[float]] = [[] for _ in plans]
    measured: list[list[float]] = [[] for _ in plans]
    bench.seconds(Plan(0, 0, ((0, len(bench.stack) - 1),), WORLD, 1), num_steps=1)  # allocates and connects
    gc.freeze()
    for _ in range(num_rounds):
        planner = bench.planner()
        for index, plan in enumerate(plans):
            predicted[index].append(planner.predict(plan))
            measured[index].append(bench.seconds(plan, num_steps))
    return [
        Times(case.name, one.name, tuple(p), tuple(m)) for one, p, m in zip(wanted, predicted, measured, strict=True)
    ]


def rows(times: Sequence[Times]) -> Iterator[tuple[str, ...]]:
    for own in times:
        low, middle, high = np.quantile(own.ratios, (0.25, 0.5, 0.75))
        yield (
            own.case,
            own.plan,
            f"{1000 * median(own.predicted):.1f}",
            f"{1000 * median(own.measured):.1f}",
            f"{middle:.2f}",
            f"{low:.2f}-{high:.2f}",
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="each profiles anew and times every plan once")
    parser.add_argument("--steps", type=int, default=7, help="steps of a plan in a round")
    parser.add_argument(
        "--cases",
        type=int,
        nargs="+",
        choices=range(len(CASES)),
        default=[0, 2, 4],
        help=f"{len(STEPS)} models of the step-time benchmark, from 0, and a decoder",
    )
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    cases = [CASES[index] for index in options.cases]
    times = [own for case in cases for own in run_ranks(WORLD, measure, case, PLANS, options.rounds, options.steps)]
    table = markdown(HEADER, rows(times))
    publish(table, [asdict(own) for own in times], options.into)


if __name__ == "__main__":
    main()
