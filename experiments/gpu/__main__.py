"""Times the runtime's step on one GPU against a script's own: ``python -m experiments.gpu``.

The loops live in one process and take turns, so that whatever else the device does falls on all of them.
"""

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

import torch

from experiments.gpu.cases import CASES, SMALL, Case
from experiments.gpu.loops import ElasticLoop, Loop, PlainLoop
from experiments.record import markdown, publish
from pipetransformer.config.sections import Parallel
from pipetransformer.training.world import open_world

NO_GPU = "experiments.gpu: there is no GPU here, so nothing is timed; --device cpu --small shows that the code works"
NUM_WARMUP_STEPS, FEWEST_ROUNDS = 5, 2
NUM_COMPARED = 2  # steps of 16 bits whose losses are compared: later ones differ by what rounding has grown to
GIB = 2**30
HEADER = (
    "model", "frozen", "plain, ms", "runtime, ms", "runtime / plain", "cached, ms", "cached / plain", "plain, GiB",
    "runtime, GiB", "cached, GiB", "rounds",
)  # fmt: skip
PLAIN, RUNTIME, CACHED = "plain", "runtime", "cached"
Make = Callable[[], Loop]


class OtherTraining(ValueError):
    """The loops that are compared see other losses."""


@dataclass(frozen=True)
class Measured:
    """A model at one frozen prefix.

    Attributes:
        step_s: Mean seconds of a step in each turn, by loop.
        peak_bytes: Most device memory of a loop that is alone; ``None`` on the CPU.
    """

    name: str
    num_frozen: int
    step_s: dict[str, tuple[float, ...]]
    peak_bytes: dict[str, int | None]

    def ratios(self, loop: str) -> list[float]:
        """Returns the time of a loop over that of the plain one, in each round."""
        return [own / plain for own, plain in zip(self.step_s[loop], self.step_s[PLAIN], strict=True)]

    def row(self) -> tuple[str, ...]:
        """Returns cells of the table; a prefix of none has no cache."""
        cached = CACHED in self.step_s
        return (
            self.name,
            str(self.num_frozen),
            self._ms(PLAIN),
            self._ms(RUNTIME),
            f"{median(self.ratios(RUNTIME)):.3f}",
            self._ms(CACHED) if cached else "",
            f"{median(self.ratios(CACHED)):.3f}" if cached else "",
            *(self._gib(loop) for loop in (PLAIN, RUNTIME, CACHED)),
            str(len(self.step_s[PLAIN])),
        )

    def _ms(self, loop: str) -> str:
        return f"{1000 * median(self.step_s[loop]):.1f}"

    def _gib(self, loop: str) -> str:
        peak = self.peak_bytes.get(loop)
        return "" if peak is None else f"{peak / GIB:.2f}"


def measure(
    case: Case, num_frozen: int, device: torch.device, precision: str, compiles: bool, seconds: float, num_steps: int
) -> Measured:
    """Measures the memory of each loop alone, and then times them in rounds, each time another one first."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as closing:
        arguments = case, Path(name), device, precision, num_frozen, compiles
        makes: dict[str, Make] = {PLAIN: partial(PlainLoop, *arguments), RUNTIME: partial(ElasticLoop, *arguments)}
        if num_frozen:
            makes[CACHED] = partial(ElasticLoop, *arguments, cached=True)
        peaks = {loop: peak_bytes(make, device) for loop, make in makes.items()}
        loops = {loop: make() for loop, make in makes.items()}
        for loop in loops.values():
            closing.callback(loop.close)
        warm_up(list(loops.values()), same_losses=not case.draws, exact=precision == "float32")
        turns: dict[str, list[float]] = {loop: [] for loop in loops}
        end_s, num_rounds = time.perf_counter() + seconds, 0
        while num_rounds < FEWEST_ROUNDS or time.perf_counter() < end_s:
            names = list(loops)
            for loop in names[num_rounds % len(names) :] + names[: num_rounds % len(names)]:
                turns[loop].append(take_turn(loops[loop], device, num_steps))
            num_rounds += 1
        return Measured(case.name, num_frozen, {loop: tuple(own) for loop, own in turns.items()}, peaks)


def measure_all(cases: Sequence[Case], device: torch.device, options: argparse.Namespace) -> tuple[list[Measured], str]:
    """Measures models at their frozen prefixes; says which ones do not train alike, and are not timed."""
    results, untimed = list[Measured](), ""
    settings = options.precision, options.compile, options.seconds, options.steps
    rows = [(case, number) for case in cases for number in options.prefixes or case.prefixes]
    for case, num_frozen in rows:
        try:
            found = measure(case, num_frozen, device, *settings)
        except OtherTraining as error:
            untimed += f"\n\nNot timed: {case.name}, {num_frozen} frozen: {error}."
            print(untimed.splitlines()[-1], flush=True)
            continue
        print(" | ".join(found.row()), flush=True)
        results.append(found)
    return results, untimed


def peak_bytes(make: Make, device: torch.device) -> int | None:
    """Returns the most memory that a loop takes from the second step on; ``None`` on the CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    gc.collect()
    if hasattr(torch._C, "_cuda_clearCublasWorkspaces"):  # kept for later products: the first loop alone would pay
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(device)
    loop = make()
    loop.step()
    torch.cuda.reset_peak_memory_stats(device)
    for _ in range(2):
        loop.step()
    synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    loop.close()
    del loop
    gc.collect()
    return peak


def warm_up(loops: Sequence[Loop], same_losses: bool, exact: bool) -> None:
    """Takes the first steps, which allocate and compile.

    Raises:
        OtherTraining: The loops see other losses, so they do not train the same.
    """
    for step in range(NUM_WARMUP_STEPS):
        for loop in loops:
            loop.step()
        losses = torch.tensor([loop.loss() for loop in loops])
        is_compared = same_losses and (exact or step < NUM_COMPARED)
        if is_compared and not torch.allclose(losses, losses[:1].expand_as(losses), rtol=1e-4 if exact else 3e-2):
            raise OtherTraining(f"the loops do not train the same: the losses of step {step} are {losses.tolist()}")


def take_turn(loop: Loop, device: torch.device, num_steps: int) -> float:
    """Returns the mean seconds of a step; the device is waited for before and after them, and not between."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        loop.step()
    synchronize(device)
    return (time.perf_counter() - start) / num_steps


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parser_of(prog: str, description: str | None) -> argparse.ArgumentParser:
    """Returns the parser of a command with the options that both have."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="small models, in place of the real ones")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--cases", type=int, nargs="+", help="models, from 0")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    return parser


def chosen_cases(parser: argparse.ArgumentParser, options: argparse.Namespace, cases: Sequence[Case]) -> list[Case]:
    """Returns the models that are asked for, and ends the command where there is no such model."""
    if any(index not in range(len(cases)) for index in options.cases or ()):
        parser.error(f"--cases {' '.join(map(str, options.cases))}: the models are 0 to {len(cases) - 1}")
    return [cases[index] for index in options.cases or range(len(cases))]


def title(options: argparse.Namespace) -> str:
    """Returns the line above a table: the device, and the type of matrix products."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return f"On one {name}, {options.precision}:\n\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of("python -m experiments.gpu", __doc__)
    parser.add_argument("--compile", action="store_true", help="torch.compile in all loops")
    parser.add_argument("--seconds", type=float, default=20, help="of each model and frozen prefix")
    parser.add_argument("--steps", type=int, default=10, help="steps of a turn")
    parser.add_argument("--prefixes", type=int, nargs="+", help="blocks that are frozen; those of the model otherwise")
    options = parser.parse_args(arguments)
    chosen = chosen_cases(parser, options, SMALL if options.small else CASES)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(NO_GPU)
        return
    with open_world(Parallel(device=options.device)) as device:
        results, untimed = measure_all(chosen, device, options)
    table = title(options) + markdown(HEADER, (each.row() for each in results)) + untimed
    publish(table, [asdict(each) for each in results], options.into)
    if untimed:
        sys.exit(1)


if __name__ == "__main__":
    main()
