"""Trains a model or its adapters, frozen and cached or not: ``python -m experiments.adapters <folder> <options>``."""

from pathlib import Path

from experiments.arms import ACCURACY, ARM, CPU, FASTER_CPU, FROZEN_FROM, MEMORY, Arm, main

ARMS = (
    Arm("whole model, no freezing", ("freeze=none",)),
    Arm("whole model, default rule, cache"),
    Arm("LoRA, no freezing", ("freeze=none", "peft=lora")),
    Arm("LoRA, default rule, no cache", ("cache=off", "peft=lora")),
    Arm("LoRA, default rule, cache", ("peft=lora",)),
)
COLUMNS = (ARM, FROZEN_FROM, ACCURACY, CPU, FASTER_CPU, MEMORY)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent, COLUMNS)
