"""The ablation on a pretrained model: ``python -m experiments.components <folder> <options>``."""

from pathlib import Path

from experiments.arms import USUAL, Arm, as_long_as, main

FREEZE = ("freeze=pipetransformer", "freeze.interval=0.2")
STATIC, NO_CACHE = ("parallel.autopipe=false", "parallel.autodp=false"), ("cache=off",)
ARMS = (
    Arm("no freezing", ("freeze=none",)),
    Arm("freeze only", (*FREEZE, *STATIC, *NO_CACHE)),
    Arm("+ AutoPipe", (*FREEZE, "parallel.autodp=false", *NO_CACHE)),
    Arm("+ AutoPipe + AutoDP", (*FREEZE, *NO_CACHE)),
    Arm("+ AutoPipe + AutoCache", (*FREEZE, "parallel.autodp=false")),
    Arm("all", FREEZE),
    Arm("no freezing, shorter", as_long_as("all", baseline="no freezing")),
)

if __name__ == "__main__":
    main(ARMS, Path(__file__).parent / "pretrained", USUAL)
