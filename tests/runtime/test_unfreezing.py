"""Blocks that train again go on with the optimizer state that they froze with, or begin anew: as one process does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.exactness import assert_equal
from support.mutations import UNFREEZE_MUTATIONS, train_mutated
from support.observations import parked_layers
from support.pairwise import pairwise
from support.plans import HEAD, plan, sharded
from support.pool import Pool
from support.ties import stack
from support.trainings import Plans, Trace, train_elastic, train_reference

from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.resident import ResidentLayers


def sequence(world: int, cached: bool, schedule: str) -> Plans:
    """Freezes four blocks, moves them while they are frozen, unfreezes half of them, freezes again, unfreezes all."""
    whole = [HEAD] if world == 1 else [3, HEAD] if world == 2 else [1, 3, 5, HEAD]
    frozen = [5, HEAD] if world > 1 else [HEAD]
    width = max(1, world // 2)
    return {
        0: plan(0, 0, whole, 1, 4, schedule),
        2: plan(4, 4 if cached else 0, frozen, width, 2, schedule),
        3: plan(4, 0, whole, 1, 4, schedule),  # what was offloaded runs again, on other ranks, and stays frozen
        4: plan(2, 2 if cached else 0, [HEAD], world, 1, schedule),
        5: plan(3, 3 if cached else 0, frozen, width, 2, schedule),
        6: plan(0, 0, whole[::-1][:1], world, 1, schedule),
    }


def shards(world: int, cached: bool, _: str) -> Plans:
    prefixes = {0: 0, 2: 4, 4: 2, 5: 3, 6: 0}
    return {step: sharded(frozen, frozen if cached else 0, world, 1 + step % 2) for step, frozen in prefixes.items()}


FACTORS = {
    "world": [1, 2, 4],
    "arrangement": ["elastic", "sharded"],
    "cached": [False, True],
    "schedule": ["gpipe", "1f1b"],
    "kind": ["vit", "bert_mlm"],  # the head of the second is its embedding
    "optimizer": ["adamw_ema", "lamb", "sgd"],
    "parks": [True, False],
}
ROWS = pairwise(list(FACTORS.values()), lambda row: row[1] == "elastic" or row[3] == "1f1b")


def reference(case: Case, plans: Plans) -> Trace:
    return train_reference(case, {step: one.num_frozen for step, one in plans.items()})


@pytest.mark.thinned(
    "1-elastic-True", "2-elastic-False-1f1b-vit-sgd-True", "2-elastic-True-gpipe-bert_mlm", "4-sharded-False"
)  # fmt: skip
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row)))
def test_blocks_that_freeze_and_train_again_train_as_in_one_process(
    row: tuple[object, ...], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    world, arrangement, cached, schedule, kind, optimizer, parks = row
    plans = (shards if arrangement == "sharded" else sequence)(int(str(world)), bool(cached), str(schedule))
    case = Case(str(kind), bert_config, 0.1, str(optimizer), parks=bool(parks))
    traces = pool.run(int(str(world)), train_elastic, case, plans, str(tmp_path))
    assert_equal(traces[0], reference(case, plans))


def test_what_is_kept_and_what_is_forgotten_are_two_trainings(bert_config: Path) -> None:
    kept = Case("vit", bert_config, 0.1, parks=True)
    plans = sequence(1, cached=False, schedule="1f1b")
    one, two = reference(kept, plans), reference(replace(kept, parks=False), plans)
    assert one.losses[:5] == two.losses[:5], "until a block has trained again"
    assert abs(one.losses[-1] - two.losses[-1]) > 1e-6


PIPELINE: Plans = {  # without replicas, whose state could differ
    0: plan(0, 0, [3, HEAD], 1, 2),
    2: plan(4, 0, [1, HEAD], 1, 2),  # 2 and 3 move while they are frozen
    4: plan(2, 0, [2, HEAD], 1, 2),
    5: plan(3, 3, [5, HEAD], 1, 2),  # 3 freezes again where it froze first
    6: plan(0, 0, [3, HEAD], 1, 2),
}
BROKEN = [(mutation, "elastic") for mutation in UNFREEZE_MUTATIONS]
BROKEN += [("blocks get the state of another one", "sharded"), ("state is forgotten where it is to be kept", "sharded")]


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("mutation", "arrangement"), BROKEN)
def test_broken_parking_does_not_pass_for_exact(
    mutation: str, arrangement: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    plans = PIPELINE if arrangement == "elastic" else shards(2, True, "1f1b")
    case = Case("bert_mlm", bert_config, 0.1, parks=mutation != "state is kept where it is to be forgotten")
    mutated = pool.run(2, train_mutated, mutation, case, plans, str(tmp_path))[0]
    mutated.ties_hold = True  # the numbers alone tell
    with pytest.raises(AssertionError):
        assert_equal(mutated, reference(case, plans))


def test_what_the_mutations_break_is_exact(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert_mlm", bert_config, 0.1, parks=True)
    assert_equal(pool.run(2, train_elastic, case, PIPELINE, str(tmp_path))[0], reference(case, PIPELINE))


MOVING: dict[int, Plan] = {
    0: plan(0, 0, [3, HEAD], 1, 2),
    1: plan(3, 3, [5, HEAD], 1, 2),  # 0 to 3 are offloaded on rank 0
    2: plan(3, 0, [HEAD], 2, 1),  # both ranks run all layers
    3: plan(2, 2, [HEAD], 2, 1),
    4: plan(0, 0, [5, HEAD], 1, 2),
}


def test_state_is_parked_where_the_frozen_layers_are_and_nowhere_else(
    pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """Also while frozen layers are borrowed to fill the cache, and after all weights were gathered."""
    case = Case("vit", bert_config, parks=True)
    seen = pool.run(2, parked_layers, case, MOVING, str(tmp_path))
    assert [one.parked for one in seen] == [
        [[], [0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 2], []],
        [[], [], [0, 1, 2, 3], [], []],
    ]
    assert all(devices == {"cpu"} for one in seen for devices in one.devices if devices)
    dropped = pool.run(2, parked_layers, replace(case, parks=False), MOVING, str(tmp_path))
    assert [one.parked for one in dropped] == 2 * [5 * [[]]]
    assert seen[0].bytes_moved[2] > dropped[0].bytes_moved[2], "the state moves with its layer"
    assert seen[0].bytes_borrowed == dropped[0].bytes_borrowed, "and is not borrowed"


def test_the_order_of_optimizer_state_does_not_count_when_a_layer_is_sent() -> None:
    """Ranks that read it from a file have it in any order, and one manifest holds for all that send a layer."""
    state = {name: {"exp_avg": torch.zeros(2), "step": torch.tensor(3.0)} for name in ("module.weight", "module.bias")}
    turned = {name: dict(reversed(tensors.items())) for name, tensors in reversed(state.items())}
    senders = []
    for own in (state, turned):
        resident = ResidentLayers(stack(), torch.device("cpu"), parks=True)
        resident.optimizer_state[1] = own
        senders.append(resident)
    one, other = senders
    assert one.manifest(1) == other.manifest(1)
    other.unpack(1, one.manifest(1), other.pack(1))
    assert all(
        torch.equal(other.optimizer_state[1][name][key], state[name][key]) for name in state for key in state[name]
    )
