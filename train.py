"""Trains, for example ``python train.py model=bert dataset=squad``: composes with Hydra, hands plain values on."""

import os
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from pipetransformer import config


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    run_config = config.load(node)
    hydra_config = HydraConfig.get()
    run_dir = Path(hydra_config.runtime.output_dir).resolve()
    config.write_resolved(node, run_dir)
    sweep = Path(hydra_config.sweep.dir).name if hydra_config.mode == RunMode.MULTIRUN else None

    from pipetransformer.launch import launch  # torch is imported from here on

    return launch(run_config, run_dir, config.as_plain(node), sweep)


def refuse_sweep_under_torchrun() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ and {"-m", "--multirun"} & set(sys.argv[1:]):
        command = " ".join(["python", *sys.argv])
        sys.exit(
            "A sweep cannot run under torchrun: every process would make a sweep folder of its own.\n"
            f"Run it without torchrun, each job starts its own processes:  {command} parallel.world_size=..."
        )


if __name__ == "__main__":
    refuse_sweep_under_torchrun()
    config.register()
    main()
