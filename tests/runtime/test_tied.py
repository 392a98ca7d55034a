"""Design promises 1 and 3 for weights that layers share: one weight, wherever its copies lie."""

from pathlib import Path

import pytest
import torch
from support.cases import CLIP_NORM, Case
from support.exactness import assert_equal
from support.mutations import TIED_MUTATIONS, train_mutated
from support.plans import HEAD, PIPE_TO_DATA, plan
from support.pool import Pool
from support.ties import SHARING, TAKES_NO_PART, added_up, gradient, stack
from support.trainings import Plans, train_elastic, train_reference

from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.runtime.resident import ResidentLayers
from pipetransformer.runtime.stage import Stage

CHUNKS = ((0, 1), (2, 3), (4, 5), (6, HEAD))
THAWING: Plans = {
    0: plan(0, 0, [1, 3, 5, HEAD], 1, 4, "gpipe"),
    1: Plan(0, 0, CHUNKS, 2, 2, "interleaved1f1b", stages_per_rank=2),
    2: plan(0, 0, [HEAD], 4, 1),
    3: plan(3, 0, [1, 4, 5, HEAD], 1, 4),  # frozen below trainable
    4: plan(4, 4, [HEAD], 3, 1),  # the embedding is in no stage
    5: plan(0, 0, [2, HEAD], 2, 2),
}
NEVER_FROZEN: Plans = {
    0: plan(0, 0, [HEAD], 2, 1),
    2: plan(0, 0, [2, 5, HEAD], 1, 4),
    4: plan(0, 0, [4, HEAD], 2, 2, "gpipe"),
}
SEQUENCES = {"4 stages, 2, 1": PIPE_TO_DATA, "thawing": THAWING, "never frozen": NEVER_FROZEN}


def frozen(plans: Plans) -> dict[int, int]:
    return {step: plan.num_frozen for step, plan in plans.items()}


@pytest.mark.thinned("4 stages", "thawing")
@pytest.mark.parametrize(
    ("optimizer", "sequence"), [("lamb", "4 stages, 2, 1"), ("adamw", "thawing"), ("adamw", "never frozen")]
)
def test_a_tied_model_trains_as_one_process_does(
    optimizer: str, sequence: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case, plans = Case("bert_mlm", bert_config, optimizer=optimizer), SEQUENCES[sequence]
    reference = train_reference(case, frozen(plans))
    assert_equal(pool.run(4, train_elastic, case, plans, str(tmp_path))[0], reference)
    assert max(reference.norms) > CLIP_NORM, "the gradient was clipped"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("mutation", TIED_MUTATIONS)
def test_broken_ties_do_not_pass_for_exact(mutation: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert_mlm", bert_config)
    mutated = pool.run(4, train_mutated, mutation, case, PIPE_TO_DATA, str(tmp_path))[0]
    mutated.ties_hold = True  # the numbers alone tell
    with pytest.raises(AssertionError):
        assert_equal(mutated, train_reference(case, frozen(PIPE_TO_DATA)))


@pytest.mark.parametrize("stages", [((0, 1), (2, 3), (4, 4)), ((0, 1), (2, 4)), ((0, 4),)], ids=str)
@pytest.mark.parametrize("replicas", [1, 2])
def test_every_copy_gets_the_same_sum_of_its_replicas_gradients(
    replicas: int, stages: tuple[tuple[int, int], ...], pool: Pool
) -> None:
    arrangement = Plan(0, 0, stages, replicas, 1)
    results = pool.run(arrangement.num_devices, added_up, arrangement)
    for replica in range(replicas):
        parts = results[replica * len(stages) : (replica + 1) * len(stages)]
        sums = [total for part in parts for total in part.values()]
        assert len(sums) == len(SHARING)
        assert all(torch.equal(total, sums[0]) for total in sums), "bit for bit"
        expected = sum(gradient(layer, replica) for layer in SHARING if layer != TAKES_NO_PART)
        torch.testing.assert_close(sums[0], expected)


def test_when_its_lowest_layer_freezes_every_copy_stops_and_loses_its_optimizer_state() -> None:
    resident = ResidentLayers(stack(), torch.device("cpu"))
    optimizer = torch.optim.AdamW(resident.stack.parameters())
    for parameter in resident.stack.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    resident.stash_optimizer_state(optimizer, first_active=2)
    layers = {layer: resident.stack[layer] for layer in range(5)}
    stage = Stage(
        dict(layers), {layer: resident.stack.trainable(layer, 2) for layer in (2, 3, 4)}, PRECISIONS["float64"]
    )

    with_state = {layer: list(state) for layer, state in resident.optimizer_state.items()}
    assert with_state == {2: ["module.bias"], 3: ["module.weight", "module.bias"], 4: ["module.bias"]}
    training = [name for name, parameter in stage.named_parameters() if parameter.requires_grad]
    assert training == [f"layers.{layer}.{name}" for layer, names in with_state.items() for name in names]
