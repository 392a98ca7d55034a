"""Whatever is killed, and whenever: the run goes on from its last checkpoint and ends as if nothing had been."""

import os
import random
import signal
import subprocess
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from support.command import TIMEOUT_S, TRAIN, forked, has_not_ended, processes, started
from support.faults import Fault, play_with_fault, run_with
from support.jobs import TINY, Job, play, run_job
from support.pool import Pool, mortal_pool

from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.report.event_log import EVENT_LOG

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}",
    "precision=float64", "optim.lr=0.01", "freeze=schedule", "freeze.num_frozen=[1,3]",
)  # fmt: skip
SHORT = (*RUN, "epochs=5", "freeze.interval=0.3", "checkpoint.every_steps=2", "checkpoint.keep=1")
NUM_KILLS, SEED = int(os.environ.get("CHAOS_KILLS", "1")), int(os.environ.get("CHAOS_SEED", "1"))
# by SGD: over so many steps AdamW enlarges the rounding of gradients that cancel, such as those of a key's bias
LONG = (
    *RUN,
    "optim=sgd",
    "optim.lr=0.01",
    f"epochs={200 if NUM_KILLS >= 100 else 40}",
    "freeze.interval=0.3",
    "evaluate.every_epochs=60",
    "hydra.run.dir=run",
)

MOMENTS = {
    "profiling": Fault("pipetransformer.training.build.make_planner"),
    "a step": Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=9),
    "a transition": Fault("pipetransformer.runtime.elastic.change_holders", call=2),
    "a fill": Fault("pipetransformer.autocache.cache.AutoCache.advance", call=2),
    "an evaluation": Fault("pipetransformer.training.evaluations.evaluate", call=3),
    "a snapshot": Fault("pipetransformer.training.checkpoints.Checkpoints.save", call=4),
    "a write": Fault("pipetransformer.checkpoint.writer.write_flushed", call=13),
    "a publication": Fault("pipetransformer.checkpoint.folder.CheckpointFolder.publish", call=5, local_rank=0),
    "retention": Fault("pipetransformer.checkpoint.folder.CheckpointFolder._remove", call=3, local_rank=0),
    "the end": Fault("pipetransformer.training.run.save_model", local_rank=0),
}
RESUMING = Fault("pipetransformer.training.resume.CheckpointLayers")


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 2, tmp_path_factory.mktemp("undisturbed") / "run", *SHORT, made_up_times=True)


def check_same(job: Job, expected: Job) -> None:
    assert (job.error, job.summary["status"]) == ("", "completed")
    steps = [event["step"] for event in job.events("step")]
    assert steps == list(range(1, len(expected.losses) + 1)), "no gap and no duplicate"
    assert job.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
    assert job.summary["metrics"] == expected.summary["metrics"]
    hidden = [path.name for path in (job.folder / FOLDER).iterdir() if path.name.startswith(".")]
    assert not hidden, "nothing half written stays"


WHOLE = [(moment, whom) for moment, fault in MOMENTS.items() for whom in (0, 1) if not whom or fault.local_rank is None]
FEW = [
    (moment, number % 2 if fault.local_rank is None else 0) for number, (moment, fault) in enumerate(MOMENTS.items())
]


@pytest.mark.thinned("profiling", "a transition", "a snapshot", "the end")
@pytest.mark.parametrize(("moment", "whom"), WHOLE if NUM_KILLS >= 100 else FEW)
def test_a_run_whose_rank_is_killed_goes_on_as_if_nothing_had_been(
    moment: str, whom: int, pool: Pool, tmp_path: Path, undisturbed: Job
) -> None:
    fault = MOMENTS[moment]
    with mortal_pool(tmp_path / "first") as mortal, pytest.raises(EOFError):
        run_with(replace(fault, local_rank=whom), mortal, 2, tmp_path / "run", *SHORT)
    world = 1 + whom
    errors = pool.run(world, play, (*SHORT, "resume=auto"), tmp_path / "run", True)
    job = Job(tmp_path / "run", errors[0])
    check_same(job, undisturbed)
    assert len(job.events("resume")) == (moment != "profiling"), "before its first checkpoint a run starts anew"


def test_a_run_that_is_killed_while_it_resumes_goes_on(pool: Pool, tmp_path: Path, undisturbed: Job) -> None:
    (tmp_path / "run").mkdir()
    for fault, options in ((MOMENTS["a step"], SHORT), (RESUMING, (*SHORT, "resume=auto"))):
        with mortal_pool(tmp_path / fault.target) as mortal, pytest.raises(EOFError):
            mortal.run(2, play_with_fault, fault, options, tmp_path / "run")
    errors = pool.run(2, play, (*SHORT, "resume=auto"), tmp_path / "run", True)
    check_same(Job(tmp_path / "run", errors[0]), undisturbed)


def test_a_command_survives_random_kills_and_leaves_nothing(
    pool: Pool, tmp_path: Path, passing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``CHAOS_KILLS`` kills, each of a rank or of all processes, at moments that ``CHAOS_SEED`` decides."""
    expected = run_job(pool, 1, tmp_path / "undisturbed", *LONG)
    monkeypatch.setenv("TMPDIR", str(passing))  # of the commands, not of the pool
    draw, left, number = random.Random(SEED), NUM_KILLS, 0
    while left:
        number += 1
        folder = tmp_path / str(number)
        folder.mkdir()
        left = killed_at_random(folder, draw, left)
        check_same(Job(folder / "run", ""), expected)
        assert not list(passing.iterdir()), "no temporary file"


def killed_at_random(folder: Path, draw: random.Random, left: int) -> int:
    """Gives a command until it has come to its end; returns how many kills are left."""
    command = (TRAIN, *LONG, "resume=auto", "launch.max_restarts=1000", "parallel.world_size=2")
    while True:
        with started(folder, *command) as (process, mark):
            is_over = False
            while left and not is_over and wait_for_ranks(process, mark):
                if left % 2 and not wait_for_steps(process, folder / "run"):  # the others come wherever a start may be
                    break
                with suppress(subprocess.TimeoutExpired):
                    process.wait(draw.uniform(0, 4))  # at any moment
                ranks, is_over = forked(mark)[1], draw.random() < 0.2
                for pid in processes(mark) if is_over else ranks and [draw.choice(ranks)]:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                print("killed", "all" if is_over else len(ranks) and "one", "at step", progress(folder / "run"))
                left -= bool(ranks)
            out, err = process.communicate(timeout=TIMEOUT_S)
        assert not processes(mark)
        assert not [name for name in os.listdir("/dev/shm") if str(process.pid) in name]
        if not is_over:
            assert process.returncode == 0, out[-3000:] + err
            return left


def wait_for_ranks(process: subprocess.Popen[str], mark: str) -> bool:
    """Returns ``True`` as soon as the command has a rank, ``False`` when it has ended."""
    while has_not_ended(process):
        if forked(mark)[1]:
            return True
    return False


def wait_for_steps(process: subprocess.Popen[str], run_dir: Path) -> bool:
    """Returns ``True`` as soon as the command has trained another step, ``False`` when it has ended."""
    seen = progress(run_dir)
    while has_not_ended(process):
        if progress(run_dir) > seen:
            return True
    return False


def progress(run_dir: Path) -> int:
    """Returns the number of steps in the log, whose last line may be half written."""
    log = run_dir / EVENT_LOG
    return log.read_text().count('"event": "step"') if log.exists() else 0
