"""A bad batch or a freeze that hurts is answered as configured, with the same numbers on any number of ranks."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.guarding import (
    STEPS,
    LosesCheckpoints,
    evaluation_due_after_roll_back,
    train_guarded,
    train_plainly,
)
from support.pool import Pool
from support.resumes import FreezeAndUnfreeze

import pipetransformer as pt

WORLDS = {
    "one process": (1, pt.Parallel()),
    "elastic": (2, pt.Parallel()),
    "two stages": (2, pt.Parallel(num_stages=2, num_microbatches=2)),
    "sharded": (2, pt.Parallel(arrangement="sharded")),
    "idle ranks": (3, pt.Parallel(num_replicas=1, num_stages=1)),
}
NAN, HUGE = {8: math.nan}, {8: 1e6}
BAD = [5, 10, 13, 18]  # steps with that sample
FREEZE = pt.FixedSchedule(num_frozen=[2], interval=0.25, guard=0.1)  # at steps 5, 10 and 15, the ends of epochs
HURTS = {0: 0.9, 2: 0.5}


@pytest.mark.thinned("sharded")
@pytest.mark.parametrize(("world", "parallel"), WORLDS.values(), ids=WORLDS)
def test_a_batch_without_a_finite_loss_is_passed_over(
    pool: Pool, tmp_path: Path, world: int, parallel: pt.Parallel
) -> None:
    expected = train_plainly(NAN)
    for seen in pool.run(world, train_guarded, tmp_path, parallel, NAN, {"guard": pt.Guard(not_finite="skip")}):
        assert seen.losses == pytest.approx(expected, rel=0, abs=1e-10, nan_ok=True)
        assert seen.summary["guard"] == {"num_skipped": 4, "num_rollbacks": 0, "num_steps_lost": 0}
        assert [decision["step"] for decision in seen.decisions] == BAD
        assert "is not finite; its update is skipped" in seen.decisions[0]["reason"]
        assert seen.steps == list(range(1, STEPS + 1))


@pytest.mark.thinned("two stages")
@pytest.mark.parametrize("name", ["two stages", "idle ranks", "sharded"])
def test_a_batch_whose_gradient_explodes_is_passed_over(pool: Pool, tmp_path: Path, name: str) -> None:
    world, parallel = WORLDS[name]
    expected = train_plainly(HUGE)
    for seen in pool.run(world, train_guarded, tmp_path, parallel, HUGE, {"guard": pt.Guard(max_norm_ratio=50)}):
        assert seen.losses == pytest.approx(expected, rel=1e-12, abs=1e-10)
        assert [decision["step"] for decision in seen.decisions] == BAD
        assert "more than guard.max_norm_ratio=50 times the mean of the last steps" in seen.decisions[0]["reason"]


def test_without_a_guard_such_a_batch_changes_the_run(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(1, train_guarded, tmp_path, pt.Parallel(), HUGE, {})[0]
    assert not seen.decisions
    assert seen.losses[5:] != pytest.approx(train_plainly(HUGE)[5:], rel=1e-12, abs=1e-10)


@pytest.mark.thinned("sharded-0", "elastic-1")
@pytest.mark.parametrize(("name", "num_workers"), [("elastic", 0), ("sharded", 0), ("elastic", 1)])
def test_weights_are_rolled_back_to_the_last_checkpoint(
    pool: Pool, tmp_path: Path, name: str, num_workers: int
) -> None:
    """A worker has read batches ahead that come again."""
    world, parallel = WORLDS[name]
    guard, loader = pt.Guard(not_finite="roll_back", max_rollbacks=4), pt.Loading(num_workers=num_workers)
    options = {"guard": guard, "loader": loader, "checkpoint": pt.Checkpointing(every_steps=2, keep=1)}
    expected = train_plainly(NAN, rolls_back_every=2)
    for seen in pool.run(world, train_guarded, tmp_path, parallel, NAN, options):
        assert seen.losses == pytest.approx(expected, rel=0, abs=1e-10, nan_ok=True)
        reasons = [decision["reason"] for decision in seen.decisions]
        assert [reason.rpartition(" ")[2] for reason in reasons] == ["4", "8", "12", "16"]
        assert seen.summary["guard"]["num_rollbacks"] == 4


def test_an_evaluation_at_the_step_of_a_roll_back_is_made_also_where_the_run_is_stopped_there(
    pool: Pool, tmp_path: Path
) -> None:
    """Step 5 ends an epoch, and its batch is bad."""
    options = {
        "guard": pt.Guard(not_finite="roll_back", max_rollbacks=4),
        "checkpoint": pt.Checkpointing(every_steps=2, keep=9),
    }
    assert pool.run(1, evaluation_due_after_roll_back, tmp_path, NAN, options) == [True]


@pytest.mark.thinned("elastic")
@pytest.mark.parametrize("name", ["one process", "elastic"])
def test_a_decision_that_a_roll_back_undoes_is_taken_again(pool: Pool, tmp_path: Path, name: str) -> None:
    """The checkpoint of step 12 is from before the decision there, the only one, and the next batch is bad."""
    world, parallel = WORLDS[name]
    options = {
        "freeze": pt.FixedSchedule(num_frozen=[2], interval=0.6),
        "guard": pt.Guard(not_finite="roll_back", max_rollbacks=4),
        "checkpoint": pt.Checkpointing(every_steps=2, keep=1),
    }
    for seen in pool.run(world, train_guarded, tmp_path, parallel, NAN, options):
        assert seen.summary["guard"]["num_rollbacks"] == 4
        assert seen.num_frozen == 2


@pytest.mark.parametrize(
    ("guard", "factors", "why"),
    [
        (pt.Guard(), NAN, "step 5: the loss (nan)"),
        (pt.Guard(not_finite="skip", max_skips=1), NAN, ""),
        (pt.Guard(not_finite="roll_back"), NAN, "there is no checkpoint yet"),
        (pt.Guard(exploding="stop", max_norm_ratio=50), HUGE, "or take guard.exploding=skip"),
        (pt.Guard(exploding="stop", max_norm_ratio=50), {}, ""),
    ],
    ids=["stop", "never two in a row", "no checkpoint", "explodes", "nothing explodes"],
)
def test_a_run_ends_where_the_guard_can_do_no_more(
    pool: Pool, tmp_path: Path, guard: pt.Guard, factors: dict[int, float], why: str
) -> None:
    for seen in pool.run(2, train_guarded, tmp_path, pt.Parallel(), factors, {"guard": guard}):
        assert why in seen.error if why else not seen.error


def test_batches_that_are_all_bad_end_the_run(pool: Pool, tmp_path: Path) -> None:
    factors = dict.fromkeys(range(40), math.nan)
    for seen in pool.run(2, train_guarded, tmp_path, pt.Parallel(), factors, {"guard": pt.Guard(not_finite="skip")}):
        assert len(seen.losses) == 3
        assert "after 3 steps in a row whose update was skipped (guard.max_skips=3)" in seen.error
        assert "lower optim.lr=0.01" in seen.error


@pytest.mark.thinned("elastic")
@pytest.mark.parametrize("name", ["elastic", "two stages", "sharded"])
def test_a_freeze_that_hurts_is_taken_back_and_put_off(pool: Pool, tmp_path: Path, name: str) -> None:
    world, parallel = WORLDS[name]
    later = pt.FixedSchedule(num_frozen=[0, 2], interval=0.25)
    (expected, *_) = pool.run(world, train_guarded, tmp_path / "later", parallel, {}, {"freeze": later})
    options = {"freeze": FREEZE, "guard": pt.Guard(max_rollbacks=1)}
    ranks = pool.run(world, train_guarded, tmp_path / "guarded", parallel, {}, options, HURTS)
    for seen in ranks:
        assert seen.losses[:5] + seen.losses[10:] == pytest.approx(expected.losses, rel=0, abs=1e-12)
        assert seen.losses[6:10] != pytest.approx(expected.losses[6:10], rel=0, abs=1e-6), "the freeze had an effect"
        assert seen.steps == list(range(1, STEPS + 1)), "each step is in the log once"
        taken_back, kept = seen.decisions
        assert (
            "accuracy fell from 0.9 to 0.5 after the freeze at step 5, by more than freeze.guard=0.1"
            in (taken_back["reason"])
        )
        assert [taken_back[key] for key in ("step", "num_frozen_before", "num_frozen")] == [5, 2, 0]
        assert "guard.max_rollbacks=1 are used up; the frozen blocks stay" in kept["reason"]
        assert seen.num_frozen == 2
        assert seen.summary["guard"] == {"num_skipped": 0, "num_rollbacks": 1, "num_steps_lost": 5}
        back = next(event for event in seen.transitions if event["reason"] == taken_back["reason"])
        assert back["seconds"] == ranks[0].summary["plans"][1]["transition_seconds"], "rank 0 writes the log"
        assert back["seconds"] > back["lost_seconds"] > 0, "the time of the lost steps counts, on the page as well"
        assert ranks[0].summary["time_parts"]["trained_again"] == back["lost_seconds"]
        assert [back[key]["num_frozen"] for key in ("before", "after")] == [2, 0]


def test_a_freeze_that_hurts_each_time_is_put_off_to_the_end(pool: Pool, tmp_path: Path) -> None:
    none = pool.run(1, train_guarded, tmp_path / "none", pt.Parallel(), {}, {})[0]
    for seen in pool.run(2, train_guarded, tmp_path / "run", pt.Parallel(), {}, {"freeze": FREEZE}, HURTS):
        kept = [loss for start in (0, 10, 20, 30) for loss in seen.losses[start : start + 5]]
        assert kept == pytest.approx(none.losses, rel=0, abs=1e-10)
        assert (seen.num_frozen, seen.summary["metrics"]["dev"]) == (0, {"accuracy": 0.9})
        assert [decision["step"] for decision in seen.decisions] == [5, 10, 15]


def test_a_freeze_that_does_not_hurt_stays(pool: Pool, tmp_path: Path) -> None:
    seen = pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, {"freeze": FREEZE}, {0: 0.9, 2: 0.85})[0]
    assert (seen.num_frozen, seen.decisions, len(seen.losses)) == (2, [], STEPS)


@pytest.mark.thinned("begun anew", "without its checkpoint")
@pytest.mark.parametrize(
    ("lost", "on_unfreeze"), [(False, "keep"), (False, "reset"), (True, "keep")],
    ids=["as asked", "begun anew", "without its checkpoint"],
)  # fmt: skip
def test_a_freeze_that_hurts_is_unfrozen(pool: Pool, tmp_path: Path, lost: bool, on_unfreeze: str) -> None:
    listed = FreezeAndUnfreeze(prefixes=[2, 0, 2], interval=0.25, on_unfreeze=on_unfreeze)
    expected = pool.run(1, train_guarded, tmp_path / "list", pt.Parallel(), {}, {"freeze": listed})[0]
    freeze = replace(FREEZE, on_unfreeze=on_unfreeze)
    options = {"freeze": freeze, "guard": pt.Guard(freeze="roll_back" if lost else "unfreeze")}
    if lost:
        options["callbacks"] = [LosesCheckpoints()]
    for seen in pool.run(2, train_guarded, tmp_path / "run", pt.Parallel(), {}, options, HURTS):
        assert seen.losses == pytest.approx(expected.losses, rel=0, abs=1e-10)
        first, last = seen.decisions
        assert ("the checkpoint before it is lost" in first["reason"]) == lost
        assert (first["step"], first["num_frozen"], last["step"]) == (10, 0, 20)


@pytest.mark.thinned("roll_back")
@pytest.mark.parametrize("action", ["unfreeze", "roll_back"])
def test_a_target_does_not_freeze_again_what_the_guard_has_taken_back(action: str, pool: Pool, tmp_path: Path) -> None:
    """A block freezes at step 5, as the target allows; it trains again at least until the policy decides again."""
    listed = FreezeAndUnfreeze(prefixes=[1, 0, 0], interval=0.25)
    expected = pool.run(1, train_guarded, tmp_path / "list", pt.Parallel(), {}, {"freeze": listed})[0]
    none = pool.run(1, train_guarded, tmp_path / "none", pt.Parallel(), {}, {})[0]
    options = {"freeze": replace(FREEZE, target_fraction=0.3), "guard": pt.Guard(freeze=action, max_rollbacks=1)}
    hurts = {0: 0.9, 1: 0.5, 2: 0.5, 3: 0.5, 4: 0.5}
    seen = pool.run(1, train_guarded, tmp_path / "run", pt.Parallel(), {}, options, hurts)[0]
    assert seen.losses[:10] == pytest.approx(expected.losses[:10], rel=0, abs=1e-10)
    if action == "unfreeze":
        assert seen.losses[10:15] == pytest.approx(expected.losses[10:15], rel=0, abs=1e-10)
    else:
        assert seen.losses[10:15] == pytest.approx(none.losses[5:10], rel=0, abs=1e-10)


def test_a_freeze_that_a_target_asks_for_is_taken_back_without_a_gap_in_the_log(pool: Pool, tmp_path: Path) -> None:
    """The target allows a block in the middle of an epoch, for which no checkpoint is due."""
    options = {"freeze": replace(FREEZE, target_fraction=0.1), "guard": pt.Guard(max_rollbacks=1)}
    seen = pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, options, {0: 0.9, 1: 0.5, 2: 0.5})[0]
    assert (seen.decisions[0]["step"], seen.summary["guard"]["num_rollbacks"]) == (12, 1)
    assert seen.steps == list(range(1, STEPS + 1)), "each step is in the log once"


def test_a_freeze_that_the_policy_has_taken_back_itself_is_not_judged(pool: Pool, tmp_path: Path) -> None:
    """Before the evaluation at step 10 three blocks freeze at step 6, and train again from step 9 on."""
    listed = FreezeAndUnfreeze(prefixes=[1, 3, 0], interval=0.15, guard=0.1)
    options = {"freeze": listed, "guard": pt.Guard(freeze="unfreeze")}
    seen = pool.run(1, train_guarded, tmp_path, pt.Parallel(), {}, options, {0: 0.5, 1: 0.9, 3: 0.9})[0]
    assert (seen.decisions, seen.num_frozen, len(seen.losses)) == ([], 0, STEPS)


def test_a_freeze_that_hurts_ends_the_run(pool: Pool, tmp_path: Path) -> None:
    options = {"freeze": FREEZE, "guard": pt.Guard(freeze="stop")}
    for seen in pool.run(2, train_guarded, tmp_path, pt.Parallel(), {}, options, HURTS):
        assert len(seen.losses) == 9, "the step whose evaluation showed it is not given out"
        assert "by more than freeze.guard=0.1; take a slower freeze=" in seen.error


@pytest.mark.thinned("10-10")
@pytest.mark.parametrize(("at_most", "num_saved"), [(10, 10), (12, 11)])
def test_a_guarded_run_that_is_killed_goes_on_as_if_nothing_had_been(
    pool: Pool, tmp_path: Path, at_most: int, num_saved: int
) -> None:
    saved = pt.Checkpointing(every_steps=2, keep=1)  # also in the steps that are taken back
    options = {"freeze": FREEZE, "guard": pt.Guard(max_rollbacks=2), "checkpoint": saved}
    expected = pool.run(1, train_guarded, tmp_path / "whole", pt.Parallel(), {}, options, HURTS)[0]
    pool.run(2, train_guarded, tmp_path / "run", pt.Parallel(), {}, options, HURTS, at_most)
    for seen in pool.run(3, train_guarded, tmp_path / "run", pt.Parallel(), {}, options | {"resume": True}, HURTS):
        assert seen.losses == pytest.approx(expected.losses[num_saved:], rel=0, abs=1e-10)
        assert seen.steps == list(range(1, STEPS + 1))
        assert seen.summary["guard"] == expected.summary["guard"]
        assert seen.num_frozen == expected.num_frozen == 2


def test_a_rank_that_was_idle_knows_the_mean_norm_when_it_trains(pool: Pool, tmp_path: Path) -> None:
    """Rank 2 of three is idle beside two stages; all blocks freeze, the head is one stage, and it gets a replica."""
    freeze = pt.FixedSchedule(num_frozen=[4], interval=0.25)
    options = {"guard": pt.Guard(max_norm_ratio=50), "freeze": freeze}
    (expected,) = pool.run(1, train_guarded, tmp_path / "one", pt.Parallel(), HUGE, options)
    seen = pool.run(3, train_guarded, tmp_path / "three", pt.Parallel(num_stages=2), HUGE, options)

    first, second = seen[0].summary["plans"][:2]
    assert [len(plan["stages"]) * plan["num_replicas"] for plan in (first, second)] == [2, 3]
    assert [decision["step"] for decision in expected.decisions] == BAD
    for rank in seen:
        assert rank.losses == pytest.approx(expected.losses, rel=1e-12, abs=1e-10)
        assert [decision["step"] for decision in rank.decisions] == BAD
