"""The same command under ``torchrun``, on one machine."""

from pathlib import Path

import pytest
from support.command import Ended, torchrun, train
from support.jobs import ROOT, TINY, Job

RUN = (*TINY, "epochs=3", "hydra.run.dir=run", "checkpoint.every_steps=2", "resume=auto", "freeze.interval=0.3")
DYING = f"""
import os
import sys
from contextlib import nullcontext
from unittest import mock

sys.path.insert(0, {str(ROOT / "tests")!r})
import pipetransformer as pt
from pipetransformer.command import main
from support.faults import Fault
from support.pool import BRIEF

for name, value in BRIEF.items():  # no plan has to be good
    mock.patch(name, value).start()
death = Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=7, local_rank=1)
with nullcontext() if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) else death.injected():
    main()
names = ("config.yaml", "summary.json") if os.environ["RANK"] == "0" else ()  # which writes them
written = [open(f"run/{{name}}", "rb").read() for name in names]
sys.argv.append("log_every_steps=3")
main()
assert written == [open(f"run/{{name}}", "rb").read() for name in names], "it was complete"
"""

SCRIPT = """
summary = pt.train(
    pt.Config(
        model=pt.TimmModel(name="vit_tiny_patch16_224", pretrained=False, options={"patch_size": 4, "embed_dim": 16,
                           "depth": 2, "num_heads": 2}),
        dataset=pt.Digits(max_train_samples=64, max_eval_samples=16), epochs=1, batch_size=16, logger=pt.NoLogger(),
        freeze=pt.NoFreezing(), optim=pt.AdamW(lr=1e-3),
        parallel=pt.Parallel(device="cpu"),
    ),
    run_dir="own",
)
print(f"rank {os.environ['RANK']}: {summary['status']}, {len(summary) > 1}", flush=True)
"""
WRONG = f"""
import torch.distributed as dist
from pipetransformer.training.world import open_world

with open_world(pt.Parallel(device="cpu")):  # torchrun ends the other rank with the first one that fails
    dist.barrier()
sys.argv[1:] = {[*TINY, "batch_size=65", "hydra.run.dir=wrong"]}
main()
"""


def test_a_sweep_is_refused_with_the_right_command(tmp_path: Path) -> None:
    ended = train(tmp_path, "-m", "seed=1,2", TORCHELASTIC_RUN_ID="1", RANK="0")  # by which it knows torchrun
    assert ended.code != 0
    assert "A sweep cannot run under torchrun" in ended.err
    assert "python" in ended.err
    assert "-m seed=1,2" in ended.err
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ended]:
    """A folder in which two ranks ran the command, died and ran it again, and once more when it was complete.

    Then they train by a script of the user's own, and are given an option that does not fit. One start of torchrun
    takes longer than all of it.
    """
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "dying.py").write_text(DYING + SCRIPT + WRONG)
    return folder, torchrun(folder, "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", "dying.py", *RUN)


def test_all_ranks_write_one_run_folder_also_when_torchrun_starts_them_again(ended: tuple[Path, Ended]) -> None:
    folder, end = ended
    assert sorted(path.name for path in folder.iterdir()) == ["dying.py", "own", "run", "wrong"], end.err
    job = Job(folder / "run", error="")
    assert [event["step"] for event in job.events("step")] == list(range(1, 13))
    assert [event["step"] for event in job.events("resume")] in ([2], [4], [6]), "the last one that was published"
    assert job.events("start")[0]["world_size"] == 2
    assert job.summary["status"] == "completed"


def test_a_complete_run_is_left_as_it_is(ended: tuple[Path, Ended]) -> None:
    _, end = ended
    assert "nothing to resume" in end.out + end.err


def test_no_library_complains_of_how_a_rank_ends(ended: tuple[Path, Ended]) -> None:
    _, end = ended
    assert "nanobind" not in end.out + end.err


def test_a_script_that_trains_runs_under_torchrun(ended: tuple[Path, Ended]) -> None:
    _, end = ended
    for line in ("rank 0: completed, True", "rank 1: completed, False"):  # in the middle of another one, perhaps
        assert end.out.count(line) == 1, end.out


def test_an_error_is_printed_by_one_rank_and_shown_in_torchruns_summary(ended: tuple[Path, Ended]) -> None:
    _, end = ended
    assert end.code != 0
    lines = [line for line in end.err.splitlines() if line.startswith("batch_size=65 is larger than the 64 training")]
    assert len(lines) == 1, end.err
    assert "UserError: batch_size=65 is larger" in end.err
    assert "To enable traceback see" not in end.err
