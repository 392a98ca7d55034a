"""Runs whose weights lie in host memory: more than the device takes, freezing, and after a kill."""

from pathlib import Path

import pytest
from safetensors.torch import load_file
from support.cases import tensors_equal
from support.faults import Fault, play_with_fault, run_with
from support.jobs import TINY, Job, loaded, play, run_job
from support.pool import Pool, mortal_pool

from pipetransformer.config.no_effect import warnings
from pipetransformer.errors import UserError

RUN = (
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 4, num_heads: 2, proj_drop_rate: 0.1}",
    "freeze=schedule", "freeze.num_frozen=[1,4]", "freeze.interval=0.3", "parallel.world_size=1", "epochs=3",
    "checkpoint.every_steps=2", "checkpoint.keep=1",
)  # fmt: skip
BUDGET = 28_000  # weights and gradient of a block are 26,240 bytes; all of the head, with moments, is less
CHUNKS = (*RUN, "parallel=chunks", f"parallel.device_chunk_gib={BUDGET / 2**30}")


@pytest.fixture(scope="module")
def plain(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(pool, 1, tmp_path_factory.mktemp("plain") / "run", *RUN, made_up_times=True)


def check_same(job: Job, expected: Job) -> None:
    assert job.error == ""
    assert job.losses == expected.losses, "bit for bit"
    assert job.summary["metrics"] == expected.summary["metrics"]
    saved, wanted = (load_file(run.folder / "model" / "model.safetensors") for run in (job, expected))
    tensors_equal(saved, wanted, tolerance=0)


def test_chunks_train_as_the_device_does_and_end_where_all_of_it_fits(pool: Pool, tmp_path: Path, plain: Job) -> None:
    job = run_job(pool, 1, tmp_path / "run", *CHUNKS, made_up_times=True)
    check_same(job, plain)
    plans = [(plan["num_frozen"], plan["chunk_bytes"] > 0) for plan in job.summary["plans"]]
    assert plans == [(0, True), (1, True), (4, False)], "of the frozen blocks nothing is left on the device"


def test_a_budget_that_all_of_a_device_fits_is_said_to_have_no_effect(pool: Pool, tmp_path: Path, plain: Job) -> None:
    job = run_job(pool, 1, tmp_path / "run", *RUN, "parallel=chunks", made_up_times=True)
    check_same(job, plain)
    (note,) = job.messages
    assert note.startswith("parallel.device_chunk_gib=1 has no effect: weights, gradients and optimizer state of a dev")
    least_gib = float(note.partition("take ")[2].partition(" GiB")[0])
    less = f"parallel.device_chunk_gib={least_gib - 1e-5:g}"
    job = run_job(pool, 1, tmp_path / "less", *RUN, "parallel=chunks", less, made_up_times=True)
    assert job.summary["plans"][0]["chunk_bytes"] > 0
    assert not job.messages


def test_adapters_train_with_chunks(pool: Pool, tmp_path: Path) -> None:
    """The embedding is no frozen layer, and has nothing that trains."""
    chunks = (*CHUNKS, f"parallel.device_chunk_gib={30_000 / 2**30}")  # a block and its adapter are 29,504 bytes
    jobs = [
        run_job(pool, 1, tmp_path / name, *options, "peft=lora", made_up_times=True)
        for name, options in {"chunks": chunks, "plain": RUN}.items()
    ]
    assert [job.error for job in jobs] == ["", ""]
    assert jobs[0].losses == jobs[1].losses, "bit for bit"
    assert jobs[0].summary["plans"][0]["chunk_bytes"] > 0


def test_they_lie_in_files_where_there_is_a_path(pool: Pool, tmp_path: Path, plain: Job) -> None:
    folder = tmp_path / "offload"
    job = run_job(pool, 1, tmp_path / "run", *CHUNKS, f"parallel.offload_path={folder}", made_up_times=True)
    check_same(job, plain)
    assert folder.is_dir()
    assert not list(folder.iterdir()), "nothing stays"


def test_a_disk_without_room_for_them_is_told_by_its_option(pool: Pool, tmp_path: Path) -> None:
    folder, full = tmp_path / "offload", Fault("os.posix_fallocate", 2, "fill the disk")
    job = run_with(full, pool, 1, tmp_path / "run", *CHUNKS, f"parallel.offload_path={folder}")
    assert f"the disk of parallel.offload_path={folder} has no room for 0.000 GiB of a chunk, and" in job.error
    assert "(No space left on device)" in job.error
    assert not list(folder.iterdir()), "nothing stays"


def test_a_run_with_chunks_that_is_killed_goes_on(pool: Pool, tmp_path: Path, plain: Job) -> None:
    fault = Fault("pipetransformer.runtime.elastic.ElasticRuntime.train_step", call=7)
    (tmp_path / "run").mkdir()
    with mortal_pool(tmp_path / "pool") as mortal, pytest.raises(EOFError):
        mortal.run(1, play_with_fault, fault, CHUNKS, tmp_path / "run")
    errors = pool.run(1, play, (*CHUNKS, "resume=auto"), tmp_path / "run", True)
    check_same(Job(tmp_path / "run", errors[0]), plain)


def test_a_model_that_does_not_fit_trains_with_chunks(pool: Pool, tmp_path: Path, plain: Job) -> None:
    limit = f"parallel.device_memory_gib={220_000 / 2**30}"
    refused = run_job(pool, 1, tmp_path / "refused", *RUN, limit, made_up_times=True)
    assert "parallel.device_memory_gib" in refused.error
    assert "parallel.device_chunk_gib" in refused.error
    check_same(run_job(pool, 1, tmp_path / "run", *CHUNKS, limit, made_up_times=True), plain)


def test_a_budget_below_one_layer_is_refused_with_both_numbers(pool: Pool, tmp_path: Path) -> None:
    least = 26_240
    job = run_job(
        pool, 1, tmp_path / "run", *RUN, f"parallel.device_chunk_gib={(least - 1) / 2**30}", made_up_times=True
    )
    assert f"({least - 1:,} bytes) is less than weights and gradient of the largest layer, {least:,} bytes" in job.error


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["parallel=sharded"], "parallel=sharded, which has each layer in parts"),
        (["parallel.tp=2"], r"does not go with parallel\.tp=, cp= and dp_shard="),
        (["parallel.recompute=false"], r"does not go with parallel\.recompute=false"),
        (["parallel.stages_per_rank=2"], r"does not go with parallel\.stages_per_rank= above 1"),
        (["compile=true"], "does not go with compile=true"),
        (["parallel.device_chunk_gib=0"], r"parallel\.device_chunk_gib=0.* must be above 0"),
    ],
)
def test_what_does_not_go_with_chunks_is_refused_at_once(overrides: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        loaded("parallel.device_chunk_gib=1", *overrides)


def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    words = rf"parallel\.offload_path={tmp_path / 'file'} cannot be written .*; name another folder, or drop it"
    with pytest.raises(UserError, match=words):
        loaded("parallel.device_chunk_gib=1", f"parallel.offload_path={tmp_path / 'file'}")


def test_a_path_without_chunks_has_no_effect() -> None:
    assert any("parallel.offload_path=x has no effect" in text for text in warnings(loaded("parallel.offload_path=x")))
