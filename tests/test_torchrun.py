"""The same command under ``torchrun``, on one machine and on what looks like two."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from support.command import TRAIN, Ended, torchrun
from support.jobs import TINY, Job

RUN = (*TINY, "epochs=3", "hydra.run.dir=run")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_all_ranks_write_one_run_folder(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", TRAIN, *RUN)
    assert ended.code == 0, ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    job = Job(tmp_path / "run", error="")
    assert job.summary["status"] == "completed"
    assert job.events("start")[0]["world_size"] == 2
    assert not (tmp_path / "run" / "cache").exists()


def test_two_machines_train_one_model(tmp_path: Path) -> None:
    port = free_port()

    def agent(node: int) -> Ended:
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "test"]
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
        return torchrun(folder, *nodes, TRAIN, *RUN, f"cache.path={folder / 'features'}")

    with ThreadPoolExecutor() as agents:
        ended = list(agents.map(agent, (0, 1)))
    assert [end.code for end in ended] == [0, 0], ended
    runs = list(tmp_path.glob("node*/run"))
    assert len(runs) == 1, "the node of rank 0 has the run folder, and the other none"
    job = Job(runs[0], error="")
    assert job.summary["status"] == "completed"
    assert job.events("start")[0]["world_size"] == 2
    assert max(plan["cache_level"] for plan in job.summary["plans"]) > 0, "each node fills a cache of its own"


def test_a_sweep_is_refused_with_the_right_command(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "1", TRAIN, "-m", "seed=1,2")
    assert ended.code != 0
    assert "A sweep cannot run under torchrun" in ended.err
    assert "python" in ended.err
    assert "-m seed=1,2" in ended.err
    assert not list(tmp_path.iterdir())
