"""Whether, with how many ranks and from where a run starts again after a rank has died."""

import os
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.jobs import TINY, loaded

from pipetransformer.checkpoint.folder import FOLDER
from pipetransformer.config.compose import register
from pipetransformer.config.schema import CONF
from pipetransformer.config.sections import Checkpointing, Launch
from pipetransformer.errors import CacheLost, RankFailed, RankLost, UserError
from pipetransformer.launch import run_dir, start
from pipetransformer.launch.restarts import Restarts, after_restart
from pipetransformer.launch.run_dir import tell_of_new_start
from pipetransformer.parent_process import parent_start, start_time, torchrun_start

LOST = RankLost("rank 1 was killed by SIGKILL, perhaps for want of memory; lower batch_size", num_lost=2)
FAILED = RankFailed("rank 0 failed: ValueError: no\nTraceback ...", "rank 0 failed: ValueError: no")


def restarts(folder: Path, launch: Launch | None = None, num_ranks: int = 4, writes: bool = True) -> Restarts:
    config = loaded(*TINY, f"parallel.world_size={num_ranks}")
    checkpoint = Checkpointing(enabled=writes)
    return Restarts(replace(config, launch=launch or Launch(), checkpoint=checkpoint), folder, num_ranks)


def save(folder: Path, step: int) -> None:
    (folder / FOLDER / f"step-{step:08d}").mkdir(parents=True)


@pytest.mark.parametrize(
    ("launch", "writes", "number"),
    [(None, True, 3), (None, False, 0), (Launch(max_restarts=2), True, 2), (Launch(max_restarts=1), False, 1)],
)
def test_a_killed_rank_is_replaced_so_many_times(tmp_path: Path, launch: Launch, writes: bool, number: int) -> None:
    run = restarts(tmp_path, launch, writes=writes)
    answers = [run.next_after(LOST) for _ in range(number + 1)]
    assert answers == number * [True] + [False]
    assert run.num_ranks == run.config.parallel.world_size == 4
    assert run.config.resume.run == ("auto" if number else None)


def test_the_restart_is_announced_with_its_cause_and_its_step(tmp_path: Path) -> None:
    run = restarts(tmp_path)
    assert run.next_after(LOST)
    told = "rank 1 was killed by SIGKILL; restart 1 of 3 with 4 processes, from the beginning"
    assert run.announcement(LOST) == told
    save(tmp_path, 1200)
    assert run.next_after(FAILED)
    told = "rank 0 failed: ValueError: no; restart 2 of 3 with 4 processes, from step 1,200"
    assert run.announcement(FAILED) == told


def test_a_run_whose_cache_fails_goes_on_without_it_unless_it_requires_it(tmp_path: Path) -> None:
    error, run = CacheLost("/disk fails: Input/output error; set cache.disk_gib=0, or not"), restarts(tmp_path)
    save(tmp_path, 10)
    run.config = replace(run.config, launch=Launch(shrink=True))
    assert run.next_after(error)
    assert (run.config.cache.enabled, run.config.resume.run, run.num_ranks) == (False, "auto", 4)
    told = "/disk fails: Input/output error; restart 1 of 3 with 4 processes, from step 10 and without the cache"
    assert run.announcement(error) == told
    run = restarts(tmp_path)
    run.config = replace(run.config, cache=replace(run.config.cache, require=True))
    assert not run.next_after(error)


def test_a_run_shrinks_to_the_ranks_that_remain(tmp_path: Path) -> None:
    run = restarts(tmp_path, Launch(shrink=True))
    sizes = []
    while run.next_after(LOST):
        assert run.config.parallel.world_size == run.num_ranks
        sizes.append(run.num_ranks)
    assert sizes == [2, 1, 1]


def test_an_error_that_is_no_accident_ends_the_run(tmp_path: Path) -> None:
    run = restarts(tmp_path)
    assert not run.next_after(FAILED), "before the first checkpoint"
    save(tmp_path, 10)
    assert run.next_after(FAILED)
    assert not run.next_after(FAILED), "the same at the same step"
    save(tmp_path, 20)
    assert run.next_after(FAILED), "the same at a later step"


@pytest.mark.parametrize(("count", "run"), [(None, None), ("0", None), ("1", "auto")])
def test_a_run_that_torchrun_has_started_again_goes_on(
    count: str | None, run: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    if count is not None:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    assert after_restart(loaded(*TINY)).resume.run == run


@pytest.mark.parametrize(
    ("began", "options", "is_refused"),
    [
        (datetime.now() - timedelta(hours=1), (), False),
        (datetime.now() + timedelta(hours=1), (), True),
        (datetime.now() + timedelta(hours=1), ("resume=auto",), False),
        (datetime.now() + timedelta(hours=1), ("overwrite=true",), False),
        (None, (), False),
    ],
    ids=["its own", "another", "another, asked for", "another, overwritten", "unknown"],
)
def test_torchrun_goes_on_with_no_run_that_it_was_refused_for(
    began: datetime | None, options: tuple[str, ...], is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(run_dir, "torchrun_start", lambda: began)
    monkeypatch.setattr(start, "start", lambda config, *_: {"resume": config.resume.run})
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError, match="holds a run already") if is_refused else nullcontext():
        ended = start.run_in_folder(loaded(*TINY, *options), tmp_path, lambda: None)
        assert ended == {"resume": "auto"}, "as the other ranks, which know no folder"
    assert (tmp_path / "config.yaml").exists() == ("overwrite=true" not in options)


def test_a_script_goes_on_in_the_folder_that_it_names_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(start, "run_in_folder", lambda config, folder, _, **_options: {"folder": folder})
    assert start.train(loaded(*TINY, f"resume.run={tmp_path}")) == {"folder": tmp_path}


def trained_in(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of two runs of one script, and that of the command."""
    monkeypatch.setattr(start, "run_in_folder", lambda config, folder, _, **_options: {"folder": folder})
    monkeypatch.setattr(start, "_numbers", count(1))  # as in a new process
    folders = [start.train(loaded(*TINY))["folder"].relative_to(Path.cwd()) for _ in range(2)]
    register()
    return [*map(str, folders), OmegaConf.load(CONF / "config.yaml").hydra.run.dir]


@pytest.mark.skipif(not Path("/proc/stat").exists(), reason="Linux alone tells when a process began")
def test_ranks_that_torchrun_starts_again_find_the_folder_of_those_before_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    own = start_time()
    assert torchrun_start() == parent_start() == own
    first = trained_in(monkeypatch)
    assert first == trained_in(monkeypatch) == [f"outputs/{own:%Y-%m-%d/%H-%M-%S}{end}" for end in ("", "-2", "")]
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        print(file=other.stdin, flush=True)
        other.stdout.readline()  # for a moment a new process shows no variables
        monkeypatch.setattr(os, "getppid", lambda: other.pid)
        assert own < start_time() == start_time() <= datetime.now()
        assert torchrun_start() is None, "it has started what has started this process"
        other.kill()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    now = datetime.now()
    assert now <= start_time(), "any other run has its own"


@pytest.mark.parametrize(
    ("restarts", "name", "has_run", "is_told"),
    [
        ("1", "2026-11-22/10-15-00", False, True),
        ("0", "2026-11-22/10-15-00", False, False),
        ("1", "2026-11-22/10-15-00", True, False),
        ("1", "2026-11-22/10-15-00-2", False, False),
        ("1", "my/own", False, False),
    ],
)
def test_a_run_that_does_not_find_itself_again_says_so(
    restarts: str, name: str, has_run: bool, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    folder = tmp_path / "outputs" / name
    (folder / FOLDER if has_run else folder).mkdir(parents=True)
    tell_of_new_start(folder)
    assert ("the run begins anew" in capsys.readouterr().out) == is_told
