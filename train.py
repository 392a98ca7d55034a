"""Trains, for example ``python train.py model=bert dataset=squad``: ``pipetransformer-train`` from a checkout."""

from pipetransformer.command import main

if __name__ == "__main__":
    main()
