"""Trains under each arrangement in turns: ``python -m experiments.static_plans <folder> <options>``."""

from pathlib import Path

from experiments.arms import (
    ACCURACY,
    ARM,
    CPU,
    FASTER,
    FASTER_CPU,
    SECONDS,
    SHARE,
    SPENT,
    TRAINING,
    Arm,
    Column,
    Row,
    main,
)

STATIC = ("data", "single", "pipeline", "sharded")
ARMS = (
    *(Arm(f"static, {name}", ("freeze=none", f"parallel={name}")) for name in STATIC),
    Arm("elastic, no freezing", ("freeze=none",)),
    Arm("elastic"),
)


def _plans(row: Row) -> str:
    """Returns stages x replicas of the plans of the runs, in their order."""
    return row.each(
        lambda one: ", ".join(
            dict.fromkeys(f"{len(plan['stages'])} x {plan['num_replicas']}" for plan in one.summary["plans"])
        )
    )


PLANS: Column = ("stages x replicas", _plans)
COLUMNS = (ARM, PLANS, ACCURACY, TRAINING, SECONDS, CPU, FASTER, FASTER_CPU, SHARE, SPENT)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
