"""Trains with every freeze policy at one mean fraction: ``python -m experiments.policies.equal <folder> ...``."""

from __future__ import annotations

from pathlib import Path

from experiments.arms import FASTER_CPU, Arm, as_long_as, main
from experiments.policies.__main__ import COLUMNS as SHOWN
from experiments.policies.__main__ import KNOBS

FRACTION = 1 / 3
CONTROLS = ("none", "prefix")  # decide nothing, so that there is nothing to scale: 2 of 6 blocks are the fraction
TARGET = f"freeze.target_fraction={FRACTION:.6g}"


def _arm(policy: str) -> Arm:
    target = () if policy in CONTROLS else (TARGET,)
    return Arm(policy, (f"freeze={policy}", *KNOBS[policy], *target))


SHORTER = Arm("none, shorter", as_long_as("pipetransformer", baseline="none"))
ARMS = (*map(_arm, KNOBS), SHORTER)
COLUMNS = (*SHOWN, FASTER_CPU)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
