"""Trains, for example ``python train.py model=bert dataset=squad``: composes with Hydra, hands plain values on."""

import os
import signal
import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import CompactHydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from pipetransformer import forks, passing_files
from pipetransformer.config.compose import as_plain, explain, load, register, write_resolved
from pipetransformer.errors import UserError

IS_LAUNCHER = "TORCHELASTIC_RUN_ID" not in os.environ
IS_FIRST_RANK = os.environ.get("RANK", "0") == "0"  # torchrun starts one process per rank, all others are ours
NO_RUN_FOLDER = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none")


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(node: DictConfig) -> float | None:
    hydra_config = HydraConfig.get()
    sweep = Path(hydra_config.sweep.dir).name if hydra_config.mode == RunMode.MULTIRUN else None
    try:
        return run_job(node, Path(hydra_config.runtime.output_dir).resolve(), sweep)
    except UserError as error:
        if sweep is None:
            sys.exit(explain(error))
        job = f"job {hydra_config.job.num} ({' '.join(hydra_config.overrides.task)})"
        print(f"{job} failed: {explain(error)}", file=sys.stderr)
        raise  # the other jobs go on, and Hydra ends with this error


def run_job(node: DictConfig, run_dir: Path, sweep: str | None) -> float | None:
    run_config = load(node)
    if IS_FIRST_RANK:
        write_resolved(node, run_dir)

    if IS_LAUNCHER:
        passing_files.keep_together()
        libraries = (*run_config.model.libraries, *run_config.dataset.libraries)
        forks.begin(run_config.parallel.device, run_config.parallel.world_size, libraries)
    from pipetransformer.launch import launch  # torch is imported from here on

    return launch(run_config, run_dir, as_plain(node), sweep)


def run() -> None:
    """Calls Hydra. What the user can mend ends in one message, without Hydra's frame around it and without a trace."""
    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors of composition come here in place of being printed
    if not IS_FIRST_RANK:
        sys.argv += NO_RUN_FOLDER
    try:
        main()
    except (UserError, CompactHydraException) as error:
        sys.exit(explain(error))
    except OSError as error:
        sys.exit(f"the run folder cannot be written ({error}); name another one by hydra.run.dir= or hydra.sweep.dir=")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def refuse_sweep_under_torchrun() -> None:
    if not IS_LAUNCHER and {"-m", "--multirun"} & set(sys.argv[1:]):
        command = " ".join(["python", *sys.argv])
        sys.exit(
            "A sweep cannot run under torchrun: every process would make a sweep folder of its own.\n"
            f"Run it without torchrun, each job starts its own processes:  {command} parallel.world_size=..."
        )


if __name__ == "__main__":
    refuse_sweep_under_torchrun()
    register()
    run()
