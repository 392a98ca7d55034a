"""Times the way to the first step, and what logging takes: ``python -m experiments.start <folder> <options>``."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from experiments.arms import ARM, FIRST_PLAN, FIRST_STEP, SECONDS, Arm, Column, Outcome, main

READING, MEASURING = "reading data", "measuring layers and links"
WANDB = ("logger=wandb", "logger.mode=offline")


def _kept_beside(run: Outcome) -> tuple[str, ...]:
    """Returns the option that keeps measured times in a folder of the same seed."""
    return (f"profile.path={run.run.folder.with_name(f'profiles-{run.seed}')}",)


ARMS = (
    Arm("no service"),
    Arm("Weights & Biases", WANDB),
    Arm("Weights & Biases and traces", (*WANDB, "trace=true")),
    Arm("no service, profile kept", lambda so_far: _kept_beside(so_far["no service"])),
    Arm("no service, profile found", lambda so_far: _kept_beside(so_far["no service"])),
)


def to_first_step(outcome: Outcome) -> float:
    """Returns the seconds from the command to the end of the first step."""
    return outcome.start_s[FIRST_STEP]


def to_data(outcome: Outcome) -> float:
    """Returns the seconds until ranks have imported what they need and read the data."""
    return outcome.start_s[READING]


def planning(outcome: Outcome) -> float:
    """Returns the seconds of measuring and planning."""
    return outcome.start_s[FIRST_PLAN] - outcome.start_s[MEASURING]


def logging_share(outcome: Outcome) -> float:
    """Returns the share of the training's time in which it waited for its logs."""
    return outcome.summary["report_seconds"] / outcome.summary["train_seconds"]


COLUMNS: tuple[Column, ...] = (
    ARM,
    ("first step after", lambda row: f"{median(row.values(to_first_step)):.1f} s"),
    ("of it until data are read", lambda row: f"{median(row.values(to_data)):.1f} s"),
    ("measuring and planning", lambda row: f"{median(row.values(planning)):.1f} s"),
    ("training", lambda row: f"{median(row.values(lambda one: one.summary['train_seconds'])):.1f} s"),
    ("logging", lambda row: f"{median(row.values(logging_share)):.1%}"),
    SECONDS,
)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
