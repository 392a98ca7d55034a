"""A run one of whose processes is killed says in one line which."""

import os
import signal
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT_S, TRAIN, forked, started, wait_until_gone
from support.jobs import TINY, Job

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.launch.failures import SERVER_KILLED, cause

RUN = (
    *TINY, "epochs=1000", "freeze=none", "cache=off", "log_every_steps=1", "hydra.run.dir=run",
    "parallel.world_size=2", "parallel.arrangement=data", "parallel.autodp=false", "launch.max_restarts=0",
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The command; the first one measures for all."""
    return TRAIN, *RUN, f"profile.path={tmp_path_factory.mktemp('profiles')}"


def killed(run: tuple[str, ...], folder: Path, whom: int | None) -> tuple[str, Job]:
    """Kills a rank, or the fork server, of a run that trains; returns what the command prints and its record."""
    with started(folder, *run) as (process, mark):
        assert process.stdout is not None
        saved = CheckpointFolder(folder / "run" / FOLDER)
        assert any("] step " in line and saved.published() for line in process.stdout), "the run ended by itself"
        server, ranks = forked(mark)
        assert len(ranks) == 2
        os.kill(server if whom is None else ranks[whom], signal.SIGKILL)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    return err, Job(folder / "run", "")


def test_a_killed_rank_is_named_and_not_the_survivors_error(run: tuple[str, ...], tmp_path: Path) -> None:
    err, job = killed(run, tmp_path, 1)
    assert err.startswith("rank 1 was killed"), err
    assert "lower batch_size" in err
    line, weights = err.splitlines()
    assert (job.summary["status"], job.summary["error"]) == ("failed", line)
    step = CheckpointFolder(job.folder / FOLDER).newest_step
    assert weights.endswith(f"pipetransformer-export run=run out=run/model-{step}"), weights


def test_ranks_that_left_no_record_beside_a_killed_fork_server_are_not_the_cause(tmp_path: Path) -> None:
    assert cause(tmp_path, 2, {0: 255})[1] == SERVER_KILLED


# every run tells what a killed server leaves: above, and test_where_all_ranks_were_interrupted_their_server_was_killed
@pytest.mark.thorough
def test_a_killed_fork_server_is_named(run: tuple[str, ...], tmp_path: Path) -> None:
    err, job = killed(run, tmp_path, None)
    assert err.startswith("the process that the ranks are forked from was killed"), err
    line, *weights = err.splitlines()
    assert (job.summary["status"], job.summary["error"]) == ("failed", line)
    assert "model" in job.summary or "pipetransformer-export run=run " in weights[0], "the ranks may have saved it"


# every run ends a server and a rank without their launcher: launch/test_server.py, test_parent_process.py
@pytest.mark.thorough
@pytest.mark.skipif(sys.platform != "linux", reason="the signal at a parent's death is Linux's")
def test_server_and_ranks_end_with_a_launcher_that_is_killed(run: tuple[str, ...], tmp_path: Path) -> None:
    with started(tmp_path, *run) as (process, mark):
        assert process.stdout is not None
        assert any("] step " in line for line in process.stdout), "the run ended by itself"
        server, ranks = forked(mark)
        assert (server > 0, len(ranks)) == (True, 2)
        process.kill()
        process.communicate(timeout=TIMEOUT_S)  # until the last of them that could write has ended
        assert forked(mark) == (0, [])
        wait_until_gone(mark)
    assert Job(tmp_path / "run", "").summary["status"] == "interrupted"
