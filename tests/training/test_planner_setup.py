"""All ranks of a run plan by the same numbers, whatever each of them measures and stores."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from support.cases import Case
from support.jobs import TINY
from support.mixed import most_bytes_measuring_the_head
from support.planned import numbers_of_plans, reading_of_plans, sizes_measured
from support.pool import Pool

from pipetransformer.autopipe.profile import AffineTime
from pipetransformer.config.sections import Parallel
from pipetransformer.errors import UserError
from pipetransformer.training.build import check_chunks

RUN = (*TINY, "epochs=2", "freeze=schedule", "freeze.num_frozen=[1]", "freeze.interval=0.5")


@pytest.mark.thinned("parallel.tp=null")
@pytest.mark.parametrize(
    "options", [(), ("parallel=sharded",), ("parallel=chunks",), ("parallel.tp=null",)], ids=lambda own: " ".join(own)
)
def test_every_rank_plans_by_the_same_numbers(options: tuple[str, ...], pool: Pool, tmp_path: Path) -> None:
    first, *others = pool.run(2, numbers_of_plans, (*RUN, *options), tmp_path, False)
    assert first[0] == ""
    assert len(first[1]) > 2, "also when it froze"
    assert others == [first]


def test_nodes_that_store_different_samples_plan_by_the_same_numbers(pool: Pool, tmp_path: Path) -> None:
    first, second = pool.run(2, numbers_of_plans, RUN, tmp_path, True)
    assert first == second
    assert "cache_miss_rate=0.1," in first[1][0]


@pytest.mark.parametrize(("reads_ahead", "in_a_step"), [(False, AffineTime(1.0, 2.0)), (True, AffineTime(0.5, 0.25))])
def test_workers_read_ahead_of_steps_and_of_no_fill(
    reads_ahead: bool, in_a_step: AffineTime, pool: Pool, tmp_path: Path
) -> None:
    options = (*TINY, "epochs=1", "freeze=none")
    besides = AffineTime(0.5, 0.25)  # targets and random keys, of which none comes from the cache
    assert pool.run(1, reading_of_plans, options, tmp_path, reads_ahead) == [[(in_a_step, besides, 2.0)]]


@pytest.mark.parametrize(("device", "world", "is_refused"), [("cuda", 2, True), ("cuda", 1, False), ("cpu", 2, False)])
def test_chunks_on_several_gpus_are_refused_at_the_start(device: str, world: int, is_refused: bool) -> None:
    with pytest.raises(UserError, match="2 GPUs sum theirs on the device") if is_refused else nullcontext():
        check_chunks(Parallel(device_chunk_gib=0.5), torch.device(device), world)


@pytest.mark.parametrize(("most", "sizes"), [(1 << 27, (2, 8)), (4 * 11 * 1000, (1, 4)), (1, (1, 2))])
def test_a_share_whose_logits_are_too_many_is_measured_in_part(
    most: int, sizes: tuple[int, int], pool: Pool, bert_config: Path
) -> None:
    """A plan may have micro-batches, and measuring must not take more memory than any of its steps."""
    case = Case("gpt2", bert_config, batch_size=16, vocabulary=1000)  # of texts of at most 11 tokens
    longest = 1, 2
    assert pool.run(2, sizes_measured, case, most) == [[*sizes, *longest]] * 2


def test_measuring_a_head_over_a_vocabulary_keeps_no_output(pool: Pool, bert_config: Path) -> None:
    """Logits, their logarithms and both gradients live at a time, however often they are measured."""
    case = Case("gpt2", bert_config, vocabulary=1000)
    ((most, output),) = pool.run(1, most_bytes_measuring_the_head, case)
    assert most < 5 * output
