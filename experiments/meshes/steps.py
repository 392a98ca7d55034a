"""Steps of a single sample with a mesh and without, predicted and measured: ``python -m experiments.meshes.steps``.

The arms of a workload run in turns, as often as there are seeds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from experiments.arms import Arm, Outcome, numbers, run_arms
from experiments.record import markdown, publish

COMMON = (
    "batch_size=1", "epochs=1", "freeze=none", "parallel.world_size=2", "parallel.device=cpu", "checkpoint=off",
    "evaluate.every_epochs=null", "dataset.max_train_samples=16", "dataset.max_eval_samples=2",
)  # fmt: skip
ARMS = (
    Arm("without", ("parallel.tp=1",)),
    Arm("tp 2", ("parallel.tp=2",)),
    Arm("open", ("parallel.tp=null",)),
)
VIT_B: tuple[str, ...] = ("model=vit", "model.pretrained=false", "model.image_size=224", "dataset=digits")
DIGITS: tuple[str, ...] = ("model=vit_tiny", "dataset=digits")
MINILM: tuple[str, ...] = ("model=bert", "dataset=squad")
WINDOWS = {256: "dataset.stride=128", 64: "dataset.stride=16"}  # tokens of a sample


@dataclass(frozen=True)
class Step:
    """The steps of a run under its last plan.

    Attributes:
        mesh: That it had; empty for none.
        predicted_s, measured_s: Seconds, the median of those measured.
    """

    workload: str
    arm: str
    seed: int
    mesh: str
    predicted_s: float
    measured_s: float

    @classmethod
    def of(cls, workload: str, outcome: Outcome) -> Step:
        plan = outcome.summary["plans"][-1]
        return cls(workload, outcome.arm, outcome.seed, plan["mesh"], plan["predicted_step_s"], plan["median_step_s"])


def rows(steps: Sequence[Step]) -> list[tuple[str, ...]]:
    """Returns a row for each workload and arm; ratios are taken within a seed, and their median is shown."""
    found: list[tuple[str, ...]] = []
    for workload, arm in dict.fromkeys((step.workload, step.arm) for step in steps):
        own = [step for step in steps if (step.workload, step.arm) == (workload, arm)]
        without = {step.seed: step for step in steps if (step.workload, step.arm) == (workload, ARMS[0].name)}
        ratios = [without[step.seed].measured_s / step.measured_s for step in own]
        found.append(
            (
                workload,
                arm,
                ", ".join(sorted({step.mesh or "none" for step in own})),
                f"{1e3 * median(step.predicted_s for step in own):.0f} ms",
                f"{1e3 * median(step.measured_s for step in own):.0f} ms",
                f"{median(step.measured_s / step.predicted_s for step in own):.2f}",
                f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
            )
        )
    return found


HEADER = ("a single sample", "parallel.tp=", "mesh", "predicted", "measured", "ratio", "times as fast")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the runs")
    parser.add_argument("--minilm", nargs=2, metavar=("MODEL", "JSON"), help="MiniLM, and XQuAD's articles")
    parser.add_argument("--seeds", type=numbers, default=(1, 2, 3))
    parser.add_argument("--into", type=Path, default=Path(__file__).parent, help="whose README.md takes the table")
    given = parser.parse_args(arguments)
    workloads = {"ViT-B/16 on 224 pixels": VIT_B, "6 blocks of width 96 on digits": DIGITS}
    if given.minilm:
        paths = f"model.name={given.minilm[0]}", f"dataset.path={given.minilm[1]}"
        for length, stride in WINDOWS.items():
            workloads[f"MiniLM on {length} tokens"] = (*MINILM, *paths, f"dataset.max_length={length}", stride)
    steps: list[Step] = []
    for number, (name, options) in enumerate(workloads.items()):
        folder = given.folder.absolute() / str(number)
        steps += [Step.of(name, outcome) for outcome in run_arms(ARMS, given.seeds, folder, (*COMMON, *options))]
    publish(markdown(HEADER, rows(steps)), [asdict(step) for step in steps], given.into)


if __name__ == "__main__":
    main()
