"""The peak learning rate of a run that is given none follows from its model."""

import json
from pathlib import Path

import pytest
from support.jobs import run_job
from support.pool import Pool
from support.texts import text_run, write_encoder, write_table

from pipetransformer.report.event_log import EVENT_LOG


@pytest.mark.thinned("adapters", "given")
@pytest.mark.parametrize(
    ("options", "rate", "by_model"),
    [
        (["peft=none"], 10 * 8 * 2e-5, True),
        (["peft=lora"], 100 * 8 * 2e-5, True),
        (["optim.lr=3e-4", "optim.warmup_steps=100"], 3e-4, False),
        (["optim=sgd"], 0.01, False),
    ],
    ids=["from scratch", "adapters", "given", "another optimizer's"],
)
def test_a_run_tells_the_rate_that_it_takes(
    pool: Pool, tmp_path: Path, options: list[str], rate: float, by_model: bool
) -> None:
    write_table(tmp_path / "train.tsv", [0, 1] * 4)
    write_table(tmp_path / "dev.tsv", [0, 1])
    run = text_run(write_encoder(tmp_path / "model"), "sst2", tmp_path)
    assert not run_job(pool, 1, tmp_path / "run", *run, "epochs=1", "freeze=none", *options, made_up_times=True).error
    events = list(map(json.loads, (tmp_path / "run" / EVENT_LOG).read_text().splitlines()))
    start = next(event for event in events if event["event"] == "start")
    assert start["lr"] == pytest.approx(rate, rel=1e-12)
    assert start["lr_by_model"] is by_model
    highest = max(event["lr"] for event in events if event["event"] == "step")
    assert start["lr_reached"] == pytest.approx(highest, rel=1e-12)
