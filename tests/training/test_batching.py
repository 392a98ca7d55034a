"""Batches of texts of about one length: one training at any topology, and after a stop."""

from pathlib import Path

import numpy as np
import pytest
from support.jobs import TINY, run_job
from support.policy_runs import run_policy
from support.pool import Pool
from support.texts import text_run, write_encoder

from pipetransformer.autodp.sampler import SampleOrder
from pipetransformer.checkpoint.folder import FOLDER, CheckpointFolder
from pipetransformer.checkpoint.manifest import read_manifest

FREEZES = ("freeze=schedule", "freeze.num_frozen=[1,2]", "freeze.interval=0.3")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A run on texts of 1 to 22 words, whose last batch is smaller; blocks freeze and are cached."""
    folder = tmp_path_factory.mktemp("texts")
    rows = [f"{' '.join(['bird'] * (1 + row * 7 % 22))}\t{row % 2}" for row in range(30)]
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    run = [one for one in text_run(write_encoder(folder / "encoder"), "sst2", folder) if one != "batch_size=2"]
    return (*run, "batch_size=4", "epochs=3", "precision=float64", "optim.lr=0.01", "batching=bucketed", *FREEZES)


@pytest.fixture(scope="module")
def losses(pool: Pool, options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return pool.run(1, run_policy, options, tmp_path_factory.mktemp("whole"))[0]


@pytest.mark.thinned("num_stages")
@pytest.mark.parametrize("arrangement", ["parallel.num_stages=2", "parallel=data"])
def test_two_devices_train_as_one_does(
    arrangement: str, pool: Pool, options: tuple[str, ...], losses: list[float], tmp_path: Path
) -> None:
    assert len(losses) == 24
    assert pool.run(2, run_policy, (*options, arrangement), tmp_path)[0] == pytest.approx(losses, rel=0, abs=1e-10)


def test_a_stopped_run_goes_on_in_the_same_order(
    pool: Pool, options: tuple[str, ...], losses: list[float], tmp_path: Path
) -> None:
    first = pool.run(1, run_policy, options, tmp_path, 11)[0]
    second = pool.run(2, run_policy, options, tmp_path)[0]
    assert [*first, *second] == pytest.approx(losses, rel=0, abs=1e-10)


def test_uniform_batches_give_another_training(
    pool: Pool, options: tuple[str, ...], losses: list[float], tmp_path: Path
) -> None:
    uniform = pool.run(1, run_policy, (*options, "batching=uniform"), tmp_path)[0]
    assert uniform != pytest.approx(losses, rel=0, abs=1e-6)


def test_steps_are_held_against_the_prediction_by_the_length_of_their_batch(
    pool: Pool, options: tuple[str, ...], tmp_path: Path
) -> None:
    """A batch is padded to its longest text, to a multiple of 8 tokens; the model takes 16 at most."""
    own = [one for one in (*options, "batching=uniform", "epochs=1") if one not in FREEZES]
    assert run_job(pool, 1, tmp_path / "run", *own, "freeze=none", "batch_size=2", made_up_times=True).error == ""
    (published,) = CheckpointFolder(tmp_path / "run" / FOLDER).published()
    (record,) = read_manifest(published).train["history"]["entries"]
    lengths, order = np.array([min(16, 1 + row * 7 % 22) for row in range(30)]), SampleOrder(30, 1, 2)

    def padded(ids: np.ndarray) -> int:
        return -(-int(lengths[ids].max()) // 8) * 8

    sizes = [padded(ids) / padded(order.typical(lengths)) for ids in order.batches(0, 15)]
    assert len({*sizes}) > 1
    assert record["step_sizes"] == sizes


def test_it_has_no_effect_on_pictures_and_says_so(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, "batching=bucketed")
    assert "batching=bucketed has no effect: pictures have no lengths" in job.messages


def test_an_unknown_one_is_refused(pool: Pool, tmp_path: Path) -> None:
    assert "batching=sorted is unknown" in run_job(pool, 1, tmp_path / "run", *TINY, "batching=sorted").error
