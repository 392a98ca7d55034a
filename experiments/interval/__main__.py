"""Trains with decisions at several intervals: ``python -m experiments.interval <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER, FASTER_CPU, FROZEN, FROZEN_FROM, SECONDS, SHARE, Arm, main

INTERVALS = (0.05, 0.1, 0.2, 1 / 3, 0.5)
TARGET = "freeze.target_fraction=0.333333"  # else shorter intervals would freeze more, and that alone would show
RULE = ("freeze=pipetransformer", TARGET)
ARMS = (
    Arm("none", ("freeze=none",)),
    *(Arm(f"every {each:.0%}", (*RULE, f"freeze.interval={each:.6g}")) for each in INTERVALS),
)
COLUMNS = (ARM, FROZEN_FROM, FROZEN, ACCURACY, SECONDS, CPU, FASTER, FASTER_CPU, SHARE)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
