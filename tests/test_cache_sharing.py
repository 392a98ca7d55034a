"""Runs that meet at one store fill it once and read it together; every one has the losses of a run without a cache."""

import fcntl
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.faults import Fault, run_with
from support.jobs import TINY, Job, run_job
from support.pool import Pool

CACHE = "pipetransformer.autocache"
READ = f"{CACHE}.reader.FeatureReader.read"
RUN = (*TINY, "precision=float64", "optim.lr=0.01", "freeze=prefix")
ONE_BLOCK = (*RUN, "freeze.num_blocks=1")
ALL = 64 + 40  # samples of both splits


@pytest.fixture(scope="module")
def second_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    pool = Pool(tmp_path_factory.mktemp("pool"))
    yield pool
    pool.close()


@contextmanager
def first_run(second_pool: Pool, folder: Path, *options: str, place: str = READ, call: int = 2) -> Iterator[None]:
    """A run that stands still at a place, as long as the context lasts; then it has to come to a good end."""
    door = folder / "door"
    for path in (door, Path(f"{door}.go")):
        os.mkfifo(path)
    fault = Fault(place, call, "meet", path=str(door))
    with ThreadPoolExecutor() as thread:
        future = thread.submit(run_with, fault, second_pool, 1, folder / "first", *options)
        door.read_text()  # it is there
        try:
            yield
        finally:
            Path(f"{door}.go").write_text("go")
        check(future.result(), 0)


def check(job: Job, num_found: int, *messages: str) -> None:
    assert (job.error, job.summary["status"]) == ("", "completed")
    (fill,) = job.events("cache_fill")
    assert (fill["num_samples"], fill["num_found"]) == (ALL - num_found, num_found)
    assert len(job.messages) == len(messages)
    assert all(words in message for words, message in zip(messages, job.messages, strict=True)), job.messages


def check_losses(job: Job, pool: Pool, *options: str) -> None:
    alone = run_job(
        pool, 1, job.folder.with_name(f"{job.folder.name} alone"), *options, "cache=off", made_up_times=True
    )
    assert job.losses == pytest.approx(alone.losses, rel=0, abs=1e-10)
    assert job.summary["metric"] == alone.summary["metric"]


def phases(job: Job) -> list[str]:
    return [phase["message"] for phase in job.events("phase")]


@pytest.mark.thinned("[2]")
@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_read_together_what_one_of_them_has_stored(
    world_size: int, pool: Pool, second_pool: Pool, tmp_path: Path
) -> None:
    path = f"cache.path={tmp_path / 'features'}"
    with first_run(second_pool, tmp_path, *ONE_BLOCK, path):
        options = (*ONE_BLOCK, "optim.lr=0.03")
        jobs = [run_job(pool, world_size, tmp_path / str(n), *options, path, made_up_times=True) for n in range(2)]
    for job in jobs:
        check(job, ALL)
        (shares,) = [message for message in phases(job) if message.startswith("shares")]
        assert f"with {tmp_path / 'first'} (process " in shares
    check_losses(jobs[0], pool, *options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*ONE_BLOCK, "seed=2"), "for this run only"),
        ((*RUN, "freeze.num_blocks=2"), "for this run only"),
    ],
    ids=["other weights", "another level"],
)
def test_a_store_that_another_run_reads_is_not_overwritten(
    options: tuple[str, ...], words: str, pool: Pool, second_pool: Pool, tmp_path: Path
) -> None:
    path = f"cache.path={tmp_path / 'features'}"
    with first_run(second_pool, tmp_path, *ONE_BLOCK, path):
        job = run_job(pool, 2, tmp_path / "job", *options, path, made_up_times=True)
    check(job, 0, words)
    assert f"is in use by {tmp_path / 'first'} (process " in job.messages[0]
    check_losses(job, pool, *options)


def test_before_a_fill_the_run_says_what_it_takes_and_where_it_goes(pool: Pool, tmp_path: Path) -> None:
    options = (*ONE_BLOCK, f"cache.path={tmp_path / 'features'}")
    job = run_job(pool, 1, tmp_path / "first", *options, made_up_times=True)
    (plan,), (fill,) = job.events("cache_plan"), job.events("cache_fill")
    assert plan["folder"] == str(tmp_path / "features")
    assert plan["bytes_by_tier"] == fill["bytes_by_tier"]
    on_disk = sum(file.stat().st_size for file in (tmp_path / "features").rglob("*.features"))
    assert plan["bytes_by_tier"]["disk"] == on_disk
    assert (plan["num_samples"], plan["num_found"], plan["outlives_run"]) == (ALL, 0, True)
    assert plan["seconds"] == 2 * ALL, "a made-up second for the embedding and for the block"
    assert plan["passes"] == pytest.approx(1, abs=1e-3), "what one pass saves, but for the reading"
    found = run_job(pool, 1, tmp_path / "second", *options, made_up_times=True)
    assert not found.events("cache_plan"), "there is nothing to fill"


REQUIRED = (*ONE_BLOCK, "cache.require=true")


def test_a_run_that_requires_its_store_fills_it_and_reads_it(pool: Pool, tmp_path: Path) -> None:
    options = (*REQUIRED, "epochs=1", f"cache.path={tmp_path / 'features'}")
    check(run_job(pool, 2, tmp_path / "first", *options, made_up_times=True), 0)
    second = run_job(pool, 2, tmp_path / "second", *options, made_up_times=True)
    check(second, ALL)
    assert second.summary["cache"]["hit_rate"] == 1
    assert [event["after"]["cache_level"] for event in second.events("transition")] == [1]


def test_what_it_takes_to_fill_is_not_counted_for_one_run_where_others_read(pool: Pool, tmp_path: Path) -> None:
    """A single pass does not get the time of a fill back, but the store is for the runs that follow."""
    once = (*ONE_BLOCK, "epochs=1")
    alone = run_job(pool, 1, tmp_path / "alone", *once, made_up_times=True)
    assert not alone.events("cache_fill")
    check(run_job(pool, 1, tmp_path / "first", *once, f"cache.path={tmp_path / 'features'}", made_up_times=True), 0)
    required = run_job(pool, 1, tmp_path / "required", *once, "cache.require=true", made_up_times=True)
    check(required, 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["cache.memory_gib=0.00003", "cache.disk_gib=0"], "do not fit all features, which take"),
        (["cache.memory_gib=1e-9", "cache.disk_gib=0"], "fit no sample"),
    ],
    ids=["some", "none"],
)
def test_a_cache_that_is_required_has_room_for_all(options: list[str], words: str, pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 2, tmp_path / "run", *REQUIRED, *options, made_up_times=True)
    assert job.error.startswith("cache.require=true trains only with the cache, and ")
    assert words in job.error
    assert not job.losses


def test_a_store_that_is_required_is_that_of_the_folder(pool: Pool, second_pool: Pool, tmp_path: Path) -> None:
    path = f"cache.path={tmp_path / 'features'}"
    with first_run(second_pool, tmp_path, *ONE_BLOCK, path):
        job = run_job(pool, 2, tmp_path / "job", *REQUIRED, "seed=2", path, made_up_times=True)
    assert job.error.startswith(
        "cache.require=true trains only with the cache, and the cache is kept for this run only"
    )
    assert not job.losses
    with open(next(tmp_path.glob("features/*/node0/train/lock"))) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = run_job(pool, 1, tmp_path / "locked", *REQUIRED, path, made_up_times=True)
    assert "in use by" in job.error


def test_a_disk_that_fails_ends_a_run_that_requires_the_cache(pool: Pool, tmp_path: Path) -> None:
    fault = Fault("os.pwritev", 1, "break the disk", since=f"{CACHE}.cache.AutoCache.advance")
    job = run_with(fault, pool, 2, tmp_path / "run", *REQUIRED, "cache.memory_gib=0")
    assert "the cache is off from here on" in job.error
    assert job.error.endswith("cache.require=false trains without")
    assert not job.losses


def test_alone_with_a_store_that_is_read_no_more_a_run_takes_it_over(pool: Pool, tmp_path: Path) -> None:
    path = f"cache.path={tmp_path / 'features'}"
    check(run_job(pool, 2, tmp_path / "first", *ONE_BLOCK, path, made_up_times=True), 0)
    check(run_job(pool, 2, tmp_path / "again", *ONE_BLOCK, path, made_up_times=True), ALL)
    other = run_job(pool, 2, tmp_path / "other", *ONE_BLOCK, path, "seed=2", made_up_times=True)
    check(other, 0, "these take their place")


def test_damage_that_a_reader_finds_is_left_to_others_and_mended_by_nobody(
    pool: Pool, second_pool: Pool, tmp_path: Path
) -> None:
    features = tmp_path / "features"
    with first_run(second_pool, tmp_path, *ONE_BLOCK, f"cache.path={features}"):
        (file,) = features.glob("*/node0/train/train.features")
        content = bytearray(file.read_bytes())
        content[100] ^= 4
        with open(file, "r+b") as stored:
            stored.seek(100)
            stored.write(content[100:101])
        job = run_job(pool, 2, tmp_path / "job", *ONE_BLOCK, f"cache.path={features}", made_up_times=True)
        assert file.read_bytes() == bytes(content)
        with open(file, "r+b") as stored:
            stored.seek(100)
            stored.write(bytes([content[100] ^ 4]))
    check(job, 0, "32 stored samples were damaged", "for this run only")
    check_losses(job, pool, *ONE_BLOCK)


def test_what_memory_alone_has_room_for_is_computed_by_each_run(pool: Pool, second_pool: Pool, tmp_path: Path) -> None:
    options = (*ONE_BLOCK, f"cache.path={tmp_path / 'features'}", f"cache.disk_gib={30_000 / 2**30}")
    with first_run(second_pool, tmp_path, *options):
        job = run_job(pool, 2, tmp_path / "job", *options, made_up_times=True)
    (fill,) = job.events("cache_fill")
    assert 0 < fill["num_found"] < ALL
    assert fill["num_samples"] + fill["num_found"] == ALL
    assert not job.messages
    check_losses(job, pool, *ONE_BLOCK)
