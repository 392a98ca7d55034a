"""Two ways to do a step that take turns in the same processes, so that a ratio is taken within a round."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles

from experiments.record import markdown, publish
from experiments.step_time.step_time import CPU, WALL, Steps, Turn, take_turn

ROUNDS, STEPS = 15, 8


@dataclass(frozen=True)
class Timed:
    """Turns of one plan, or of one sum, in two ways on rank 0.

    Attributes:
        case: Name of the model.
        name: What is timed.
        before, after: The turns, each with the seconds of a step by the wall and of CPU.
    """

    case: str
    name: str
    before: tuple[Turn, ...]
    after: tuple[Turn, ...]

    def ratios(self, kind: int) -> list[float]:
        """Returns the times after over those before, round by round."""
        return [after[kind] / before[kind] for before, after in zip(self.before, self.after, strict=True)]

    def row(self) -> tuple[str, ...]:
        middles = (f"{1000 * median(turn[WALL] for turn in turns):.2f}" for turns in (self.before, self.after))
        ratios = self.ratios(WALL)
        low, middle, high = quantiles(ratios, n=4, method="inclusive")
        cpu = f"{median(self.ratios(CPU)):.2f}"
        return self.case, self.name, *middles, f"{middle:.2f}", f"{low:.2f}-{high:.2f}", cpu, str(len(ratios))


def take_turns(
    loops: Mapping[str, Steps], num_rounds: int, num_steps: int
) -> tuple[tuple[Turn, ...], tuple[Turn, ...]]:
    """Gives each loop a turn in each round, the other one first each time; the first round does not count."""
    turns: dict[str, list[Turn]] = {arm: [] for arm in loops}
    for index in range(num_rounds + 1):
        for arm in (*loops,) if index % 2 else (*reversed(loops),):
            turns[arm].append(take_turn(loops[arm], num_steps))
    before, after = (tuple(own[1:]) for own in turns.values())
    return before, after


def read_options(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads ``rounds``, ``steps`` and ``into``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a turn")
    parser.add_argument("--into", type=Path, help="folder whose results.json and README.md take the results")
    given = parser.parse_args(arguments)
    if given.rounds < 2 or given.steps < 1:
        parser.error(f"--rounds {given.rounds} --steps {given.steps}: quartiles take two rounds, and a turn a step")
    return given


def publish_turns(header: Sequence[str], found: Sequence[Timed], into: Path | None) -> None:
    """Prints a row for each and keeps them in a folder, if there is one."""
    publish(markdown(header, (one.row() for one in found)), [asdict(one) for one in found], into)
