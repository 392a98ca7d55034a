"""Trains with the paper's rule at several alphas: ``python -m experiments.alpha <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER, FASTER_CPU, FROZEN, FROZEN_FROM, SECONDS, SHARE, Arm, main

ALPHAS = {"1/5": 1 / 5, "1/4": 1 / 4, "1/3": 1 / 3, "2/5": 2 / 5, "1/2": 1 / 2}  # those of the paper's sweep
RULE = "freeze=pipetransformer"
ARMS = (
    Arm("none", ("freeze=none",)),
    *(Arm(f"alpha = {name}", (RULE, f"freeze.alpha={alpha:.6g}")) for name, alpha in ALPHAS.items()),
)
COLUMNS = (ARM, FROZEN_FROM, FROZEN, ACCURACY, SECONDS, CPU, FASTER, FASTER_CPU, SHARE)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
