"""A folder that cannot be written is told apart from one that can be, without a trace of the question."""

import subprocess
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT_S

from pipetransformer.autocache.writable import check_writable
from pipetransformer.errors import Unwritable


@pytest.mark.parametrize("name", [".", "features", "some/deep/folder"])
def test_a_folder_that_is_there_or_can_be_made_is_fine_and_left_as_it_was(tmp_path: Path, name: str) -> None:
    (tmp_path / "kept").touch()
    check_writable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_a_relative_folder_is_where_the_run_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_writable(Path("features"))


@pytest.mark.parametrize("name", ["file", "file/features"])
def test_a_file_in_the_way_is_refused_with_the_remedy(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unwritable, match=rf"{tmp_path / name} cannot be written .*file.*name another one by path="):
        check_writable(tmp_path / name)


def test_a_folder_in_which_nothing_can_be_made_is_refused() -> None:
    with pytest.raises(Unwritable, match="/proc/features cannot be written"):
        check_writable(Path("/proc/features"))


def test_a_parent_that_goes_meanwhile_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    going, exists = tmp_path / "going", Path.exists
    going.mkdir()

    def exists_and_goes(path: Path) -> bool:
        found = exists(path)
        if found and path == going:
            going.rmdir()
        return found

    monkeypatch.setattr(Path, "exists", exists_and_goes)
    check_writable(going / "features")


def test_asking_loads_no_torch() -> None:
    code = "import sys, pipetransformer.autocache.writable; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert done.stdout.strip() == "False"
