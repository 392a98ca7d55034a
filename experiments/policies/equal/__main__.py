"""Trains with every freeze policy at one mean frozen fraction: ``python -m experiments.policies.equal <folder> ...``."""

from __future__ import annotations

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER_CPU, FROZEN, FROZEN_FROM, SIGNALS, TRAINING, Arm, as_long_as, main
from experiments.policies.__main__ import KNOBS

FRACTION = 1 / 3
CONTROLS = ("none", "prefix")  # decide nothing, so that there is nothing to scale: 2 of 6 blocks are the fraction
TARGET = f"freeze.target_fraction={FRACTION:.6g}"


def _arm(policy: str) -> Arm:
    target = () if policy in CONTROLS else (TARGET,)
    return Arm(policy, (f"freeze={policy}", *KNOBS[policy], *target))


SHORTER = Arm("none, shorter", as_long_as("pipetransformer", baseline="none"))
ARMS = (*map(_arm, KNOBS), SHORTER)
COLUMNS = (ARM, FROZEN_FROM, FROZEN, ACCURACY, TRAINING, CPU, FASTER_CPU, SIGNALS)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
