"""A run's failure is told by its cause, whichever rank ends first."""

import errno
import gc
import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
from support.jobs import ROOT, loaded

from pipetransformer.errors import (
    Diverged,
    InfeasiblePlan,
    RankLost,
    StaleStore,
    Stopped,
    StoreFailed,
    Unwritable,
    UserError,
)
from pipetransformer.launch import elastic, failures
from pipetransformer.training import run

CLOSED = "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"
FAILED = {"status": "failed", "error": "rank 1 was killed"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StaleStore("delete it, or take another `path`"), "delete it, or take another cache.path"),
        (StoreFailed(errno.EIO, "set `disk_gib` lower"), "set cache.disk_gib lower"),
        (Unwritable("give another"), "give another"),
        (Diverged("lower it"), "lower it"),
        (InfeasiblePlan("lower `num_stages` or `num_devices`"), "lower parallel.num_stages or parallel.world_size"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_an_error_that_the_user_can_fix_is_shown_without_a_trace_in_terms_of_options(
    error: Exception, message: str, tmp_path: Path
) -> None:
    failures.record(tmp_path, 0, error)
    cause, line = failures.cause(tmp_path, 1, {0: 1})
    assert isinstance(cause, UserError)
    assert str(cause) == line == message


def raised(error: BaseException, while_handling: BaseException | None = None) -> BaseException:
    try:
        if while_handling is None:
            raise error
        try:
            raise while_handling
        except BaseException:
            raise error  # noqa: B904 - as in a finally clause
    except BaseException as caught:
        return caught


def test_any_other_error_is_shown_with_its_rank_and_its_trace(tmp_path: Path) -> None:
    failures.record(tmp_path, 1, raised(KeyError("weight")))
    cause, line = failures.cause(tmp_path, 2, {1: 1})
    assert isinstance(cause, RuntimeError)
    assert str(cause).startswith("rank 1 failed: KeyError: 'weight'\nTraceback")
    assert line == "KeyError: 'weight'"


@pytest.mark.parametrize(
    "later", [RuntimeError(CLOSED), KeyboardInterrupt(), ConnectionResetError()], ids=lambda e: type(e).__name__
)
def test_a_rank_that_fails_is_the_cause_and_not_one_that_loses_its_connection(later: Exception, tmp_path: Path) -> None:
    failures.record(tmp_path, 0, raised(RuntimeError(CLOSED)))
    failures.record(tmp_path, 1, raised(later, while_handling=KeyError("weight")))
    failures.record(tmp_path, 2, raised(KeyboardInterrupt()))
    cause, line = failures.cause(tmp_path, 3, {0: 1})
    assert line == "KeyError: 'weight'"
    assert str(cause).startswith("rank 1 failed")


def test_a_rank_without_a_word_was_killed(tmp_path: Path) -> None:
    failures.record(tmp_path, 0, raised(RuntimeError(CLOSED)))
    failures.record(tmp_path, 2, raised(KeyboardInterrupt()))
    cause, line = failures.cause(tmp_path, 3, {0: 1})
    assert isinstance(cause, UserError)
    assert line.startswith("rank 1 was killed, perhaps for want of memory; lower batch_size")
    _, line = failures.cause(tmp_path, 4, {0: 1})
    assert line.startswith("one of the ranks 1, 3 was killed, perhaps")


def test_the_rank_that_was_killed_first_is_named_and_not_those_that_the_launcher_ended(tmp_path: Path) -> None:
    failures.record(tmp_path, 2, raised(KeyboardInterrupt()))
    (tmp_path / "0.part").write_text('{"rank": ')  # ended by the launcher in the middle of its record
    _, line = failures.cause(tmp_path, 4, {3: -signal.SIGKILL})
    assert line.startswith("rank 3 was killed by SIGKILL, perhaps")


@pytest.mark.parametrize(("exit_codes", "begin", "num_lost"), [
    ({1: -signal.SIGABRT}, "rank 1 ended by SIGABRT: nccl's watchdog may have ended it", 0),
    ({0: -signal.SIGABRT, 1: -signal.SIGABRT}, "one of the ranks 0, 1 ended by SIGABRT", 0),
    ({0: -signal.SIGABRT, 1: -signal.SIGKILL}, "rank 1 was killed by SIGKILL, perhaps", 1),
])  # fmt: skip
def test_a_rank_that_aborts_is_not_said_to_be_killed(
    exit_codes: dict[int, int], begin: str, num_lost: int, tmp_path: Path
) -> None:
    """The watchdog of nccl ends a rank by it that waits for one that hangs; no machine took either."""
    failures.record(tmp_path, 2, raised(KeyboardInterrupt()))
    cause, line = failures.cause(tmp_path, 4, exit_codes)
    assert isinstance(cause, RankLost)
    assert cause.num_lost == num_lost
    assert line.startswith(begin)


def test_a_rank_that_does_not_come_to_run_is_not_said_to_be_killed(tmp_path: Path) -> None:
    cause, line = failures.cause(tmp_path, 2, {1: 1})
    assert isinstance(cause, RuntimeError)
    assert line == "rank 1 ended with exit code 1 before it began; its output tells why"


def test_a_lost_connection_is_the_cause_where_no_rank_was_killed(tmp_path: Path) -> None:
    failures.record(tmp_path, 0, raised(RuntimeError(CLOSED)))
    failures.record(tmp_path, 1, raised(KeyboardInterrupt()))
    cause, line = failures.cause(tmp_path, 2, {0: 1})
    assert "Connection closed by peer" in line
    assert str(cause).startswith("rank 0 failed: RuntimeError")


def test_where_all_ranks_were_interrupted_their_server_was_killed(tmp_path: Path) -> None:
    for rank in range(2):
        failures.record(tmp_path, rank, raised(KeyboardInterrupt()))
    cause, line = failures.cause(tmp_path, 2, {0: 255})
    assert isinstance(cause, UserError)
    assert line.startswith("the process that the ranks are forked from was killed")


def test_processes_do_not_import_the_script_that_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    main, config = sys.modules["__main__"], loaded()
    before = dict(vars(main))
    with elastic._main_not_imported(config):
        assert main.__spec__ is None
        assert not hasattr(main, "__file__")
    assert vars(main) == before
    monkeypatch.setattr(type(config.dataset), "__module__", "__main__")
    with elastic._main_not_imported(config):
        assert vars(main) == before, "what it defines has to be imported"


@pytest.mark.parametrize(
    ("told", "ending", "recorded"),
    [
        (None, FAILED, FAILED),
        ({"status": "interrupted", "steps": 1}, FAILED, FAILED | {"steps": 1}),
        ({"status": "interrupted"}, {"status": "interrupted"}, {"status": "interrupted"}),
        ({"status": "failed", "error": "Connection closed by peer"}, FAILED, FAILED),
        ({"status": "diverged", "error": "lower it"}, FAILED, {"status": "diverged", "error": "lower it"}),
        ({"status": "completed"}, {"status": "failed"}, {"status": "completed"}),
    ],
)
def test_how_a_run_ended_is_recorded_where_rank_0_could_not_tell(
    tmp_path: Path, told: dict[str, object] | None, ending: dict[str, str], recorded: dict[str, object]
) -> None:
    file = tmp_path / "summary.json"
    if told is not None:
        file.write_text(json.dumps(told))
    elastic._record(file, ending)
    assert json.loads(file.read_text()) == recorded


@pytest.mark.parametrize(("status", "exit_code"), [("requeue", 75), ("interrupted", 130)])
def test_a_run_that_was_stopped_is_saved_where_it_has_a_checkpoint(tmp_path: Path, status: str, exit_code: int) -> None:
    found = []
    for _ in range(2):
        with pytest.raises(Stopped) as stopped:
            elastic._unless_stopped({"status": status}, tmp_path)
        assert stopped.value.exit_code == exit_code
        found.append(stopped.value.saved_in)
        (tmp_path / "checkpoints/step-00000008").mkdir(parents=True, exist_ok=True)
    assert found == [None, tmp_path]
    assert elastic._unless_stopped({"status": "completed"}, tmp_path) == {"status": "completed"}


@pytest.mark.parametrize("signals", [[], [signal.SIGTERM]], ids=["no signal", "a signal"])
def test_a_signal_that_comes_before_the_ranks_ends_them(
    signals: list[signal.Signals], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher waits for its fork server, and has no children yet."""
    monkeypatch.setattr(elastic.multiprocessing, "active_children", list)
    monkeypatch.setattr(run, "run_job", lambda *_: {"status": "completed"})
    monkeypatch.setenv("RANK", "0")
    try:
        with elastic.forwarded_signals(tmp_path) as came:
            for each in signals:
                signal.raise_signal(each)
            with pytest.raises(KeyboardInterrupt) if signals else nullcontext():
                elastic._run_rank(loaded(), tmp_path, {}, None, tmp_path)
            assert came == signals
    finally:
        gc.unfreeze()


def test_a_launcher_waits_for_ranks_that_are_not_its_own_any_more(tmp_path: Path) -> None:
    code = f"""
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pipetransformer.launch.failures import alive
with alive(Path({str(tmp_path)!r})):
    print("here", flush=True)
    sys.stdin.read()
"""
    words = [sys.executable, "-c", code]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(words, cwd=ROOT, **pipes) as rank, ThreadPoolExecutor() as pool:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"here\n"
        waits = pool.submit(failures.wait_for_ranks, tmp_path, 60)
        assert not waits.done()
        failures.wait_for_ranks(tmp_path, 0)  # no longer: the rank is ended
        assert rank.wait(60) == -signal.SIGKILL
        waits.result(60)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("parallel=single", "torchrun started 2; start one, or take another parallel=$"),
        ("parallel.world_size=3", "torchrun started 2 processes; leave parallel.world_size out or make them equal$"),
    ],
)
def test_other_processes_than_those_of_torchrun_are_refused(
    option: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=words):
        elastic.run_here(loaded(option), tmp_path, {}, None)
