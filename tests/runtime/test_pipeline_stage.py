"""Stages ask for messages before they need them, and each message is told from the others."""

from pathlib import Path

import pytest
from support.cases import Case
from support.messages import num_asked_early, train_with_other_messages
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import train_reference

from pipetransformer.autopipe.plan import Plan
from pipetransformer.runtime.schedules import receives_early

NUM = 4  # micro-batches
GPIPE, ONE_F_ONE_B = (plan(0, 0, [3, HEAD], 1, NUM, schedule) for schedule in ("gpipe", "1f1b"))
INTERLEAVED = Plan(
    0, 0, ((0, 1), (2, 3), (4, 5), (6, HEAD)), 1, NUM, "interleaved1f1b", stages_per_rank=2
)  # fmt: skip


@pytest.mark.parametrize(
    ("one", "first"), [(GPIPE, [NUM, NUM]), (INTERLEAVED, [NUM, 2 * NUM])], ids=["gpipe", "interleaved"]
)
def test_a_stage_asks_for_all_messages_of_a_step_before_its_first_pass(
    one: Plan, first: list[int], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    """The first stage for gradients, the last for activations, and one between them for both."""
    counts = pool.run(2, num_asked_early, Case("vit", bert_config), one, str(tmp_path))
    assert [before for before, _ in counts] == first
    assert [count for _, count in counts] == [NUM * (one.num_stages - 1)] * 2


def test_in_1f1b_a_stage_asks_for_what_is_next(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    counts = pool.run(2, num_asked_early, Case("vit", bert_config), ONE_F_ONE_B, str(tmp_path))
    assert counts == [(0, 0)] * 2
    assert receives_early("1f1b", trains=False), "forward alone it runs as GPipe does"


def test_a_message_of_another_micro_batch_is_noticed(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, num_steps=2)
    losses = pool.run(2, train_with_other_messages, case, {0: GPIPE}, str(tmp_path))[0].losses
    assert losses != pytest.approx(train_reference(case, {}).losses, rel=0, abs=1e-7)
