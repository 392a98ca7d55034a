"""Trains a narrow model at several rates: ``python -m experiments.recipes <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, Arm, Column, main

RATES = ("2e-5", "4e-5", "8e-5", "1.6e-4")
ARMS = tuple(Arm(rate, (f"optim.lr={rate}", "freeze=none")) for rate in RATES)
EACH: Column = ("of each seed", lambda row: ", ".join(f"{one.metric:.4f}" for one in row.own.values()))
COLUMNS = (ARM, ACCURACY, EACH, CPU)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
