"""Of equal jobs one measures, and the others read the same numbers."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from support.cases import Case
from support.jobs import TINY, run_job
from support.overheads import MEASUREMENT, kept, kept_behind_a_lock, keys_around_traits
from support.pool import Pool
from torch import Tensor

from pipetransformer.data.tasks import squared_error, text_classification
from pipetransformer.profiling.kept import _inputs_in_brief, _name, _write, from_plain, to_plain
from pipetransformer.report.environment import version_of


def test_a_measurement_survives_its_way_through_a_file() -> None:
    assert from_plain(json.loads(json.dumps(to_plain(MEASUREMENT)))) == MEASUREMENT


def test_the_second_of_two_equal_jobs_does_not_measure(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, kept, tmp_path / "profiles", "a") == [(MEASUREMENT, False, 1)] * 2
    assert pool.run(2, kept, tmp_path / "profiles", "a") == [(MEASUREMENT, True, 0)] * 2
    assert pool.run(2, kept, tmp_path / "profiles", "b") == [(MEASUREMENT, False, 1)] * 2, "another model measures"
    assert pool.run(2, kept, None, "a") == [(MEASUREMENT, False, 1)] * 2


def test_a_job_waits_for_another_that_is_measuring(pool: Pool, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    os.mkfifo(asked)

    def end(_: object) -> None:
        with suppress(OSError):  # nobody reads any more
            os.close(os.open(asked, os.O_WRONLY | os.O_NONBLOCK))

    with ThreadPoolExecutor(1) as beside, FileLock(tmp_path / "a.lock"):
        job = beside.submit(pool.run, 1, kept_behind_a_lock, tmp_path, "a", asked)
        job.add_done_callback(end)
        assert asked.read_text() == "asked"
        _write(tmp_path / "a.json", MEASUREMENT)
    assert job.result() == [(MEASUREMENT, True, 0)]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"profile": {"layers": [{}]}}'])
def test_what_cannot_be_read_is_measured_again(pool: Pool, tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    assert pool.run(1, kept, tmp_path, "a") == [(MEASUREMENT, False, 1)]
    assert pool.run(1, kept, tmp_path, "a") == [(MEASUREMENT, True, 0)]


def test_a_package_that_runs_from_its_folder_needs_no_metadata() -> None:
    assert version_of("torch") in (torch.__version__.partition("+")[0], torch.__version__)
    assert version_of("a-package-that-is-not-installed") is None


def test_a_folder_that_cannot_be_written_is_named(pool: Pool, tmp_path: Path) -> None:
    job = run_job(pool, 1, tmp_path / "run", *TINY, "profile.path=/proc/profiles")
    assert job.error.startswith("profile.path=/proc/profiles cannot be written (")


def test_jobs_that_differ_in_rate_and_seed_alone_share_a_profile(pool: Pool, tmp_path: Path) -> None:
    options = (*TINY, f"profile.path={tmp_path / 'profiles'}", "epochs=1", "freeze=none")
    first = run_job(pool, 1, tmp_path / "first", *options, "seed=1")
    (file,) = (tmp_path / "profiles").glob("*.json")
    written = file.read_bytes()
    second = run_job(pool, 1, tmp_path / "second", *options, "seed=2", "optim.lr=0.01")
    told = [
        [phase["message"] for phase in job.events("phase") if str(file) in phase["message"]] for job in (first, second)
    ]
    assert told == [[], [f"planning by what an equal job has measured: {file}"]]
    assert [path.read_bytes() for path in (tmp_path / "profiles").glob("*.json")] == [written]
    run_job(pool, 1, tmp_path / "third", *options, "batch_size=8")
    assert len(list((tmp_path / "profiles").glob("*.json"))) == 2
    transforms = "dataset.transforms=[RandomVerticalFlip]", "dataset.transforms=[RandAugment]"
    for number, other in enumerate(("model.options.drop_path_rate=0.1", "model.options.num_heads=4", *transforms)):
        run_job(pool, 1, tmp_path / str(number), *options, other)
        assert len(list((tmp_path / "profiles").glob("*.json"))) == 3 + number, "shapes do not tell it"


def test_what_an_optimizer_finds_out_about_itself_is_not_in_the_key(pool: Pool, bert_config: Path) -> None:
    ((before, after, other),) = pool.run(1, keys_around_traits, Case("bert", bert_config, optimizer="lamb"))
    assert before == after != other


class OwnLoss:
    """A loss that goes by a setting of its object."""

    def __init__(self, reduction: str) -> None:
        self.reduction = reduction

    def __call__(self, outputs: Tensor, _: Tensor) -> Tensor:
        return outputs.mean(1) if self.reduction == "mean" else outputs.sum(1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self(outputs, targets)


def test_a_loss_has_one_name_in_equal_jobs_and_another_where_it_differs() -> None:
    plain, smoothed, weighted = (
        text_classification(2).loss,
        text_classification(2, label_smoothing=0.1).loss,
        text_classification(2, class_weights=(1.0, 2.0)).loss,
    )
    assert len({repr(_name(loss)) for loss in (plain, smoothed, weighted, squared_error)}) == 4
    assert _name(text_classification(2, label_smoothing=0.1).loss) == _name(smoothed)
    assert " at 0x" not in repr(_name(smoothed))
    mean, total = OwnLoss("mean"), OwnLoss("sum")
    assert _name(mean.loss) == _name(OwnLoss("mean").loss) != _name(total.loss), "a method of one's own data set"
    assert _name(mean) == _name(OwnLoss("mean")) != _name(total)


def test_batches_of_other_numbers_of_tokens_have_another_key() -> None:
    """Replicas average the rows of an embedding that they touch."""
    few, many, pictures = torch.tensor([[1, 1, 2]]), torch.tensor([[1, 2, 3]]), torch.rand(1, 3)
    assert len({_inputs_in_brief(inputs) for inputs in (few, many, pictures, None)}) == 4
    assert _inputs_in_brief(few) == _inputs_in_brief(few + 1)
