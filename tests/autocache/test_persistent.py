"""A store is found again by the run that would make the same, and refused to all others."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.caches import OURS

from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.persistent import IDENTITY, lock_store_dir, other_stores
from pipetransformer.autocache.store_lock import GATE, LOCK
from pipetransformer.errors import StaleStore, StoreInUse, Unwritable

OPEN = f"""
import os, sys
from pathlib import Path
from pipetransformer.autocache.fingerprint import StoreFingerprint
from pipetransformer.autocache.persistent import lock_store_dir
with lock_store_dir(Path(sys.argv[1]), {OURS!r}, "an earlier run"):
"""
AND_HOLD = """
    print("ready", flush=True)
    sys.stdin.read()
"""
AND_LEAVE_A_CHILD = """
    is_parent = os.fork() > 0
    if not is_parent:
        sys.stdin.read()
        os._exit(0)
print("ready", flush=True)
os.wait()
"""


def visit(root: Path) -> None:
    """Opens our place and gives it back."""
    with lock_store_dir(root, OURS, "a run"):
        pass


def store(root: Path, fingerprint: StoreFingerprint = OURS) -> Path:
    """A store with a feature in it, closed."""
    with lock_store_dir(root, fingerprint, "a run") as store_dir:
        (store_dir.path / "features").write_text("features")
    return store_dir.path


@contextmanager
def holder(root: Path, then: str = AND_HOLD) -> Iterator[subprocess.Popen[str]]:
    """A process that has opened the place, and ends with its input."""
    command = [sys.executable, "-c", OPEN + then, str(root)]
    with subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process


def test_a_place_is_new_once_and_found_again_with_what_it_holds(tmp_path: Path) -> None:
    with lock_store_dir(tmp_path / "made" / "features", OURS, "a run") as first:
        assert first.is_new
        (first.path / "features").write_text("features")
    with lock_store_dir(tmp_path / "made" / "features", replace(OURS), "another run") as second:
        assert (second.path, second.is_new) == (first.path, False)
        assert (second.path / "features").read_text() == "features"


def test_its_name_tells_model_digest_node_and_split(tmp_path: Path) -> None:
    with lock_store_dir(tmp_path, OURS, "a run", node=3) as store_dir:
        assert store_dir.path == tmp_path / f"some_vit_tiny-{OURS.digest()}" / "node3" / "train"
        assert StoreFingerprint.from_json((store_dir.path / IDENTITY).read_text()) == OURS


@pytest.mark.parametrize("name", ["../../elsewhere", "train[:10%]", "", "a/b", "..", ".", "x" * 400])
def test_any_name_of_a_split_or_a_model_stays_within_the_root(tmp_path: Path, name: str) -> None:
    with lock_store_dir(tmp_path, replace(OURS, split_name=name, model=name), "a run") as store_dir:
        assert len(store_dir.path.resolve().relative_to(tmp_path.resolve()).parts) == 3


def test_another_identity_node_or_split_has_a_place_of_its_own(tmp_path: Path) -> None:
    names = replace(OURS, split_name="test"), replace(OURS, split_identity="cd" * 16), OURS
    with (
        lock_store_dir(tmp_path, names[0], "a run") as test,
        lock_store_dir(tmp_path, names[1], "a run") as other,
        lock_store_dir(tmp_path, names[2], "a run") as ours,
        lock_store_dir(tmp_path, names[2], "a run", node=1) as second_node,
    ):
        assert len({each.path for each in (test, other, ours, second_node)}) == 4


def replace_by_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda file: file.write_text(replace(OURS, device="gpu").to_json()), r"differs in device \(gpu, here cpu\)"),
        (lambda file: file.unlink(), "has no identity.json and holds 1 other entries, the first is features"),
        (lambda file: file.write_text("{"), "has an identity.json that cannot be read"),
        (lambda file: file.write_bytes(b"\xff\xfe"), "has an identity.json that cannot be read"),
        (replace_by_a_folder, "has an identity.json that cannot be read"),
    ],
    ids=["differs", "missing", "damaged", "not text", "a folder"],
)
def test_a_store_that_does_not_say_that_it_is_ours_is_refused_and_left_alone(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    path = store(tmp_path)
    spoil(path / IDENTITY)
    with pytest.raises(StaleStore, match=rf"{path} {words}.*delete it, or take another path"):
        visit(tmp_path)
    assert (path / "features").read_text() == "features"
    with pytest.raises(StaleStore):  # nor is it locked now
        visit(tmp_path)


def test_a_run_that_died_before_it_had_written_its_identity_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            visit(tmp_path)
    assert not list(tmp_path.rglob(IDENTITY)), "a reader sees all of it or nothing"
    with lock_store_dir(tmp_path, OURS, "a run") as store_dir:
        assert store_dir.is_new
        assert sorted(path.name for path in store_dir.path.iterdir()) == [GATE, IDENTITY, LOCK]


def test_a_place_in_use_is_refused_with_who_has_it(tmp_path: Path) -> None:
    holds = rf"in use by outputs/1 \(process {os.getpid()} on {socket.gethostname()}\); wait"
    with lock_store_dir(tmp_path, OURS, "outputs/1"):
        for _ in range(2):  # to ask changes nothing
            with pytest.raises(StoreInUse, match=holds):
                visit(tmp_path)
    with lock_store_dir(tmp_path, OURS, "outputs/2"), pytest.raises(StoreInUse, match="in use by outputs/2"):
        visit(tmp_path)


def test_a_run_that_fails_gives_its_place_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="a worker failed"), lock_store_dir(tmp_path, OURS, "a run"):
        raise RuntimeError("a worker failed")
    with lock_store_dir(tmp_path, OURS, "a run") as store_dir:
        assert not store_dir.is_new


def test_an_error_of_the_disk_while_the_place_is_open_stays_what_it_is(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), lock_store_dir(tmp_path, OURS, "a run") as store_dir:
        (store_dir.path / "missing").read_bytes()


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        with pytest.raises(StoreInUse, match=rf"in use by an earlier run \(process {process.pid} on"):
            visit(tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with lock_store_dir(tmp_path, OURS, "a run") as store_dir:
            assert not store_dir.is_new


def test_a_forked_process_that_lives_on_does_not_keep_what_was_given_back(tmp_path: Path) -> None:
    with holder(tmp_path, AND_LEAVE_A_CHILD):
        visit(tmp_path)


def test_a_root_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match=r"cannot be written .*file.*name another one by path="):
        visit(tmp_path / "file")


def test_other_stores_of_the_same_samples_are_listed_with_how_they_differ(tmp_path: Path) -> None:
    older = store(tmp_path, replace(OURS, torch_version="2.10"))
    store(tmp_path, replace(OURS, split_identity="cd" * 16))
    damaged = store(tmp_path, replace(OURS, hidden_size=8))
    (damaged / IDENTITY).write_text("{")
    store(tmp_path, replace(OURS, split_name="test"))
    store(tmp_path)
    found = other_stores(tmp_path, OURS)
    assert len(found) == 2
    assert f"{older.relative_to(tmp_path)} differs in torch version (2.10, here 2.11)" in found
    assert any(line.startswith(f"{damaged.relative_to(tmp_path)} has an identity.json that") for line in found)
    assert other_stores(tmp_path, OURS, node=1) == other_stores(tmp_path / "missing", OURS) == []


def test_looking_at_others_neither_makes_nor_locks_anything(tmp_path: Path) -> None:
    with lock_store_dir(tmp_path, replace(OURS, hidden_size=8), "a run"):
        before = sorted(tmp_path.rglob("*"))
        assert len(other_stores(tmp_path, OURS)) == 1
        assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_link_that_leads_out_of_the_folder_is_refused_and_nothing_is_made_there(tmp_path: Path, level: int) -> None:
    root, outside = tmp_path / "features", tmp_path / "outside"
    path = store(root)
    outside.mkdir()
    parts = [path.parents[1], path.parent, path]
    shutil.rmtree(parts[level])
    parts[level].symlink_to(outside)
    with pytest.raises(StaleStore, match=r"leads to .*outside.* by a symbolic link"):
        visit(root)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("name", [LOCK, IDENTITY, f"{IDENTITY}.tmp", "features"])
def test_no_file_outside_is_opened_by_a_link_in_a_store(tmp_path: Path, name: str) -> None:
    root, outside = tmp_path / "features", tmp_path / "outside"
    path = store(root)
    outside.write_text("precious")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(outside)
    with pytest.raises(StaleStore, match=r"leads to .*outside by a symbolic link, out of "):
        visit(root)
    assert outside.read_text() == "precious"


def test_the_folder_of_all_stores_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "features").symlink_to(tmp_path / "disk")
    visit(tmp_path / "features")
    assert list((tmp_path / "disk").iterdir())
