"""Trains a pipeline with 1 to 16 micro-batches: ``python -m experiments.microbatches <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER, SECONDS, SHARE, SPENT, TRAINING, Arm, Column, Row, main

NUMBERS = (1, 2, 4, 8, 16)


def _predicted(row: Row) -> str:
    """Returns the seconds of the steps by the cost model, over those that they took."""
    summaries = [outcome.summary for outcome in row.own.values()]
    return f"{sum(one['predicted_step_seconds'] / one['step_seconds'] for one in summaries) / len(summaries):.2f}"


def _chosen(row: Row) -> str:
    """Returns the micro-batches of each run, by seed."""
    return ", ".join(str(outcome.summary["plans"][0]["num_microbatches"]) for outcome in row.own.values())


ARMS = (
    Arm("planned", ("freeze=none", "parallel=pipeline")),
    *(Arm(str(each), ("freeze=none", "parallel=pipeline", f"parallel.num_microbatches={each}")) for each in NUMBERS),
)
PREDICTED: Column = ("steps, predicted / measured", _predicted)
CHOSEN: Column = ("micro-batches", _chosen)
COLUMNS = (ARM, CHOSEN, ACCURACY, TRAINING, SECONDS, CPU, FASTER, PREDICTED, SHARE, SPENT)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
