"""The state of a run holds everything that it has to know to go on."""

from pathlib import Path
from typing import Any

import pytest
from support.jobs import TINY
from support.pool import Pool
from support.states import Run, run_through_json

from pipetransformer.errors import UserError
from pipetransformer.planning.history import RunHistory
from pipetransformer.planning.state import TrainState
from pipetransformer.runtime.precision import PRECISIONS, LossScale

COMMON = (  # decisions at steps 4, 8, 12 and 16 of 20
    *TINY, "model.options={patch_size: 4, embed_dim: 16, depth: 5, num_heads: 2}", "epochs=5", "freeze.interval=0.2",
    "parallel=data", "cache=off", "precision=float16",
)  # fmt: skip
RUN = (*COMMON, "freeze.alpha=0.2")
SCHEDULE = (*COMMON, "freeze=schedule", "freeze.num_frozen=[1,2,3,4]")  # asks how many decisions came before
AT_STEP = 10  # two steps after a decision


@pytest.fixture(scope="module")
def undisturbed(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, ...], Run | str]:
    """Each run to its end, made when it is first asked for."""

    class Runs(dict[tuple[str, ...], Run | str]):
        def __missing__(self, run: tuple[str, ...]) -> Run | str:
            self[run] = pool.run(1, run_through_json, run, tmp_path_factory.mktemp("run"), None)[0]
            return self[run]

    return Runs()


@pytest.mark.thinned("paper rule")
@pytest.mark.parametrize("run", [RUN, SCHEDULE], ids=["paper rule", "schedule"])
def test_a_run_goes_on_from_its_state_as_if_nothing_had_happened(
    pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Run | str], run: tuple[str, ...]
) -> None:
    assert undisturbed[run][2][-1][1] > 1, "several decisions froze"
    assert pool.run(1, run_through_json, run, tmp_path, AT_STEP)[0] == undisturbed[run]


@pytest.mark.thinned("policy_state")
@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("step", RUN),
        ("policy_state", RUN),
        ("num_decisions", SCHEDULE),
        ("signals", RUN),
        ("loss_scale", RUN),
        ("history", RUN),
    ],
)
def test_a_run_that_forgets_a_value_of_its_state_goes_on_otherwise(
    pool: Pool, tmp_path: Path, undisturbed: dict[tuple[str, ...], Run | str], name: str, run: tuple[str, ...]
) -> None:
    assert pool.run(1, run_through_json, run, tmp_path, AT_STEP, name)[0] != undisturbed[run]


def test_a_decision_that_was_put_off_is_still_due() -> None:
    saved, restored = state(), state()
    saved.decision_due = True
    saved.metrics = {"test": {"accuracy": 0.5}}
    saved.best_metrics = {"test": {"name": "accuracy", "value": 0.75, "split": "test", "step": 1}}
    restored.load_state_dict(saved.state_dict())
    assert restored.decision_due
    assert restored.metrics == saved.metrics
    assert restored.best_metrics == saved.best_metrics


class Sums:
    """What was measured, in place of collectors."""

    def __init__(self) -> None:
        self.sums = [1.5]

    def state_dict(self) -> dict[str, Any]:
        return {"sums": list(self.sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sums = list(state["sums"])


def state(seed: int = 1, steps_per_epoch: int = 4) -> TrainState:
    return TrainState(seed, RunHistory(5, may_cache=False), LossScale(PRECISIONS["float32"]), Sums(), steps_per_epoch)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (state(seed=2), "seed=1, and this run has seed=2"),
        (state(steps_per_epoch=5), "the state has 4 steps per epoch, and this run has 5"),
    ],
)
@pytest.mark.parametrize("step", [3, 6])
def test_a_state_of_another_sample_order_is_refused(other: TrainState, message: str, step: int) -> None:
    saved = state()
    saved.step = step
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved.state_dict())


def test_a_state_of_an_earlier_release_is_judged_by_its_place_in_an_epoch() -> None:
    saved = state()
    saved.step = 6
    known = {name: value for name, value in saved.state_dict().items() if name != "steps_per_epoch"}
    state().load_state_dict(known)
    with pytest.raises(
        ValueError, match="step 6 is step 2 of epoch 1 in the state, and this run has 5 steps per epoch"
    ):
        state(steps_per_epoch=5).load_state_dict(known)


def test_a_state_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="version 99"):
        state().load_state_dict(state().state_dict() | {"version": 99})


def test_a_state_that_lacks_any_of_its_values_is_refused() -> None:
    whole = state().state_dict()
    in_no_earlier_release = {"evaluated_at", "steps_per_epoch"}
    for name in whole.keys() - {"cache_level"} - in_no_earlier_release:  # the level is a figure for the reader
        less = {other: value for other, value in whole.items() if other != name}
        with pytest.raises(UserError, match="the state"):
            state().load_state_dict(less)


def test_a_state_of_an_earlier_release_counts_as_not_evaluated() -> None:
    known, fresh = state(), state()
    known.evaluated_at = 8
    whole = known.state_dict()
    fresh.load_state_dict(whole)
    assert fresh.evaluated_at == 8
    fresh.load_state_dict({name: value for name, value in whole.items() if name != "evaluated_at"})
    assert fresh.evaluated_at is None


@pytest.mark.parametrize(
    "wrong",
    [{"history": 3}, {"guard": {"more": 1}}, {"loss_scale": []}, {"metrics": [1]}, {"signals": None}, {"step": "x"}],
    ids=str,
)
def test_a_state_with_values_of_other_types_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UserError, match="the state"):
        state().load_state_dict(state().state_dict() | wrong)


def test_steps_that_are_passed_over_stay_spent() -> None:
    earlier, now = state(), state()
    earlier.step, earlier.target.spent, earlier.target.proposal = 5, 0.25, 1
    now.step, now.target.spent, now.target.proposal = 9, 0.5, 2
    assert now.rolled_back(earlier.state_dict(), repeats=True)["target"]["spent"] == 0.25
    assert now.rolled_back(earlier.state_dict(), repeats=False)["target"] == earlier.target.state_dict() | {
        "spent": 0.5
    }


def test_a_state_is_rolled_back_without_what_cannot_be_taken_back() -> None:
    earlier, now = state(), state()
    earlier.step, earlier.num_frozen = 5, 1
    now.step, now.num_frozen, now.num_resumes, now.guard.num_rollbacks = 9, 2, 3, 1
    earlier.evaluated_at, now.evaluated_at = 4, 8
    earlier.metrics, now.metrics = {"dev": {"accuracy": 0.5}}, {"dev": {"accuracy": 0.75}}
    again = now.rolled_back(earlier.state_dict(), repeats=True)
    passed_over = now.rolled_back(earlier.state_dict(), repeats=False)
    for back, step, evaluated_at, accuracy in ((again, 5, 4, 0.5), (passed_over, 9, 8, 0.75)):
        restored = state()
        restored.load_state_dict(back)
        assert (restored.step, restored.num_frozen) == (step, 1)
        assert (restored.num_resumes, restored.guard.num_rollbacks) == (3, 1)
        assert (restored.evaluated_at, restored.metrics["dev"]["accuracy"]) == (evaluated_at, accuracy)
