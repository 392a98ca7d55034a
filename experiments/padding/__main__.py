"""Trains on texts in the uniform order and by lengths: ``python -m experiments.padding <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER, FASTER_CPU, FROZEN, SECONDS, SHARE, TRAINING, Arm, main
from pipetransformer.config.schema import BATCHINGS

FREEZING = {"": "freeze=none", ", freezing": "freeze=pipetransformer"}
ARMS = tuple(
    Arm(f"{batching}{words}", (f"batching={batching}", freeze))
    for words, freeze in FREEZING.items()
    for batching in BATCHINGS
)
COLUMNS = (ARM, FROZEN, ACCURACY, TRAINING, SECONDS, CPU, FASTER, FASTER_CPU, SHARE)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
