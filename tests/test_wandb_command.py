"""A command that logs to W&B leaves no keys and tokens and needs no home, and is reached from this machine alone."""

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import TRAIN, has_not_ended, processes, started, train
from support.jobs import TINY

LISTENING = "0A"
LOOPBACK = ("0100007F", "0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F")  # 127.0.0.1, ::1, and the first as IPv6

KEY = "0123456789abcdef0123456789abcdef01234567"
HUB = "hf_PlantedPlantedPlanted"
PASSWORD = "planted-password"


@dataclass(frozen=True)
class Ran:
    """What a run wrote, W&B's files and the output included, and the addresses on which it listened meanwhile."""

    written: dict[Path, bytes]
    listened: set[str]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    folder = tmp_path_factory.mktemp("run")
    words = (
        *TINY, "logger=wandb", f"logger.tags=['https://me:{PASSWORD}@host']", f"logger.name={HUB}",
        f"+hydra.job.env_set.SOME_TOKEN={PASSWORD}", "++model.options.drop_rate=0.0", "epochs=3", "hydra.run.dir=run",
        "parallel.world_size=2", "parallel.device=cpu",
    )  # fmt: skip
    listened: set[str] = set()
    with started(folder, TRAIN, *words, WANDB_API_KEY=KEY, HF_TOKEN=HUB, HOME="/dev/null/home") as (process, mark):
        while has_not_ended(process):
            listened |= listeners(processes(mark))
        out, err = process.communicate()
    assert process.returncode == 0, err
    files = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    return Ran({**files, Path("output"): (out + err).encode()}, listened)


def listeners(pids: list[int]) -> set[str]:
    """Hexadecimal addresses on which processes listen."""
    inodes = set()
    for pid in pids:
        try:
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                inodes |= {*re.findall(r"^socket:\[(\d+)\]$", os.readlink(entry))}
        except OSError:  # it ended, or the entry did
            continue
    tables = [
        line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {row[1].partition(":")[0] for row in tables if row[3] == LISTENING and row[9] in inodes}


@pytest.mark.parametrize("secret", [KEY, HUB, PASSWORD])
def test_no_file_of_the_run_holds_a_secret(ran: Ran, secret: str) -> None:
    assert any(file.suffix == ".wandb" for file in ran.written)
    assert [str(file) for file, content in ran.written.items() if secret.encode() in content] == []


def test_a_run_whose_home_cannot_be_written_keeps_its_tables_in_its_folder(ran: Ran) -> None:
    assert b"/dev/null" not in ran.written[Path("output")], "nobody complains"
    (sent,) = (content for file, content in ran.written.items() if file.suffix == ".wandb")
    staged = {*re.findall(rb"/[!-~]+/artifacts/staging/tmp[a-z0-9_]{8}", sent)}
    assert staged
    assert staged <= {str(file).encode() for file in ran.written}


def test_a_sweep_with_a_secret_among_its_arguments_is_refused(tmp_path: Path) -> None:
    ended = train(tmp_path, "-m", *TINY, "seed=1,2", f"+hydra.job.env_set.SOME_TOKEN={PASSWORD}")
    assert ended.code == 1
    assert "SOME_TOKEN=*** holds a key or token, and Hydra writes all arguments" in ended.err
    assert PASSWORD not in ended.out + ended.err
    assert list(tmp_path.rglob("*")) == []


def test_this_test_sees_a_listener() -> None:
    with socket.create_server(("127.0.0.1", 0)):
        assert listeners([os.getpid()]) & {*LOOPBACK}
    with socket.create_server(("", 0)):
        assert listeners([os.getpid()]) - {*LOOPBACK}


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux")
def test_all_processes_of_a_run_and_of_wandb_listen_on_loopback(ran: Ran) -> None:
    assert ran.listened, "the ranks meet somewhere"
    assert ran.listened <= {*LOOPBACK}
