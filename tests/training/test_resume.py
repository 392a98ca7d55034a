"""A run that stops and goes on in another world ends as if it had never stopped."""

import errno
import json
import os
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from support.faults import Fault, run_with
from support.jobs import TINY, Job, loaded, play, play_with_steps_held_back, run_job
from support.own import resume_on_a_list
from support.pool import Pool
from support.resumes import Ran, resume_own, run_on
from support.texts import text_run, write_decoder, write_table

from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import MANIFEST, Manifest, layer_file, read_manifest
from pipetransformer.config.resuming import changes
from pipetransformer.errors import UserError
from pipetransformer.report.event_log import EVENT_LOG
from pipetransformer.training.checkpoints import _flushed_size
from pipetransformer.training.resume import Checkpoint, check_settings, cut_log, settings_of

IS_WHOLE = "RESUME_MATRIX" in os.environ  # as by make resume-matrix
EPOCHS = 16 if IS_WHOLE else 5
RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}",
    f"epochs={EPOCHS}", "precision=float64", "optim.lr=0.01", "optim.clip_norm=0.5", "freeze.interval=0.2",
)  # fmt: skip
PREFIXES = [1, 2, 3, 1]  # at a fifth of the steps each: three times more, then fewer
STEPS = 4 * EPOCHS
WORLDS = {
    "elastic": (2, ()),
    "elastic of four": (4, ()),
    "data": (3, ("parallel=data",)),
    "pipeline": (2, ("parallel=pipeline",)),
    "sharded": (2, ("parallel=sharded",)),
    "one process": (1, ()),
    "tp 2": (2, ("parallel=megatron",)),
    "dp_shard 2 x tp 2": (4, ("parallel.dp_shard=2", "parallel.tp=2")),
    "3d 1 x 2 x 2": (4, ("parallel.tp=2", "parallel.tp_algorithm=3d")),
    "cp 2": (2, ("parallel=ring",)),
}


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """The uninterrupted run, with a checkpoint after each step."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, pool.run(2, run_on, RUN, folder, PREFIXES)[0]


def stopped_at(whole: Path, step: int, folder: Path) -> Path:
    """A run folder as the run would have left it after a step."""
    name = f"step-{step:08d}"
    shutil.copytree(whole / FOLDER / name, folder / FOLDER / name)
    return folder


CELLS = [
    (1, "one process"), (8, "sharded"), (4, "pipeline"), (14, "data"), (19, "elastic of four"), (6, "3d 1 x 2 x 2"),
]  # fmt: skip
"""Other worlds meet where a resumed run is resumed again."""
if IS_WHOLE:
    WORLDS |= {
        f"{arrangement} of {num_ranks}": (num_ranks, (f"parallel={arrangement}",))
        for num_ranks, arrangement in product(range(1, 5), ("elastic", "data", "pipeline", "sharded"))
    }
    CELLS = [(step, world) for step in range(1, 61) for world in WORLDS if " of " in world and world[-1].isdigit()]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("step", "world"), CELLS)
def test_a_run_goes_on_in_any_world_as_if_it_had_never_stopped(
    pool: Pool, tmp_path: Path, whole: tuple[Path, Ran], step: int, world: str
) -> None:
    num_ranks, options = WORLDS[world]
    folder = stopped_at(whole[0], step, tmp_path)
    ranks = pool.run(num_ranks, run_on, (*RUN, *options), folder, PREFIXES, None, None)
    assert [rank.differences for rank in ranks] == num_ranks * [[]]
    assert ranks[0].first == step
    assert ranks[0].losses == pytest.approx(whole[1].losses[step:], rel=0, abs=1e-10)
    check_end(ranks[0], whole[1])


def check_end(found: Ran, expected: Ran) -> None:
    approx = ("signals", "policy_state", "metrics", "best_metrics", "guard")
    assert {k: v for k, v in found.end.items() if k not in approx} == {
        k: v for k, v in expected.end.items() if k not in approx
    }
    mean_norm = pytest.approx(expected.end["guard"]["mean_norm"], rel=1e-9)
    assert found.end["guard"] == expected.end["guard"] | {"mean_norm": mean_norm}
    assert found.end["policy_state"] == pytest.approx(expected.end["policy_state"], rel=1e-9)
    assert found.end["metrics"] == expected.end["metrics"]
    sums = expected.end["signals"]["collectors"]["gradient_norm"]
    found_sums = found.end["signals"]["collectors"]
    assert found_sums == {"gradient_norm": sums | {"sums": pytest.approx(sums["sums"], rel=1e-9)}}


@pytest.fixture(scope="module")
def decoder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, ...], Path, Ran]:
    """A decoder with dropout on a table of texts: the options, and the uninterrupted run with each checkpoint."""
    folder = write_decoder(tmp_path_factory.mktemp("decoder"))
    write_table(folder / "train.tsv", [0, 1, 0, 1] * 4)
    write_table(folder / "dev.tsv", [0, 1, 0, 1])
    options = (
        *text_run(folder, "sst2", folder, "gpt2"), "epochs=5", "batch_size=4", "precision=float64", "optim.lr=0.01",
        "freeze.interval=0.2",
    )  # fmt: skip
    return options, folder, pool.run(2, run_on, options, folder / "run", PREFIXES)[0]


@pytest.mark.thinned("sharded")
@pytest.mark.parametrize(("step", "world"), [(7, "sharded"), (14, "elastic of four")])
def test_a_decoder_goes_on_in_any_world(
    pool: Pool, tmp_path: Path, decoder: tuple[tuple[str, ...], Path, Ran], step: int, world: str
) -> None:
    options, folder, whole = decoder
    num_ranks, arrangement = WORLDS[world]
    run = stopped_at(folder / "run", step, tmp_path)
    ranks = pool.run(num_ranks, run_on, (*options, *arrangement), run, PREFIXES, None, None)
    assert [rank.differences for rank in ranks] == num_ranks * [[]]
    assert ranks[0].losses == pytest.approx(whole.losses[step:], rel=0, abs=1e-10)
    check_end(ranks[0], whole)


OF_TWO = ("sharded", "tp 2", "pipeline", "cp 2", "data")


@pytest.mark.parametrize(
    "worlds",
    [OF_TWO, pytest.param((*OF_TWO, "dp_shard 2 x tp 2", "elastic of four"), marks=pytest.mark.thorough)],
    ids=["of two", "of four at last"],
)
def test_a_resumed_run_is_resumed_again(
    pool: Pool, tmp_path: Path, whole: tuple[Path, Ran], worlds: tuple[str, ...]
) -> None:
    folder = stopped_at(whole[0], 3, tmp_path)
    losses = whole[1].losses[:3]
    for world in worlds:
        num_ranks, options = WORLDS[world]
        ranks = pool.run(num_ranks, run_on, (*RUN, *options), folder, PREFIXES, 2)
        assert [rank.differences for rank in ranks] == num_ranks * [[]]
        losses += ranks[0].losses
    assert losses == pytest.approx(whole[1].losses[: 3 + 2 * len(worlds)], rel=0, abs=1e-10)


def go_on(pool: Pool, folder: Path, *options: str, world: int = 1) -> Job:
    """Goes on with a run by the command line's path through the code."""
    errors = pool.run(world, play, (*RUN, "freeze=none", "resume=auto", *options), folder, True)
    return Job(folder, errors[0])


@pytest.fixture(scope="module")
def stopped(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after its second epoch, at step 8; its log goes two steps further."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    saved = "checkpoint.every_steps=4", "checkpoint.keep=9"  # epochs that end meanwhile are left out
    job = run_job(pool, 1, folder, *RUN, "freeze=none", "epochs=5", *saved, made_up_times=True)
    assert job.error == ""
    for step in (12, 16, 20):
        shutil.rmtree(folder / FOLDER / f"step-{step:08d}")
    lines = (folder / EVENT_LOG).read_text().splitlines(keepends=True)
    end = next(index for index, line in enumerate(lines) if '"step": 11,' in line)
    (folder / EVENT_LOG).write_text("".join(lines[:end]))
    return folder


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    return shutil.copytree(stopped, tmp_path / "run")


def test_the_log_of_a_resumed_run_has_every_step_once(pool: Pool, run_dir: Path) -> None:
    job = go_on(pool, run_dir, world=2)
    assert job.error == ""
    assert [event["step"] for event in job.events("step")] == list(range(1, STEPS + 1))
    (resumed,) = job.events("resume")
    assert (resumed["step"], resumed["num_steps_lost"]) == (8, 2)
    assert job.summary["optimizer_steps"] == STEPS
    assert [job.summary["checkpoints"][name] for name in ("num_resumes", "num_steps_lost")] == [1, 2]
    assert not job.messages


def test_the_summary_of_a_resumed_run_counts_what_the_processes_before_it_spent(pool: Pool, tmp_path: Path) -> None:
    options = (*RUN, "freeze=schedule", "freeze.num_frozen=[1]", "epochs=4", "checkpoint.every_steps=4")
    whole = run_job(pool, 1, tmp_path / "run", *options, "checkpoint.keep=9", made_up_times=True)
    filled_s = [fill["seconds"] for fill in whole.events("cache_fill")]
    assert sum(filled_s) == pytest.approx(whole.summary["cache"]["fill_seconds"]), "as the log tells"
    spent = read_manifest(whole.folder / FOLDER / "step-00000008").spent
    assert spent["cache"]["reads"]["read_s"] > 0
    for step in (12, 16):
        shutil.rmtree(whole.folder / FOLDER / f"step-{step:08d}")
    job = Job(whole.folder, pool.run(1, play, (*options, "checkpoint.keep=9", "resume=auto"), whole.folder, True)[0])
    assert (job.error, len(job.events("resume"))) == ("", 1)
    cache, own_fill_s = job.summary["cache"], spent["cache"]["stored"]["fill_seconds"]
    assert cache["fill_seconds"] > own_fill_s > 0, "it is filled again"
    assert cache["read_seconds"] > spent["cache"]["reads"]["read_s"]
    assert cache["hit_rate"] == 1
    assert job.summary["checkpoints"]["num_saved"] == whole.summary["checkpoints"]["num_saved"] == 4
    assert job.summary["input"]["wait_seconds"] > spent["input"]["wait_seconds"] > 0
    assert job.summary["cpu_seconds"] > 2 * spent["cpu_seconds"], "the process of the pool has been the same"


def test_a_checkpoint_of_an_earlier_release_says_nothing_of_what_was_spent(pool: Pool, run_dir: Path) -> None:
    file = run_dir / FOLDER / "step-00000008" / MANIFEST
    file.write_bytes(replace(read_manifest(file.parent), spent={}).to_json())
    job = go_on(pool, run_dir)
    assert (job.error, job.summary["optimizer_steps"]) == ("", STEPS)


def test_a_checkpoint_keeps_the_log_of_all_steps_before_it(pool: Pool, tmp_path: Path) -> None:
    often = "checkpoint.every_steps=3", "checkpoint.keep=9"
    pool.run(1, play_with_steps_held_back, (*RUN, "freeze=none", "epochs=2", *often), tmp_path)
    log = (tmp_path / EVENT_LOG).read_bytes()
    for step in (3, 6):
        manifest = read_manifest(tmp_path / FOLDER / f"step-{step:08d}")
        events = map(json.loads, log[: manifest.log_bytes].splitlines())
        assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, step + 1))


def test_steps_that_an_attempt_repeats_in_vain_are_lost_twice(tmp_path: Path) -> None:
    log = tmp_path / EVENT_LOG
    kept = '{"event": "step", "step": 8}\n'
    resumed = '{"event": "resume", "num_steps_lost": 2, "num_resumes": 3}'
    log.write_text(kept + "\n".join(['{"event": "step"}', resumed, '{"event": "step"}', '{"event": "eva']))
    assert cut_log(log, len(kept)) == (4, 3)
    assert log.read_text() == kept


def test_a_log_that_a_loss_of_power_has_cut_ends_with_a_whole_line(tmp_path: Path) -> None:
    log = tmp_path / EVENT_LOG
    kept, torn, own = '{"event": "step", "step": 7}\n', '{"event": "step", "st', '{"event": "phase"}\n'
    log.write_text(kept + torn + own)
    assert cut_log(log, 1000, len(kept + torn)) == (0, 0), "no step is repeated"
    assert log.read_text() == kept + own
    assert cut_log(log, 1000) == (0, 0)
    assert log.read_text() == kept + own


def test_a_run_that_is_rolled_back_to_before_a_restart_keeps_what_the_log_tells_of_it(tmp_path: Path) -> None:
    log, attempt = tmp_path / EVENT_LOG, {"event": "resume", "step": 12, "num_steps": 99, "num_steps_lost": 0}
    kept, step = '{"event": "step", "step": 8}\n', '{"event": "step", "step": 13}\n'
    log.write_text(kept + json.dumps(attempt) + "\n" + step)
    cut_log(log, len(kept), back_to=8)
    assert log.read_text() == kept + json.dumps(attempt | {"step": 8}) + "\n"


@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "full")], ids=["in time", "a full disk"])
def test_the_log_is_on_disk_before_a_checkpoint_counts_its_bytes(error: OSError | None, tmp_path: Path) -> None:
    (tmp_path / EVENT_LOG).write_text("12345")
    with mock.patch("os.fsync", side_effect=error) as fsync:
        assert _flushed_size(tmp_path / EVENT_LOG) == 5
    fsync.assert_called_once()


@pytest.mark.parametrize("is_script", [False, True], ids=["the command", "a script"])
def test_each_time_that_a_run_goes_on_from_the_same_checkpoint_counts(
    pool: Pool, run_dir: Path, is_script: bool
) -> None:
    own = (*RUN, "freeze=none", "resume=auto", "checkpoint.every_steps=4", "checkpoint.keep=9")
    for num_resumes, num_lost in ((1, 2), (2, 14), (3, 26)):
        if is_script:
            (found,) = pool.run(1, resume_own, own, run_dir)
        else:
            found = go_on(pool, run_dir, "checkpoint.keep=9").summary["checkpoints"]
        assert found | {"num_resumes": num_resumes, "num_steps_lost": num_lost} == found
        for path in CheckpointFolder(run_dir / FOLDER).published():
            if int(path.name.rpartition("-")[2]) > 8:
                shutil.rmtree(path)
    (resumed,) = Job(run_dir, error="").events("resume")
    assert (resumed["num_resumes"], resumed["num_steps"], resumed["plan"]["num_devices"]) == (3, STEPS, 1)


def test_settings_that_change_the_result_are_refused_and_others_are_taken(pool: Pool, run_dir: Path) -> None:
    untouched = (run_dir / EVENT_LOG).read_text()
    job = go_on(pool, run_dir, "optim.lr=0.02", "seed=5", "cache=off", "parallel=data", "log_every_steps=3")
    assert "(optim.lr: 0.01 -> 0.02; seed: 1 -> 5)" in job.error
    assert "give the old ones: the seed, the data and the batch_size are those of the order of its samples" in job.error
    before = (run_dir / EVENT_LOG).read_text()
    assert '"step": 10,' in before, "nothing is cut from a run that is not resumed"
    assert before == untouched, "and nothing is added, as no tracker hears of a start"
    allowed = go_on(pool, run_dir, "optim.lr=0.02", "resume.allow=[optim.lr]", "cache=off")
    assert allowed.error == ""
    assert allowed.events("step")[8]["lr"] == pytest.approx(2 * allowed.events("step")[7]["lr"] * 12 / 13)


@pytest.mark.parametrize(
    ("before", "most"),
    [((), 0.5), (("freeze.target_fraction=0.1",), 0.4)],  # a quarter is frozen from step 4 on, or from step 12
    ids=["without one", "of another value"],
)
def test_a_target_that_can_no_longer_be_met_is_told_at_once(
    pool: Pool, tmp_path: Path, before: tuple[str, ...], most: float
) -> None:
    run = *RUN, "freeze=schedule", "freeze.num_frozen=[1,1,1,1]", "epochs=5"
    made = run_job(
        pool, 1, tmp_path / "run", *run, *before, "checkpoint.every_steps=12", "checkpoint.keep=9", made_up_times=True
    )
    assert made.error == ""
    for path in CheckpointFolder(tmp_path / "run" / FOLDER).published():
        if path.name > "step-00000012":
            shutil.rmtree(path)
    asked = "freeze.target_fraction=0.9", "resume.allow=[freeze.target_fraction]"
    job = go_on(pool, tmp_path / "run", *run, *asked)
    assert job.error == ""
    (note,) = [each["message"] for each in job.events("warning") if "will be missed" in each["message"]]
    assert note == f"freeze.target_fraction=0.9 will be missed: after 60% of the run it can be at most {most}"
    assert job.summary["mean_frozen_fraction"] == pytest.approx(most, abs=1e-9)


def test_other_evaluations_are_refused_where_they_decide_when_the_run_ends(pool: Pool, run_dir: Path) -> None:
    judged = go_on(pool, run_dir, "evaluate.every_steps=2", "evaluate.patience=3")
    assert "evaluate.every_steps: null -> 2; evaluate.patience: null -> 3" in judged.error
    assert go_on(pool, run_dir, "evaluate.every_steps=2").error == ""


def test_another_batch_size_is_taken_where_it_is_allowed(pool: Pool, run_dir: Path) -> None:
    job = go_on(pool, run_dir, "batch_size=17", "resume.allow=[batch_size]")
    assert job.error == ""
    assert job.events("step")[-1]["epoch"] == 5


@pytest.mark.parametrize(("world", "options"), [(1, ()), (2, ("parallel=megatron",))], ids=["elastic", "a mesh"])
def test_a_run_goes_on_in_another_precision_with_the_moments_that_it_had(
    pool: Pool, run_dir: Path, world: int, options: tuple[str, ...]
) -> None:
    before = Job(run_dir, error="").events("step")
    job = go_on(pool, run_dir, *options, "precision=float32", "resume.allow=[precision]", world=world)
    assert job.error == ""
    assert len(before) == 10, "two steps after the checkpoint"
    for then, now in zip(before[8:], job.events("step")[8:], strict=False):
        assert now["loss"] == pytest.approx(then["loss"], rel=1e-5)


@pytest.mark.parametrize("option", ["seed=5", "batch_size=32"])
def test_no_permission_is_offered_that_would_not_help(pool: Pool, run_dir: Path, option: str) -> None:
    name = option.partition("=")[0]
    for allow in ("[]", f"[{name}]"):
        job = go_on(pool, run_dir, option, f"resume.allow={allow}")
        assert f"({name}: " in job.error
        assert "with which no run can go on" in job.error
        assert "resume.allow" not in job.error


def test_what_is_allowed_already_stays_in_the_list_that_is_asked_for(tmp_path: Path) -> None:
    old, new = loaded(), loaded("optim.lr=0.02", "optim.weight_decay=0.5", "resume.allow=[optim.lr]")
    start, data = {"step": 0, "epoch": 0, "step_in_epoch": 0}, {"num_samples": 8}
    manifest = Manifest(0, (), start, settings_of(old), None, data, {}, {}, {}, 0, "", None, 0.0)
    with pytest.raises(UserError, match=r"give .*resume\.allow=\[optim\.lr,optim\.weight_decay\] to go on"):
        check_settings(Checkpoint(tmp_path, manifest, ()), new, data)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("lr", r"did you mean optim\.lr\?"),
        ("epoch", r"did you mean epochs\?"),
        ("zzz", r"name an option whose value differs, as optim\.lr"),
    ],
)
def test_an_option_that_may_differ_and_does_not_exist_is_refused(tmp_path: Path, name: str, hint: str) -> None:
    start, data = {"step": 0, "epoch": 0, "step_in_epoch": 0}, {"num_samples": 8}
    manifest = Manifest(0, (), start, settings_of(loaded()), None, data, {}, {}, {}, 0, "", None, 0.0)
    checkpoint = Checkpoint(tmp_path, manifest, ())
    with pytest.raises(UserError, match=rf"resume\.allow: the run has no option {name}; {hint}"):
        check_settings(checkpoint, loaded(f"resume.allow=[{name}]"), data)
    check_settings(checkpoint, loaded("resume.allow=[optim.lr,dataset,randomness.topology]"), data)


def test_a_data_set_that_is_a_list_stays_out_of_the_settings_and_is_gone_on_with(pool: Pool, tmp_path: Path) -> None:
    ((settings, first),) = pool.run(1, resume_on_a_list, tmp_path)
    assert (settings["dataset.train"], settings["dataset.evaluation"]) == ("builtins.list", {"dev": "builtins.list"})
    assert "0.123" not in repr(settings)
    assert first == 1


@pytest.mark.parametrize("mesh", ["parallel.tp=2", "parallel.cp=2", "parallel.dp_shard=2"])
def test_numbers_of_the_device_go_on_neither_on_a_mesh_nor_without_it(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks of a mesh draw by sample."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    plain, own = (settings_of(loaded("randomness=device", *each)) for each in ([], [mesh]))
    assert [change.partition(":")[0] for change in changes(plain, own)] == ["randomness.topology"]


def test_a_complete_run_goes_on_with_more_epochs(pool: Pool, tmp_path: Path) -> None:
    options = "freeze=none", "optim.schedule=constant", "optim.warmup=0"  # rates that do not depend on the length
    whole = run_job(pool, 1, tmp_path / "whole", *RUN, *options, "epochs=3")
    run_job(pool, 1, tmp_path / "run", *RUN, *options, "epochs=2")
    job = go_on(pool, tmp_path / "run", *options, "epochs=3", "resume.allow=[epochs]")
    assert job.error == ""
    assert job.losses == pytest.approx(whole.losses, rel=0, abs=1e-10)


def test_other_data_are_refused(pool: Pool, run_dir: Path) -> None:
    manifest = CheckpointFolder(run_dir / FOLDER).published()[-1] / MANIFEST
    read = read_manifest(manifest.parent)
    manifest.write_bytes(replace(read, data=read.data | {"train": "0" * 32}).to_json())
    assert "dataset: {'train': '00000000" in go_on(pool, run_dir).error


@pytest.mark.thinned("layer")
@pytest.mark.parametrize("name", [MANIFEST, layer_file(2)])
def test_a_damaged_checkpoint_is_passed_over_aloud(pool: Pool, run_dir: Path, name: str) -> None:
    damaged = run_dir / FOLDER / "step-00000008" / name
    damaged.write_bytes(damaged.read_bytes()[:-1])
    job = go_on(pool, run_dir, world=2)
    assert job.error == ""
    assert job.events("resume")[0]["step"] == 4
    assert [event["step"] for event in job.events("step")] == list(range(1, STEPS + 1))
    (message,) = job.messages
    assert message.startswith(f"a newer checkpoint is passed over: {damaged}")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_resumed(pool: Pool, run_dir: Path) -> None:
    for path in CheckpointFolder(run_dir / FOLDER).published():
        (path / layer_file(0)).unlink()
    error = go_on(pool, run_dir).error
    assert "has no whole checkpoint" in error
    assert "start the run anew in another folder" in error


@pytest.mark.thinned("full")
@pytest.mark.parametrize(
    ("fault", "expected", "left"),
    [
        (
            Fault("pipetransformer.checkpoint.writer.write_flushed", call=4, what="fill the disk"),
            "No space left",
            "make room in {folder}, where there is none yet: the run could not go on",
        ),
        (
            Fault("pipetransformer.checkpoint.folder.CheckpointFolder.publish", call=2, what="break the disk"),
            "Input/output",
            "in {folder} that of step 4 is the last one",
        ),
    ],
    ids=["full", "broken"],
)
def test_a_checkpoint_that_cannot_be_written_costs_a_warning(
    pool: Pool, tmp_path: Path, stopped: Path, fault: Fault, expected: str, left: str
) -> None:
    job = run_with(fault, pool, 2, tmp_path / "run", *RUN, "freeze=none")
    assert (job.error, job.summary["status"]) == ("", "completed")
    assert job.losses == pytest.approx(Job(stopped, "").losses + job.losses[10:], rel=0, abs=1e-10)
    assert expected in job.messages[0]
    assert job.messages[0].endswith(f"; {left.format(folder=job.folder / FOLDER)}")
    kept = [path.name for path in (job.folder / FOLDER).glob("*")]
    assert not [name for name in kept if name.startswith(".")], "nothing half written stays"
