"""A run that ends early: nothing keeps running, nothing is left over, and the summary says how far it came."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import timm
from support.command import TIMEOUT_S, TRAIN, processes, started, wait_until_gone
from support.faults import SLOW_S, Fault
from support.jobs import TINY, Job, run_job
from support.pool import Pool
from support.stopping import play_to_its_end

from pipetransformer import command
from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import read_manifest
from pipetransformer.config.schema import CONF
from pipetransformer.errors import Stopped
from pipetransformer.launch import elastic
from pipetransformer.report.event_log import EVENT_LOG, read_events
from pipetransformer.training import interrupt

ENDLESS = (
    *TINY,
    "epochs=1000",
    "freeze.interval=null",  # after each epoch, so that the first transition is soon
    "log_every_steps=1",
    "hydra.run.dir=run",
    "parallel.world_size=2",
)


def wait_for_a_cached_step(process: subprocess.Popen[str]) -> None:
    """Reads the log until a step has been made that reads from the cache."""
    assert process.stdout is not None
    cached = False
    for line in process.stdout:
        cached = cached or "transition at step" in line
        if cached and "] step " in line:
            return
    raise AssertionError("the run ended by itself")


@pytest.fixture
def in_a_terminal() -> Iterator[None]:
    """Takes back what nohup has set, where the tests themselves run by it: processes inherit it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.thinned("Ctrl-C")
@pytest.mark.parametrize(
    ("number", "exit_code", "status"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGHUP, 75, "requeue")],
    ids=["Ctrl-C", "closed terminal"],
)
@pytest.mark.usefixtures("in_a_terminal")
def test_an_interrupted_run_leaves_nothing_but_its_record(
    number: signal.Signals, exit_code: int, status: str, tmp_path: Path, passing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(passing))
    with started(tmp_path, TRAIN, *ENDLESS) as (process, mark):
        wait_for_a_cached_step(process)
        pids = processes(mark)
        assert len(pids) >= 3, "the parent and two workers"
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=TIMEOUT_S)
        wait_until_gone(mark)
    assert process.returncode == exit_code
    assert err.splitlines() == ["the run is saved; resume=run goes on with it"]
    assert not list(passing.iterdir())
    assert not [name for name in os.listdir("/dev/shm") for pid in pids if str(pid) in name]
    summary = Job(tmp_path / "run", error="").summary
    assert summary["status"] == status
    assert summary["optimizer_steps"] == read_manifest(CheckpointFolder(tmp_path / "run" / FOLDER).published()[-1]).step
    assert summary["model"] == {"folder": str(tmp_path / "run" / "model"), "step": summary["optimizer_steps"]}
    assert timm.create_model(f"local-dir:{tmp_path / 'run' / 'model'}", pretrained=True) is not None
    frozen = [plan["num_frozen"] for plan in summary["plans"]]  # the first steps of a plan may lead to another one
    assert list(dict.fromkeys(frozen))[:2] == [0, 1]


@pytest.mark.usefixtures("in_a_terminal")
def test_the_launcher_hands_a_closed_terminal_on_as_sigterm_unless_it_is_to_outlive_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(elastic.multiprocessing, "active_children", lambda: [mock.Mock(pid=7)])
    monkeypatch.setattr(os, "kill", lambda _, number: told.append(number))
    with elastic.forwarded_signals(tmp_path) as came:
        signal.raise_signal(signal.SIGHUP)
    assert (came, told) == ([signal.SIGHUP], [signal.SIGTERM])
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # as by nohup
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with elastic.forwarded_signals(tmp_path) as came:
        signal.raise_signal(signal.SIGHUP)
    assert came == []


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_a_signal_to_the_parent_alone_is_handed_on_to_its_ranks(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(elastic.multiprocessing, "active_children", lambda: [mock.Mock(pid=pid) for pid in (7, 8)])
    monkeypatch.setattr(os, "kill", lambda pid, number: told.append((pid, number)))
    with elastic.forwarded_signals(tmp_path) as came:
        signal.raise_signal(number)
    assert came == [number]
    assert told == [(7, number), (8, number)]


@pytest.mark.parametrize(
    ("rank", "saved_in", "sweep", "told"),
    [
        ("0", Path.cwd() / "outputs" / "a run", None, "the run is saved; 'resume=outputs/a run' goes on with it\n"),
        ("0", None, None, "the run has no checkpoint; the same command with resume=auto starts it anew\n"),
        (
            "0",
            None,
            Path.cwd() / "seeds",
            "the same command with resume=auto hydra.sweep.dir=seeds goes on with each job",
        ),
        ("1", Path("run"), None, ""),
    ],
)
def test_the_first_rank_tells_whether_a_stopped_run_is_saved(
    rank: str, saved_in: Path | None, sweep: Path | None, told: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")  # set by the command
    monkeypatch.setattr(command, "compose_and_run", mock.Mock(side_effect=Stopped(True, saved_in)))
    monkeypatch.setattr(command.SweepFolder, "folder", sweep)
    monkeypatch.setattr("pipetransformer.report.sweep.print_sweep", lambda _: None)
    with pytest.raises(SystemExit) as ended:
        command.main()
    assert ended.value.code == 75
    err = capsys.readouterr().err
    assert err == told if sweep is None else err.startswith(told)


# every run: handing on, test_a_signal_to_the_parent_alone_...; saving and resuming, tests/training/test_stopping.py;
# another world, tests/training/test_resume.py; resume=<folder>, tests/launch/test_run_dir.py
@pytest.mark.thorough
def test_a_stopped_run_goes_on_by_the_same_command_with_another_number_of_processes(tmp_path: Path) -> None:
    (tmp_path / "conf" / "freeze").mkdir(parents=True)
    shutil.copy(CONF / "freeze" / "pipetransformer.yaml", tmp_path / "conf" / "freeze" / "mine.yaml")
    arguments = (*ENDLESS[:-1], "freeze=mine", "epochs=12", "resume=auto", "--config-dir=conf")
    with started(tmp_path, TRAIN, *arguments, "parallel.world_size=2") as (process, mark):
        wait_for_a_cached_step(process)
        process.send_signal(signal.SIGUSR1)  # as Slurm warns, and to the parent alone
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 75, err
        wait_until_gone(mark)
    assert Job(tmp_path / "run", error="").summary["status"] == "requeue"
    stopped_at = read_manifest(CheckpointFolder(tmp_path / "run" / FOLDER).published()[-1]).step
    resumed = "resume=run", "parallel.world_size=1"  # its own options, and the folder of its own YAML, it knows
    with started(tmp_path, TRAIN, *resumed) as (process, _):
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert f"resumed at step {stopped_at} from" in out
    job = Job(tmp_path / "run", error="")
    assert [event["step"] for event in job.events("step")] == list(range(1, 49)), "no gap and no duplicate"
    assert (job.summary["status"], job.summary["optimizer_steps"]) == ("completed", 48)


def test_a_run_that_diverges_stops_with_the_weights_of_the_step_before(pool: Pool, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    job = run_job(pool, 1, tmp_path / "run", *TINY, "optim.lr=1e30", "optim.warmup=0")
    assert job.error.startswith("step ")
    assert re.search(r"lower optim\.lr=1e\+30 \(.*e\+29 in this step\) or check the data", job.error), job.error
    assert [step["lr"] for step in read_events(job.folder / EVENT_LOG, "step")] == [None], "no line is damaged"
    assert len(job.error.splitlines()) == 1, job.error
    assert (job.summary["status"], job.summary["error"]) == ("diverged", job.error)
    weights = load_file(job.folder / "model" / "model.safetensors")
    assert all(torch.isfinite(tensor).all() for tensor in weights.values())


def test_no_rank_of_a_run_that_diverges_ends_before_its_model_is_saved(pool: Pool, tmp_path: Path) -> None:
    """The launcher would end rank 0 with the first one that does."""
    slow = Fault("pipetransformer.training.run.save_model", what="is slow", local_rank=0)
    ends = pool.run(2, play_to_its_end, slow, (*TINY, "optim.lr=1e30"), tmp_path)
    (error, saved_s), (_, other_s) = ends
    assert saved_s - other_s < SLOW_S / 2
    job = Job(tmp_path, error)
    assert (job.summary["status"], job.summary["error"]) == ("diverged", error)
    assert (tmp_path / "model" / "model.safetensors").is_file()
    assert "model" in job.summary
