"""A rank that hangs is named, with the step and what it was in."""

import errno
from pathlib import Path
from unittest import mock

import pytest
from support.faults import Fault
from support.hanging import play_until_timed_out
from support.jobs import TINY
from support.pool import Pool
from torch.distributed import DistStoreError, HashStore

from pipetransformer.errors import StoreFailed
from pipetransformer.training import position

RUN = (
    *TINY, "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.25", "epochs=4", "parallel.timeout_s=3",
)  # fmt: skip
DATA = ("parallel.arrangement=data",)
GPIPE = ("parallel.arrangement=pipeline", "parallel.schedule=gpipe", "parallel.num_microbatches=2")
CACHE = "pipetransformer.autocache.cache.AutoCache"
STAGE = "pipetransformer.runtime.pipeline_stage.EarlyReceivingStage"
PLACES = {  # in a pass between two others, of which the other rank has asked for all messages
    "a training step at step 2": (Fault(f"{STAGE}.forward_one_chunk", call=6, what="hang"), GPIPE),
    "the filling of the cache at step 4": (Fault(f"{CACHE}._compute_and_store", what="hang"), DATA),
    "saving at step 4": (Fault("pipetransformer.training.checkpoints.Checkpoints._save", what="hang"), DATA),
}


@pytest.mark.thinned("a training step")
@pytest.mark.parametrize(("place", "hanging"), [(place, number % 2) for number, place in enumerate(PLACES)])
def test_a_rank_that_hangs_is_named_with_its_place(place: str, hanging: int, pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    fault, arrangement = PLACES[place]
    answers = pool.run(2, play_until_timed_out, fault, hanging, (*RUN, *arrangement), tmp_path / "run")
    told = answers[1 - hanging]
    assert told.startswith(f"rank {hanging} did not answer within 3 s: rank {hanging} is in {place} (process")
    assert f"rank {1 - hanging} waited in" in told
    assert told.endswith("raise parallel.timeout_s where that may take so long")
    assert answers[hanging].startswith("RuntimeError: "), "it finds that the others have gone"


def test_a_rank_that_waits_between_two_steps_is_past_the_start() -> None:
    with mock.patch.multiple(position, _phase=position.START, _step=0):
        with position.inside("reading data and measuring", 0):
            pass
        assert (position._phase, position._step) == (position.START, 0)
        with position.inside(position.STEP, 7), position.inside("saving", 7):
            pass
        assert (position._phase, position._step) == ("what follows a training step", 7)
        with position.inside("a transition", 8):
            pass
        assert (position._phase, position._step) == ("what follows a training step", 7)


@pytest.mark.parametrize(
    ("error", "waited"),
    [
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"), True),
        (DistStoreError("Socket timed out"), True),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), False),
        (RuntimeError("DataLoader timed out after 5 seconds"), False),
        (StoreFailed(errno.ETIMEDOUT, "/disk fails: Connection timed out; set `disk_gib`=0"), False),
        (TimeoutError(errno.ETIMEDOUT, "Connection timed out"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_error_of_one_rank_is_told_as_it_is(error: Exception, waited: bool) -> None:
    with mock.patch("torch.distributed.get_rank", return_value=0):
        assert position._gives_up(HashStore(), error) == waited
