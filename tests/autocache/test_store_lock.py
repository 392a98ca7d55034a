"""One run writes a store and nobody else sees it meanwhile; then any number read it, and nobody writes."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from pipetransformer.autocache import store_lock
from pipetransformer.autocache.store_lock import (
    FILLS,
    GATE,
    KEEPS,
    LOCK,
    NAMELESS,
    READS,
    Holder,
    StoreLock,
    holders,
    is_locked,
)
from pipetransformer.errors import StoreInUse

FEATURES = "the output of block 4 of some/model"
HOLD = """
import sys
from pathlib import Path
from pipetransformer.autocache.store_lock import FILLS, Holder, StoreLock
lock = StoreLock(Path(sys.argv[1]), Holder.here("the first", FILLS, sys.argv[2]))
lock.take()
print("took", flush=True)
for line in sys.stdin:
    lock.share()
    print("shares", flush=True)
"""
MIX = """
import os, random, sys
from pathlib import Path
from pipetransformer.autocache.store_lock import FILLS, Holder, StoreLock
from pipetransformer.errors import StoreInUse
path, draw, alone = Path(sys.argv[1]), random.Random(int(sys.argv[2])), Path(sys.argv[1]) / "alone"
num_alone = num_rounds = 0
def write():
    global num_alone
    os.close(os.open(alone, os.O_CREAT | os.O_EXCL))
    alone.unlink()
    num_alone += 1
while num_rounds < 100:
    lock = StoreLock(path, Holder.here(sys.argv[2], FILLS, ""))
    try:
        lock.take()
    except StoreInUse:
        lock.close()
        continue
    num_rounds += 1
    if not lock.is_shared:
        write()
        lock.share()
    assert not alone.exists(), "somebody writes beside a reader"
    if draw.random() < 0.5 and lock.claim():
        write()
    lock.release()
print(num_alone)
"""


def lock(path: Path, owner: str = "a run", use: str = FILLS) -> StoreLock:
    return StoreLock(path, Holder.here(owner, use, FEATURES if use == FILLS else ""))


@contextmanager
def other_run(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the lock, and shares it when it is told to."""
    command = [sys.executable, "-c", HOLD, str(path), FEATURES]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "took\n"
        yield process


def tell_to_share(process: subprocess.Popen[str]) -> None:
    assert process.stdin
    assert process.stdout
    process.stdin.write("share\n")
    process.stdin.flush()
    assert process.stdout.readline() == "shares\n"


def test_while_one_run_fills_no_other_gets_in_and_it_learns_who_does(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        second = lock(tmp_path)
        words = rf"in use by the first \(process {process.pid} on .*which stores the output of block 4"
        with pytest.raises(StoreInUse, match=words) as refused:
            second.take()
        ((name, use, features),) = refused.value.holders
        assert (use, features) == (FILLS, FEATURES)
        assert name.startswith("the first")
        second.close()


def test_once_it_shares_others_read_and_none_of_them_writes(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        tell_to_share(process)
        second, third = lock(tmp_path, "the second"), lock(tmp_path, "the third")
        second.take()
        third.take()
        assert second.is_shared
        assert third.is_shared
        names = [(one.owner, one.use) for one in holders(tmp_path)]
        assert names == [("the first", READS), ("the second", READS), ("the third", READS)]
        assert not second.claim()
        assert second.is_shared, "what could not be claimed is still shared"
        third.release()
        process.kill()
        process.wait()
        assert second.claim(), "a killed reader keeps nobody out"
        assert not second.is_shared
        second.release()
    assert not holders(tmp_path)


def test_a_run_that_may_write_to_its_end_shares_with_nobody(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        tell_to_share(process)
        keeping = lock(tmp_path, use=KEEPS)
        with pytest.raises(StoreInUse, match="in use by the first"):
            keeping.take()
        keeping.close()


def test_a_killed_run_leaves_the_store_to_the_next(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        process.kill()
        process.wait()
        second = lock(tmp_path)
        second.take()
        assert not second.is_shared
        assert [one.owner for one in holders(tmp_path)] == ["a run"]
        second.release()


def test_what_a_process_of_a_killed_run_still_has_open_is_not_written(tmp_path: Path) -> None:
    (tmp_path / "train.features").write_bytes(b"features")
    second = lock(tmp_path)
    with open(tmp_path / "train.features", "rb") as left:
        fcntl.flock(left, fcntl.LOCK_SH)
        with pytest.raises(StoreInUse, match="a run which was killed still has open") as refused:
            second.take()
        assert refused.value.holders == (("a run that was killed", FILLS, FEATURES),), "it is worth to wait"
        second.close()
        assert is_locked(tmp_path)
    second = lock(tmp_path)
    second.take()
    second.release()
    assert not is_locked(tmp_path)


def test_nobody_comes_in_while_a_lock_changes_its_kind(tmp_path: Path) -> None:
    """Each of several processes takes, shares, claims and gives back; whoever writes is alone, however they meet."""
    commands = [[sys.executable, "-c", MIX, str(tmp_path), str(seed)] for seed in range(3)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    ended = [(process.communicate(timeout=120)[0], process.returncode) for process in running]
    assert [code for _, code in ended] == [0, 0, 0]
    assert sum(int(num_alone) for num_alone, _ in ended) > 0, "whoever comes first is alone"


TEXTS = {  # <pid> stands for a process that lives
    "empty": "",
    "cut": "{",
    "a list": "[]",
    "fields missing": '{"owner": 1}',
    "a number as name": '{"owner": 1, "pid": <pid>, "host": ""}',
    "nested": "[" * 100_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_a_damaged_lock_file_names_nobody_and_harms_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / LOCK).write_text(text.replace("<pid>", str(os.getpid())))
    assert holders(tmp_path) == []
    second = lock(tmp_path)
    with open(tmp_path / LOCK) as raw:
        fcntl.flock(raw, fcntl.LOCK_EX)
        with pytest.raises(StoreInUse, match=NAMELESS):
            second.take()
    second.take()
    second.release()


def test_a_gate_that_stays_shut_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_lock, "GATE_S", 0.0)
    second = lock(tmp_path)
    with open(tmp_path / GATE, "w") as gate:
        fcntl.flock(gate, fcntl.LOCK_EX)
        with pytest.raises(StoreInUse, match="gate stays locked"):
            second.take()
    second.close()


def test_a_user_who_may_only_read_learns_whether_a_run_has_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = lock(tmp_path)
    own.take()

    def denied(file: Path, mode: str = "r", **options: Any) -> IO[Any]:
        if mode != "r":
            raise PermissionError(errno.EACCES, "denied")
        return open(file, mode, **options)

    with monkeypatch.context() as patch:
        patch.setattr(store_lock, "open", denied, raising=False)
        assert is_locked(tmp_path)
    own.release()
    monkeypatch.setattr(store_lock, "open", denied, raising=False)
    assert not is_locked(tmp_path)
