"""Trains on stored features of several levels and types: ``python -m experiments.storage <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER, FASTER_CPU, SECONDS, SHARE, Arm, Column, Row, main

GIB = 1 << 30
LEVELS, TYPES = (1, 2, 3, 4, 5), ("float32", "bfloat16", "float16", "int8")
DEEPEST = 4  # the level at which types are compared


def _gib(row: Row) -> str:
    stored = row.first.summary.get("cache")
    return f"{sum(stored['bytes_by_tier'].values()) / GIB:.2f}" if stored else "-"


def _prefix(level: int, *cache: str) -> tuple[str, ...]:
    return ("freeze=prefix", f"freeze.num_blocks={level}", *cache)


ARMS = (
    Arm("level 4, off", _prefix(DEEPEST, "cache=off")),
    *(Arm(f"level {level}, exact", _prefix(level)) for level in LEVELS),
    *(Arm(f"level {DEEPEST}, {each}", _prefix(DEEPEST, f"cache.storage={each}")) for each in TYPES),
)
STORED: Column = ("stored, GiB", _gib)
COLUMNS = (ARM, STORED, ACCURACY, SECONDS, CPU, FASTER, FASTER_CPU, SHARE)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
