"""Whatever happens to a run or its store, losses are right, the user is told, and the next run is not stopped."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from support.command import TIMEOUT_S, processes, started
from support.faults import Fault, run_with
from support.jobs import ROOT, TINY, Job, run_job
from support.pool import Pool
from support.texts import text_run, write_encoder, write_table

FAULTY_TRAIN = str(ROOT / "tests" / "support" / "faulty_train.py")
RUN = (*TINY, "precision=float64", "optim.lr=0.01", "epochs=4", "freeze=schedule", "freeze.at_start=1")
TWO_LEVELS = (*RUN, "freeze.num_frozen=[2]", "freeze.interval=0.3")  # one at the start, one that is made from it
ONE_LEVEL = (*RUN, "freeze.num_frozen=[1]")
ALL = 64 + 40  # samples of both splits

CACHE = "pipetransformer.autocache"
HEADER, FILL = f"{CACHE}.tier.Tier._write_header", f"{CACHE}.cache.AutoCache.advance"
OPEN = f"{CACHE}.capacity.CacheCapacity.open_stores"
ALLOCATE, READ = "os.posix_fallocate", f"{CACHE}.reader.FeatureReader.read"


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Job]:
    """Runs without a cache, by their options."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return {
        options: run_job(pool, 2, folder / str(number), *options, "cache=off", made_up_times=True)
        for number, options in enumerate((ONE_LEVEL, TWO_LEVELS))
    }


@pytest.fixture(scope="module")
def filled(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the store of a run of one level."""
    folder = tmp_path_factory.mktemp("filled")
    run_job(pool, 2, folder / "first", *ONE_LEVEL, f"cache.path={folder / 'features'}", made_up_times=True)
    return folder / "features"


@pytest.fixture
def features(filled: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(filled, tmp_path / "features")


def check_result(job: Job, expected: Job) -> None:
    assert (job.error, job.summary["status"]) == ("", "completed")
    assert job.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
    assert len(job.losses) == 16
    assert job.summary["metric"] == expected.summary["metric"]


def files(folder: Path) -> list[str]:
    """Names of all files of a store."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@contextmanager
def short_lived_pool(tmp_path: Path) -> Iterator[Pool]:
    """A pool whose workers may be killed."""
    (tmp_path / "pool").mkdir()
    pool = Pool(tmp_path / "pool")
    yield pool
    pool.close()


MOMENTS: dict[str, tuple[Fault, range]] = {
    "the identity": (
        Fault("pathlib.Path.replace", since="pipetransformer.training.kept_stores.lock_store_dir"),
        range(1),
    ),
    "the measuring": (Fault(f"{CACHE}.tier.Tier.gather"), range(1)),
    "the making of a file": (Fault(ALLOCATE, since=OPEN), range(1)),
    "the filling": (Fault(HEADER, call=3, since=FILL), range(32, ALL)),
    "the next level": (Fault(HEADER, call=7, since=FILL), range(1, ALL)),
    "the training": (Fault(READ, call=3), range(ALL, ALL + 1)),
}


@pytest.mark.thinned("the making of a file", "the next level")
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_in_the_middle_stops_no_other(
    moment: str, pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    fault, found = MOMENTS[moment]
    options = (*TWO_LEVELS, f"cache.path={tmp_path / 'features'}")
    with short_lived_pool(tmp_path) as mortal, pytest.raises(EOFError):
        run_with(fault, mortal, 2, tmp_path / "killed", *options)
    job = run_job(pool, 2, tmp_path / "next", *options, made_up_times=True)
    check_result(job, undisturbed[TWO_LEVELS])
    first, second = job.events("cache_fill")
    assert first["num_found"] in found
    assert first["num_samples"] + first["num_found"] == second["num_samples"] == ALL
    assert not job.messages
    beside = ["about.json", "gate", "identity.json", "lock"]
    assert files(tmp_path / "features") == sorted(2 * beside + ["train.features", "test.features"])


def command(fault: Fault, *overrides: str) -> tuple[str, ...]:
    return FAULTY_TRAIN, json.dumps(asdict(fault)), *overrides, "parallel.world_size=2", "launch.max_restarts=0"


@pytest.mark.thorough  # ranks killed at the same place: test_a_run_killed_in_the_middle_stops_no_other
def test_a_command_that_is_killed_can_be_given_again(
    pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    """All of its processes, while it fills the cache."""
    options = (*ONE_LEVEL, f"cache.path={tmp_path / 'features'}")
    all_at_once = Fault(HEADER, call=3, what="kill all", since=FILL)
    with started(tmp_path, *command(all_at_once, *options, "hydra.run.dir=first")) as (process, mark):
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == -9
        assert not processes(mark)
    first = Job(tmp_path / "first", error="")
    assert not first.losses

    second = run_job(pool, 2, tmp_path / "second", *options, made_up_times=True)
    check_result(second, undisturbed[ONE_LEVEL])
    assert second.events("cache_fill")[0]["num_found"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["features", "first", "second"]


DISK_FULL = ("needs", "GiB free", "set cache.disk_gib lower or cache.path to another disk")
DISK_FAULTS: dict[str, tuple[Fault, tuple[str, ...]]] = {
    "full when it is measured": (Fault(ALLOCATE, what="fill the disk"), ("the cache is off:", *DISK_FULL)),
    "full at the second file": (Fault(ALLOCATE, 2, "fill the disk", since=OPEN), ("off from here on:", *DISK_FULL)),
    "smaller than the budget": (
        Fault(f"{CACHE}.buffer._free_disk", what="nothing is free"), ("the cache is off:", "has 0.000 GiB free"),
    ),
}  # fmt: skip


@pytest.mark.thinned("full when it is measured", "full at the second file-True")
@pytest.mark.parametrize(
    ("disk", "persistent"), [*((disk, True) for disk in DISK_FAULTS), ("full at the second file", False)]
)
def test_without_room_on_the_disk_a_run_goes_on_without_the_cache(
    disk: str, persistent: bool, pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    fault, words = DISK_FAULTS[disk]
    path = [f"cache.path={tmp_path / 'features'}"] if persistent else []
    job = run_with(fault, pool, 2, tmp_path / "run", *ONE_LEVEL, "cache.memory_gib=0", *path)
    check_result(job, undisturbed[ONE_LEVEL])
    (message,) = job.messages
    assert all(word in message for word in words), message
    assert "Errno" not in message
    assert not job.events("cache_fill")
    assert not list(tmp_path.rglob("*.features*")), "nothing of it is left"


@pytest.mark.thinned("the next one")
@pytest.mark.parametrize(("call", "num_fills"), [(1, 0), (3, 1)], ids=["the first level", "the next one"])
def test_a_disk_that_fails_while_a_level_is_stored_ends_the_cache_only(
    call: int, num_fills: int, pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    fault = Fault("os.pwritev", call, "break the disk", since=FILL, local_rank=1)
    job = run_with(fault, pool, 2, tmp_path / "run", *TWO_LEVELS, "cache.memory_gib=0")
    check_result(job, undisturbed[TWO_LEVELS])
    (message,) = job.messages
    assert message.startswith(f"the cache is off from here on: {tmp_path / 'run'}/"), "it names the folder"
    assert message.endswith("fails: Input/output error; set cache.disk_gib=0 or cache.path to another disk")
    assert len(job.events("cache_fill")) == num_fills
    after = [transition["after"]["cache_level"] for transition in job.events("transition")]
    assert after == ([1, 0] if num_fills else [0, 0])
    assert ("cache" in job.summary) == bool(num_fills), "what was read before counts"


# every run: the error, tests/autocache/test_buffer.py; its way to the launcher, tests/launch/test_elastic.py; the start
# without the cache, tests/launch/test_restarts.py
@pytest.mark.thorough
def test_a_disk_that_fails_while_features_are_read_has_the_run_go_on_without_the_cache(
    tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    fault = Fault("os.preadv", 70, "break the disk", since=FILL, local_rank=1)
    words = (*command(fault, *ONE_LEVEL, "cache.memory_gib=0", "hydra.run.dir=run")[:-1], "launch.max_restarts=1")
    with started(tmp_path, *words) as (process, _):
        out, _ = process.communicate(timeout=TIMEOUT_S)
    job = Job(tmp_path / "run", error="")
    assert "fails: Input/output error; restart 1 of 1 with 2 processes, from step" in out
    assert "and without the cache" in out
    check_result(job, undisturbed[ONE_LEVEL])
    assert len(job.events("cache_fill")) == 1, "before the disk failed"


def test_a_feature_too_large_for_its_storage_ends_the_cache_only(pool: Pool, tmp_path: Path) -> None:
    options = (*ONE_LEVEL, "++model.options.init_values=1e9")
    expected = run_job(pool, 2, tmp_path / "off", *options, "cache=off", made_up_times=True)
    job = run_job(pool, 2, tmp_path / "run", *options, "cache.storage=float16", made_up_times=True)
    check_result(job, expected)
    (message,) = job.messages
    assert "the cache is off from here on: a feature of size" in message
    assert "does not fit cache.storage=float16" in message


@pytest.mark.thinned("while processes open it", "while it is read")
@pytest.mark.parametrize(
    ("target", "words"),
    [
        (OPEN, ["the cache is off from here on", "was removed during the run"]),
        (
            f"{CACHE}.store.FeatureStore.attach",
            ["the cache is off from here on: No such file or directory", "features"],
        ),
        (READ, None),
    ],
    ids=["before it is used", "while processes open it", "while it is read"],
)
def test_a_run_whose_store_is_removed_goes_on(
    target: str, words: list[str] | None, pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    features = tmp_path / "features"
    fault = Fault(target, what="remove", path=str(features))
    job = run_with(fault, pool, 2, tmp_path / "run", *ONE_LEVEL, f"cache.path={features}")
    check_result(job, undisturbed[ONE_LEVEL])
    if words is None:
        assert not job.messages
        assert job.summary["cache"]["hit_rate"] == 1, "what is open stays"
    else:
        (message,) = job.messages
        assert all(word in message for word in words), message
    assert not features.exists()


def spoil_identity(store: Path) -> None:
    """As an older version would have written it."""
    file = store / "identity.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format_version": 0}))


def truncate(store: Path) -> None:
    file = store / "train.features"
    file.write_bytes(file.read_bytes()[:1000])


def replace_by_a_folder(store: Path) -> None:
    (store / "train.features").unlink()
    (store / "train.features").mkdir()


def move_away(store: Path) -> None:
    """As a store of another version of torch would lie there."""
    file = store / "identity.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"torch_version": "1.0"}))
    store.parents[1].rename(store.parents[1].with_name("vit_tiny-0123"))


@pytest.mark.thinned("older format", "cut off", "another version of torch")
@pytest.mark.parametrize(
    ("spoil", "is_stored", "words"),
    [
        (spoil_identity, True, ["for this run only", "format version (0, here 1)", "delete it, or take another"]),
        (lambda store: (store / "identity.json").unlink(), True, ["for this run only", "has no identity.json"]),
        (
            truncate,
            False,
            ["off from here on", "train.features has 1000 bytes and the store needs", "remove it or set"],
        ),
        (lambda store: (store / "train.features").write_text(""), False, ["off from here on", "is empty; remove it"]),
        (replace_by_a_folder, False, ["off from here on", "Is a directory", "train.features"]),
        (move_away, True, ["are not used: vit_tiny-0123/node0/train differs in torch version (1.0, here"]),
    ],
    ids=["older format", "no identity", "cut off", "empty", "a folder", "another version of torch"],
)
def test_a_store_that_does_not_fit_is_refused_by_name_and_left_alone(
    spoil: Callable[[Path], object], is_stored: bool, words: list[str], pool: Pool, features: Path, tmp_path: Path,
    undisturbed: dict[tuple[str, ...], Job],
) -> None:  # fmt: skip
    (store,) = features.glob("*/node0/train")
    spoil(store)
    before = {path: path.read_bytes() for path in features.rglob("*.features") if path.is_file()}
    job = run_job(pool, 2, tmp_path / "run", *ONE_LEVEL, f"cache.path={features}", made_up_times=True)
    check_result(job, undisturbed[ONE_LEVEL])
    message = job.messages[0]
    assert all(word in message for word in words), message
    assert [fill["num_found"] for fill in job.events("cache_fill")] in ([[0], [40]] if is_stored else [[]])
    assert {path: path.read_bytes() for path in before} == before


def test_a_store_in_use_is_left_to_its_run(
    pool: Pool, features: Path, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    (store,) = features.glob("*/node0/train")
    with open(store / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        job = run_job(pool, 2, tmp_path / "run", *ONE_LEVEL, f"cache.path={features}", made_up_times=True)
    check_result(job, undisturbed[ONE_LEVEL])
    (message,) = job.messages
    assert message.startswith(f"the cache is kept for this run only: {store} is in use by ")
    assert "wait until that ends, or take another cache.path" in message
    assert [fill["num_samples"] for fill in job.events("cache_fill")] == [ALL]


def test_two_runs_at_once_do_not_disturb_each_other(
    tmp_path: Path, undisturbed: dict[tuple[str, ...], Job], pool: Pool
) -> None:
    options = (*TWO_LEVELS, f"cache.path={tmp_path / 'features'}")
    with short_lived_pool(tmp_path) as second, ThreadPoolExecutor() as runs:
        jobs = list(
            runs.map(
                lambda one: run_job(one[1], 1, tmp_path / one[0], *options, made_up_times=True),
                (("one", pool), ("two", second)),
            )
        )
    for job in jobs:
        check_result(job, undisturbed[TWO_LEVELS])
        assert len(job.events("cache_fill")) == 2


def flip(file: Path, byte: int) -> None:
    with open(file, "r+b") as stored:
        stored.seek(byte)
        (value,) = stored.read(1)
        stored.seek(byte)
        stored.write(bytes([value ^ 4]))


@pytest.mark.parametrize(("place", "num_damaged"), [(100, 32), (-1, 1)], ids=["in a feature", "in a flag"])
def test_a_flipped_bit_is_found_and_told(
    place: int, num_damaged: int, pool: Pool, features: Path, tmp_path: Path, undisturbed: dict[tuple[str, ...], Job]
) -> None:
    (file,) = features.glob("*/node0/train/train.features")
    flip(file, place % file.stat().st_size)
    job = run_job(pool, 2, tmp_path / "run", *ONE_LEVEL, f"cache.path={features}", made_up_times=True)
    check_result(job, undisturbed[ONE_LEVEL])
    assert job.messages == [f"the cache: {num_damaged} stored samples were damaged and are computed again"]
    (fill,) = job.events("cache_fill")
    assert (fill["num_samples"], fill["num_found"]) == (32, ALL - 32), "the shard that it is in"


def test_a_store_that_has_its_space_needs_no_more(pool: Pool, features: Path, tmp_path: Path) -> None:
    fault = Fault(f"{CACHE}.buffer._free_disk", what="little is free")
    job = run_with(fault, pool, 2, tmp_path / "run", *ONE_LEVEL, f"cache.path={features}")
    assert not job.messages
    assert job.events("cache_fill")[0]["num_found"] == ALL


def test_a_sweep_over_rates_reads_what_its_first_run_has_stored(pool: Pool, features: Path, tmp_path: Path) -> None:
    options = (*ONE_LEVEL, "optim.lr=0.03", "batch_size=8")
    job = run_job(pool, 2, tmp_path / "run", *options, f"cache.path={features}", made_up_times=True)
    (fill,) = job.events("cache_fill")
    assert (fill["num_samples"], fill["num_found"]) == (0, ALL)
    alone = run_job(pool, 2, tmp_path / "alone", *options, "cache=off", made_up_times=True)
    assert job.losses == pytest.approx(alone.losses, rel=0, abs=1e-10)


def test_a_sweep_over_seeds_reads_the_features_of_published_weights_only(
    pool: Pool, features: Path, tmp_path: Path
) -> None:
    """Without them each seed has other frozen weights."""
    path = f"cache.path={features}"
    other = run_job(pool, 2, tmp_path / "other", *ONE_LEVEL, path, "seed=2", made_up_times=True)
    assert other.events("cache_fill")[0]["num_found"] == 0
    place_taken = f"the cache: {ALL} stored samples were of other weights or another level, and these take their place"
    assert other.messages == [place_taken]
    published = (*ONE_LEVEL, f"model.name={tmp_path / 'other' / 'model'}", "model.pretrained=true", path)
    jobs = [run_job(pool, 2, tmp_path / seed, *published, f"seed={seed}", made_up_times=True) for seed in ("3", "4")]
    assert [job.events("cache_fill")[0]["num_found"] for job in jobs] == [0, ALL]
    assert [job.messages for job in jobs] == [[], []]


@pytest.mark.thorough  # texts found again: test_stale_stores.py; their losses: test_option_pairs.py
def test_texts_are_read_from_an_earlier_run(pool: Pool, tmp_path: Path) -> None:
    for name in ("train", "dev"):
        write_table(tmp_path / f"{name}.tsv", [0, 1] * 8)
    texts = text_run(write_encoder(tmp_path / "encoder"), "sst2", tmp_path)
    options = (*texts, "precision=float64", "epochs=3", "freeze=schedule", "freeze.at_start=2", "freeze.num_frozen=[2]")
    path = f"cache.path={tmp_path / 'features'}"
    arms = {"off": "cache=off", "first": path, "second": path}
    jobs = {name: run_job(pool, 2, tmp_path / name, *options, arm, made_up_times=True) for name, arm in arms.items()}
    assert [jobs[name].events("cache_fill")[0]["num_found"] for name in ("first", "second")] == [0, 32]
    for name in ("first", "second"):
        assert jobs[name].losses == pytest.approx(jobs["off"].losses, rel=0, abs=1e-10)
