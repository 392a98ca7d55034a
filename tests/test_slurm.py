"""The example for Slurm: bash reads it, and it starts ``torchrun`` with arguments that ``torchrun`` knows."""

import os
import subprocess
from pathlib import Path

from support.jobs import ROOT
from torch.distributed.run import parse_args

EXAMPLE = ROOT / "examples" / "slurm.sbatch"
JOB = {
    "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "70123", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4",
    "SLURM_CPUS_PER_TASK": "32",
}  # fmt: skip


def write_command(folder: Path, name: str, line: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{line}\n")
    (folder / name).chmod(0o755)


def test_bash_reads_the_example() -> None:
    subprocess.run(["bash", "-n", EXAMPLE], check=True)


def test_every_node_starts_torchrun_with_the_first_node_as_meeting_point(tmp_path: Path) -> None:
    write_command(tmp_path, "scontrol", "printf 'n1\\nn2\\n'")
    write_command(tmp_path, "srun", 'printf "%s\\n" "$@"')
    environment = os.environ | JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_TMPDIR": "/disk"}
    words = ["bash", EXAMPLE, "model=bert"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    *of_srun, _, command = done.stdout.splitlines()[:4]
    arguments = done.stdout.splitlines()[4:]
    options = parse_args(arguments)
    assert command == "torchrun"
    assert of_srun == ["--kill-on-bad-exit=0", "--wait=60"], "an error on one node does not kill rank 0 while it saves"
    assert (options.nnodes, options.nproc_per_node, options.rdzv_endpoint) == ("2", "4", "n1:20123")
    assert (options.rdzv_backend, options.rdzv_id) == ("c10d", "70123")
    assert options.training_script == "train.py"
    given = ["hydra.run.dir=outputs/slurm-70123", "resume=auto", "cache.path=/disk", "model=bert"]
    assert options.training_script_args == given


def test_a_job_goes_on_in_the_folder_of_another_and_caches_beside_it_without_a_disk_of_its_own(tmp_path: Path) -> None:
    write_command(tmp_path, "scontrol", "printf 'n1\\nn2\\n'")
    write_command(tmp_path, "srun", 'printf "%s\\n" "$@"')
    environment = os.environ | JOB | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RUN_DIR": "outputs/slurm-7"}
    done = subprocess.run(["bash", EXAMPLE, "model=bert"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-3:] == ["hydra.run.dir=outputs/slurm-7", "resume=auto", "model=bert"]
