"""The experiment shows of a real run what each policy froze and what measuring took."""

from pathlib import Path

from support.jobs import TINY, run_job
from support.pool import Pool

from experiments.arms import Outcome, table
from experiments.measured import Took
from experiments.policies.__main__ import COLUMNS
from pipetransformer.report.event_log import write_json
from pipetransformer.report.run_folder import read_run


def test_a_row_shows_what_froze_when_and_what_measuring_took(pool: Pool, tmp_path: Path) -> None:
    options = ("freeze=threshold", "freeze.tau=1", "freeze.warmup=0", "freeze.interval=0.25", "checkpoint=off")
    job = run_job(pool, 1, tmp_path / "threshold", *TINY, *options)
    assert not job.error
    write_json(job.folder / "config.yaml", {"seed": 1})  # the command writes it
    found = Outcome("threshold", 1, options, read_run(job.folder), Took(5.0, 4.0))
    assert found.prefixes == [(4, 2)]  # the first decision has no weights to compare with
    assert found.as_dict()["mean_frozen_fraction"] == 0.5
    assert set(found.as_dict()["signals"]) == {"weight_change"}
    assert 0 < found.signal_share < 1
    row = table([found], COLUMNS).splitlines()[-1]
    assert row.startswith("| threshold | 2 from 4 | 50% |")
    assert "| 4 s |" in row
