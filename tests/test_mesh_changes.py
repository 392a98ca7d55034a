"""A run whose mesh changes where blocks freeze trains as one device does, also when it is killed and goes on."""

import os
import random
from itertools import groupby
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.cases import tensors_equal
from support.faults import Fault
from support.jobs import TINY, Job, run_job
from support.mesh_changes import play_with_meshes
from support.pool import Pool, mortal_pool

from pipetransformer.mesh import SINGLE, StageMesh

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}",
    "precision=float64", "optim.eps=1e-6", "freeze=schedule", "freeze.num_frozen=[1,3]", "freeze.interval=0.2",
    "epochs=3", "checkpoint.every_steps=2", "checkpoint.keep=1",
)  # fmt: skip
CHANGES = {0: StageMesh(tp=2), 1: StageMesh(cp=2), 3: SINGLE}
NUM_KILLS, SEED = int(os.environ.get("CHAOS_KILLS", "2")), int(os.environ.get("CHAOS_SEED", "1"))
PLACES = {  # with the calls that a run makes
    "pipetransformer.runtime.elastic.ElasticRuntime.train_step": 12,
    "pipetransformer.runtime.piece_transfer.send_pieces": 2,
    "pipetransformer.runtime.piece_transfer._Change._put_together": 6,
    "pipetransformer.training.checkpoints.Checkpoints.save": 5,
}


@pytest.fixture(scope="module")
def single(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("single") / "run", *RUN, "parallel=single", made_up_times=True)


def check_same(job: Job, expected: Job) -> None:
    assert (job.error, job.summary["status"]) == ("", "completed")
    meshes = [mesh for mesh, _ in groupby(plan["mesh"] for plan in job.summary["plans"])]
    assert meshes == ["tp 2", "cp 2", ""], "whatever it resumed from"
    assert job.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
    assert job.summary["metrics"] == expected.summary["metrics"]
    saved, wanted = (load_file(run.folder / "model" / "model.safetensors") for run in (job, expected))
    tensors_equal(saved, wanted)


def test_a_mesh_that_changes_at_each_freeze_trains_as_one_device(pool: Pool, tmp_path: Path, single: Job) -> None:
    (tmp_path / "run").mkdir()
    errors = pool.run(2, play_with_meshes, CHANGES, RUN, tmp_path / "run")
    job = Job(tmp_path / "run", errors[0])
    check_same(job, single)
    assert [plan["cache_level"] for plan in job.summary["plans"]] == [0, 1, 3]


def test_it_survives_random_kills(pool: Pool, tmp_path: Path, single: Job) -> None:
    """``CHAOS_KILLS`` kills, at places, calls and ranks that ``CHAOS_SEED`` decides, up to four in a run."""
    draw, num_kills, number = random.Random(SEED), 0, 0
    while num_kills < NUM_KILLS:
        run = tmp_path / f"run{number}"
        run.mkdir()
        killed = _kill(run, draw, min(4, NUM_KILLS - num_kills))
        assert killed, "a run from the start makes all the calls"
        num_kills, number = num_kills + killed, number + 1
        errors = pool.run(2, play_with_meshes, CHANGES, (*RUN, "resume=auto"), run)
        check_same(Job(run, errors[0]), single)


def _kill(run: Path, draw: random.Random, most: int) -> int:
    """Kills a run and what resumes it, and returns how often: what is left may have fewer calls than are drawn."""
    for kill in range(most):
        place = draw.choice(list(PLACES))
        fault = Fault(place, draw.randint(1, PLACES[place]), local_rank=draw.randrange(2))
        print(f"{fault.target} call {fault.call} on rank {fault.local_rank}")
        with mortal_pool(run.with_name(f"{run.name}pool{kill}")) as mortal:
            try:
                mortal.run(2, play_with_meshes, CHANGES, (*RUN, "resume=auto") if kill else RUN, run, fault)
            except EOFError:
                print("killed")
            else:
                return kill
    return most
