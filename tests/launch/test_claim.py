"""One run at a time goes on in a folder."""

import errno
import fcntl
from contextlib import ExitStack
from pathlib import Path
from threading import Timer

import pytest

from pipetransformer.config.compose import compose_training
from pipetransformer.errors import UserError
from pipetransformer.launch import start
from pipetransformer.launch.claim import claimed


def test_a_second_run_is_refused_whatever_it_is_to_do_there(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with claimed(tmp_path):
        for options, option in (((), "run"), (("overwrite=true",), "run"), (("resume=auto",), "sweep")):
            sweep = "twice" if option == "sweep" else None
            with pytest.raises(UserError, match=rf"^a run goes on in {tmp_path}; .* another hydra.{option}.dir=$"):
                start.run_in_folder(compose_training(options), tmp_path, lambda: None, sweep)
    with claimed(tmp_path / "other"), claimed(tmp_path):
        pass
    assert [path.name for path in (tmp_path / "other").iterdir()] == []
    assert (tmp_path / "config.yaml").exists()


def test_after_a_restart_it_waits_for_what_the_rank_before_it_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with ExitStack() as before:
        before.enter_context(claimed(tmp_path))
        end = Timer(0.1, before.close)
        end.start()
        with claimed(tmp_path):
            end.join()


def test_nothing_is_locked_where_the_file_system_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with claimed(tmp_path), claimed(tmp_path):
        pass
    with claimed(Path("/proc/none")):
        pass
