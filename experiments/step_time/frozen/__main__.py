"""Times the runtime's step at each frozen level against a loop by hand: ``python -m experiments.step_time.frozen``.

The loop by hand is what one writes to train the upper layers on features in memory: DistributedDataParallel over the
active layers, whose input is a row of one tensor. Without a cache it computes the frozen layers in every step, without
gradient and in evaluation mode. Both live in the same processes and take turns, as in ``step_time.py``.
"""

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.cache.bench import Bench, Variant
from experiments.ranks import SEED, run_ranks
from experiments.record import markdown, publish
from experiments.step_time.cases import BERT, WIDE, Case, write_bert
from experiments.step_time.loops import OPTIMIZER
from experiments.step_time.step_time import CPU, WALL, Turn, goes_on
from pipetransformer.autopipe.plan import layer_above
from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.result import StepResult
from pipetransformer.training.loader import ComingBatch

MINILM = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CASES = (
    Case("BERT of MiniLM's size, 6 blocks, 32 tokens", "bert", 8, MINILM | NO_DROPOUT),
    Case("ViT 192 wide, 6 blocks, 16 tokens", "vit", 16, {**WIDE, "depth": 6, "proj_drop_rate": 0.0}),
)
NUM_WARMUP_STEPS, FILL_BATCH = 3, 64
TURN_S, MOST_STEPS = 0.3, 10  # of a turn
HEADER = (
    "model", "ranks", "frozen", "cached", "by hand, ms", "runtime, ms", "more, ms", "runtime / by hand", "quartiles",
    "in CPU time", "rounds",
)  # fmt: skip


@dataclass(frozen=True)
class Level:
    """The time of both loops at one level in each round, on rank 0."""

    name: str
    num_ranks: int
    num_frozen: int
    cached: bool
    plain: tuple[Turn, ...]
    elastic: tuple[Turn, ...]

    def ratios(self, kind: int) -> list[float]:
        """Returns runtime over loop by hand in each round."""
        return [elastic[kind] / plain[kind] for plain, elastic in zip(self.plain, self.elastic, strict=True)]

    def row(self) -> tuple[str, ...]:
        ratios = self.ratios(WALL)
        low, _, high = quantiles(ratios, n=4, method="inclusive")
        plain_ms, elastic_ms = (1000 * median(turn[WALL] for turn in own) for own in (self.plain, self.elastic))
        return (
            self.name, f"{self.num_ranks}", f"{self.num_frozen}", "yes" if self.cached else "no", f"{plain_ms:.1f}",
            f"{elastic_ms:.1f}", f"{elastic_ms - plain_ms:.1f}", f"{median(ratios):.3f}", f"{low:.3f}-{high:.3f}",
            f"{median(self.ratios(CPU)):.3f}", f"{len(ratios)}",
        )  # fmt: skip


class HandLoop:
    """The loop that one writes by hand for a frozen prefix.

    Args:
        stack: A model of its own, with the weights of the runtime's.
    """

    def __init__(self, bench: Bench, stack: LayerStack, num_frozen: int, cached: bool) -> None:
        self._bench, first = bench, layer_above(num_frozen)
        self._frozen = nn.ModuleList(stack[index] for index in range(first)).eval().requires_grad_(False)
        self._active = _Active([stack[index] for index in range(first, len(stack))])
        self._model: nn.Module = self._active
        if dist.get_world_size() > 1:  # nobody wraps a model for one process
            self._model = DistributedDataParallel(self._active, gradient_as_bucket_view=True)
        optimizer = OPTIMIZER.build(self._active.parameters())
        assert optimizer is not None
        self._optimizer = optimizer
        self._features = self._compute_all() if cached and num_frozen else None
        self.loss = 0.0

    def _compute_all(self) -> Tensor:
        """Computes the features of all samples, (N, T, D)."""
        ids = range(len(self._bench.split))
        parts = [self._prefix(list(ids[start : start + FILL_BATCH])) for start in range(0, len(ids), FILL_BATCH)]
        return torch.cat(parts)

    @torch.no_grad()
    def _prefix(self, ids: list[int]) -> Tensor:
        x, context = self._bench.split.inputs(ids, None), self._bench.split.context(ids, None)
        for layer in self._frozen:
            x = layer(x, **context)
        return x

    def step(self, ids: np.ndarray) -> None:
        own = np.array_split(ids, dist.get_world_size())[dist.get_rank()]
        x = self._prefix(own.tolist()) if self._features is None else self._features[torch.from_numpy(own)]
        output = self._model(x, self._bench.split.context(own.tolist(), None))
        loss = nn.functional.cross_entropy(output, self._bench.split.targets(own.tolist()))
        loss.backward()
        assert OPTIMIZER.clip_norm is not None
        nn.utils.clip_grad_norm_(self._active.parameters(), OPTIMIZER.clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self.loss = loss.item()


class _Active(nn.Module):
    """The layers that train, as one module."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, context: dict[str, Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, **context)
        return x


class RuntimeLoop:
    """The elastic runtime at a frozen level; losses are read one step late, as the trainer does."""

    def __init__(self, bench: Bench, num_frozen: int, cached: bool) -> None:
        self._bench, budgets = bench, (1.0, 0.0) if cached and num_frozen else None
        self._variant: Variant = bench.variant(f"level{num_frozen}", num_frozen, budgets)
        self._result: StepResult | None = None
        bench.runtime.apply_plan(self._variant.plan)
        self._variant.cache_session.start_reading(self._variant.plan.cache_level)

    def prefetch(self, batches: Sequence[np.ndarray]) -> None:
        self._variant.cache_session.prefetch(map(ComingBatch, batches))

    def release(self) -> None:
        self._variant.cache_session.release()

    @property
    def loss(self) -> float:
        assert self._result is not None
        return self._result.loss

    def step(self, ids: np.ndarray) -> None:
        before, runtime = self._result, self._bench.runtime
        self._result = runtime.train_step(self._variant.loader, ids, 0, OPTIMIZER.peak)
        if before is not None:
            _ = before.loss


def measure(case: Case, num_frozen: int, cached: bool, seconds: float) -> Level:
    """Times both loops at one level on this rank, in rounds; every other round the other goes first.

    Turns are short, so that a slow second falls on both loops.
    """
    with ExitStack() as closing:
        bench = Bench(case, closing)
        folder = Path(closing.enter_context(TemporaryDirectory()))
        write_bert(folder)
        hand = HandLoop(bench, case.stack(folder), num_frozen, cached)
        runtime = RuntimeLoop(bench, num_frozen, cached)
        closing.callback(runtime.release)
        turns: dict[object, list[Turn]] = {hand: [], runtime: []}
        batches = bench.batches(0)
        num_steps = _steps_of_a_turn(_warm_up(hand, runtime, batches))
        end_s = time.perf_counter() + seconds
        while goes_on(len(turns[hand]), end_s):
            for loop in (hand, runtime) if len(turns[hand]) % 2 else (runtime, hand):
                turns[loop].append(_turn(loop, batches, num_steps))
        return Level(case.name, dist.get_world_size(), num_frozen, cached, tuple(turns[hand]), tuple(turns[runtime]))


def _warm_up(hand: HandLoop, runtime: RuntimeLoop, batches: Sequence[np.ndarray]) -> float:
    """Takes the first steps, which allocate; their losses show that both loops do the same training.

    Returns:
        Seconds of the last step by hand.
    """
    seconds = 0.0
    runtime.prefetch(batches[:NUM_WARMUP_STEPS])
    for ids in batches[:NUM_WARMUP_STEPS]:
        start = time.perf_counter()
        hand.step(ids)
        seconds = time.perf_counter() - start
        runtime.step(ids)
        mean = torch.tensor(hand.loss, dtype=torch.float64)
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
        assert abs(mean.item() - runtime.loss) < 1e-3 * abs(runtime.loss), (mean.item(), runtime.loss)
    runtime.release()
    return seconds


def _steps_of_a_turn(step_s: float) -> int:
    """Returns the same number on every rank."""
    slowest = torch.tensor(step_s)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(MOST_STEPS, round(TURN_S / slowest.item())))


def _turn(loop: HandLoop | RuntimeLoop, batches: Sequence[np.ndarray], num_steps: int) -> Turn:
    own = [batches[index % len(batches)] for index in range(num_steps)]
    if isinstance(loop, RuntimeLoop):
        loop.prefetch(own)
    dist.barrier()
    wall_s, cpu_s = [], []
    for ids in own:
        wall, cpu = time.perf_counter(), time.process_time()
        loop.step(ids)
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
    if isinstance(loop, RuntimeLoop):
        loop.release()
    return median(wall_s), median(cpu_s)


def measure_all(cases: Sequence[Case], levels: Sequence[int], seconds: float) -> list[Level]:
    """Times all levels of all cases, cached and not, on this rank."""
    torch.manual_seed(SEED)
    pairs = [(level, cached) for level in levels for cached in ((False, True) if level else (False,))]
    return [measure(case, *pair, seconds) for case in cases for pair in pairs]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=20, help="of each level")
    parser.add_argument("--levels", type=int, nargs="+", default=[0, 2, 4, 5, BERT["num_hidden_layers"]])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=range(len(CASES)))
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    options = parser.parse_args(arguments)
    cases = [CASES[index] for index in options.cases]
    levels: list[Level] = []
    for num_ranks in options.ranks:
        levels += run_ranks(num_ranks, measure_all, cases, options.levels, options.seconds)
    publish(markdown(HEADER, (level.row() for level in levels)), [asdict(level) for level in levels], options.into)


if __name__ == "__main__":
    main()
