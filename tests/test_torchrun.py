"""The same command under ``torchrun``, on one machine."""

from pathlib import Path

from support.command import TRAIN, torchrun
from support.jobs import ROOT, TINY, Job

RUN = (*TINY, "epochs=3", "hydra.run.dir=run")
DYING = f"""
import os
import sys
from contextlib import nullcontext

sys.path.insert(0, {str(ROOT / "tests")!r})
from pipetransformer.command import main
from support.faults import Fault

death = Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=7, local_rank=1)
with nullcontext() if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else death.injected():
    main()
"""

SCRIPT = """
import os
import pipetransformer as pt

summary = pt.train(
    pt.Config(
        model=pt.TimmModel(name="vit_tiny_patch16_224", pretrained=False, options={"patch_size": 4, "embed_dim": 16,
                           "depth": 2, "num_heads": 2}),
        dataset=pt.Digits(max_train_samples=64, max_eval_samples=16), epochs=1, batch_size=16, logger=pt.NoLogger(),
        freeze=pt.NoFreezing(), optim=pt.AdamW(lr=1e-3),
        parallel=pt.Parallel(device="cpu"),
    ),
    run_dir="run",
)
print(f"rank {os.environ['RANK']}: {summary['status']}, {len(summary) > 1}", flush=True)
"""


def test_a_sweep_is_refused_with_the_right_command(tmp_path: Path) -> None:
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "1", TRAIN, "-m", "seed=1,2")
    assert ended.code != 0
    assert "A sweep cannot run under torchrun" in ended.err
    assert "python" in ended.err
    assert "-m seed=1,2" in ended.err
    assert not list(tmp_path.iterdir())


def test_an_error_is_printed_by_one_rank_and_shown_in_torchruns_summary(tmp_path: Path) -> None:
    run = (*TINY, "batch_size=65", "hydra.run.dir=run")
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", TRAIN, *run)
    assert ended.code != 0
    lines = [line for line in ended.err.splitlines() if line.startswith("batch_size=65 is larger than the 64 training")]
    assert len(lines) == 1, ended.err
    assert "UserError: batch_size=65 is larger" in ended.err
    assert "To enable traceback see" not in ended.err


def test_all_ranks_write_one_run_folder_also_when_torchrun_starts_them_again(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    run = (*RUN, "checkpoint.every_steps=2", "resume=auto", "freeze.interval=0.3")
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "dying.py", *run)
    assert ended.code == 0, ended.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dying.py", "run"]
    job = Job(tmp_path / "run", error="")
    assert [event["step"] for event in job.events("step")] == list(range(1, 13))
    assert [event["step"] for event in job.events("resume")] in ([2], [4], [6]), "the last one that was published"
    assert job.events("start")[0]["world_size"] == 2
    assert job.summary["status"] == "completed"
    written = [(tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "summary.json")]
    again = torchrun(tmp_path, "--standalone", "--nproc-per-node", "1", TRAIN, *run, "log_every_steps=3")
    assert again.code == 0, again.err
    assert "nothing to resume" in again.out + again.err
    assert written == [(tmp_path / "run" / name).read_bytes() for name in ("config.yaml", "summary.json")]


def test_a_script_that_trains_runs_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ended = torchrun(tmp_path, "--standalone", "--nproc-per-node", "2", "script.py")
    assert ended.code == 0, ended.err
    assert {"rank 0: completed, True", "rank 1: completed, False"} <= {*ended.out.splitlines()}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "script.py"]
