"""Trains with every freeze policy by its defaults: ``python -m experiments.policies <folder> <options>``.

``<options>`` are those of ``train.py``: model, data, epochs.
"""

from __future__ import annotations

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FROZEN, FROZEN_FROM, SIGNALS, TRAINING, Arm, main

KNOBS: dict[str, tuple[str, ...]] = {
    "none": (),
    "pipetransformer": (),
    "alpha": (),
    "linear": (),
    "random": ("freeze.draw_seed=${seed}",),  # another draw with each seed
    "schedule": ("freeze.num_frozen=[2,4]",),
    "prefix": ("freeze.num_blocks=2",),
    "freezeout": (),
    "autofreeze": (),
    "threshold": (),
    "cka": (),
    "egeria": (),
    "budget": (),
}
"""Each policy, with the knobs that it leaves to the user; all others are defaults."""
ARMS = tuple(Arm(policy, (f"freeze={policy}", *knobs)) for policy, knobs in KNOBS.items())
COLUMNS = (ARM, FROZEN_FROM, FROZEN, ACCURACY, TRAINING, CPU, SIGNALS)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS, seeds=(1,))
