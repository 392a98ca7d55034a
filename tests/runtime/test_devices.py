"""The same mathematics on every kind of device, in all arrangements that its number allows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cases import MEASURED_WIDTH, Case, tensors_equal
from support.chunking import chunked, sizes_of, train_chunked
from support.exactness import SAME_ROUNDING, assert_as_near_as_one_process, assert_equal, assert_near
from support.fusing import steps_without_waiting
from support.memory_use import predicted_and_measured
from support.mixed import Step, steps_with_overflow
from support.plans import HEAD, plan
from support.pool import Pool
from support.trainings import Plans, train_elastic, train_reference

from pipetransformer.autopipe.offload import smallest_budget
from pipetransformer.autopipe.plan import Plan

NUM_GPUS = torch.cuda.device_count()
GPU = pytest.mark.skipif(NUM_GPUS < 1, reason="there is no GPU")
BACKEND = {"cpu": "gloo", "cuda": "nccl"}
GPUS = pytest.mark.skipif(NUM_GPUS < 2, reason="there are no two GPUs")
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]
PAIRS = [("cpu", "gloo"), pytest.param("cuda", "nccl", marks=GPUS)]
ALONE: Plans = {0: plan(0, 0, [HEAD], 1, 4), 2: plan(2, 2, [HEAD], 1, 4), 4: plan(4, 4, [HEAD], 1, 4)}
ANOTHER_WAY: Plans = {  # frozen blocks run again, and others twice
    0: Plan(0, 0, ((0, HEAD),), 1, 4, recompute=True),
    2: Plan(2, 0, ((0, HEAD),), 1, 4),
    4: Plan(4, 2, ((3, HEAD),), 1, 4, recompute=True),
}
OTHER_PARTS: Plans = {0: plan(0, 0, [HEAD], 1, 1), 2: plan(2, 2, [HEAD], 1, 2), 4: plan(4, 4, [HEAD], 1, 1)}
PAIR: Plans = {0: plan(0, 0, [3, HEAD], 1, 4), 2: plan(2, 2, [HEAD], 2, 2), 4: plan(4, 4, [5, HEAD], 1, 4)}


def on_one(pool: Pool, function: Callable[..., Any], case: Case, *args: Any) -> Any:
    """Calls a function on one rank, in a world of the backend that a run of the device has."""
    return pool.run(1, function, case, *args, backend=BACKEND[case.device])[0]


@pytest.mark.parametrize("kind", ["vit", "bert"])
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_trains_as_the_original_model_does(
    device: str, kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, 0.2, device=device)
    trace = on_one(pool, train_elastic, case, ALONE, str(tmp_path))
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 4}, num_microbatches=4))


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        # every run compares pipelines that do the same: test_precision.py, test_what_runs_again_or_in_shards_...
        pytest.param("cpu", "bfloat16", marks=pytest.mark.thorough),
        *(pytest.param("cuda", each, marks=GPU) for each in ("bfloat16", "float16")),
    ],
)
def test_arrangements_of_a_device_round_alike(
    device: str, precision: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, 0.2, "sgd", precision=precision, device=device, kernels="rounded once")
    alone, another, other = (
        on_one(pool, train_elastic, case, plans, str(tmp_path)) for plans in (ALONE, ANOTHER_WAY, OTHER_PARTS)
    )
    assert_near(another, alone, case, SAME_ROUNDING)
    assert_as_near_as_one_process(other, case, {0: 0, 2: 2, 4: 4}, num_microbatches=1)


@pytest.mark.thinned("cpu-gloo-float64", "cuda")
@pytest.mark.parametrize("precision", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize(("device", "backend"), PAIRS)
def test_two_devices_train_as_one(
    device: str, backend: str, precision: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, 0.2, "sgd", precision=precision, device=device, kernels="rounded once")
    alone = on_one(pool, train_elastic, case, ALONE, str(tmp_path))
    pair = pool.run(2, train_elastic, case, PAIR, str(tmp_path), backend=backend)[0]
    if precision == "float64":
        assert_equal(pair, alone)
    else:
        assert_near(pair, alone, case, SAME_ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
def test_the_loss_scale_survives_transitions(device: str, pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("vit", bert_config, precision="float16", device=device)
    steps: list[Step] = on_one(pool, steps_with_overflow, case, ALONE, str(tmp_path), {1: 0, 3: 0})
    assert [step.skipped for step in steps] == [number in (1, 3) for number in range(case.num_steps)]
    assert [step.scale for step in steps] == [case.loss_scale / 2**halved for halved in (0, 0, 1, 1, 2, 2, 2)]
    assert [step.changed for step in steps] == [not step.skipped for step in steps]


@GPU
@pytest.mark.parametrize(
    "options", [{}, {"randomness": "device"}, {"optimizer": "sgd"}, {"optimizer": "lamb"}], ids=str
)
@pytest.mark.parametrize("kind", ["vit", "bert", "bert_weighted"])
def test_the_host_waits_for_a_gpu_once_in_a_step(
    kind: str, options: dict[str, Any], pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, 0.2, precision="bfloat16", device="cuda", **options)
    assert on_one(pool, steps_without_waiting, case, ALONE, str(tmp_path)) == case.num_steps


@GPU
@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lamb", "adamw_ema"])
def test_every_optimizer_trains_on_a_gpu_as_on_the_cpu(
    optimizer: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, optimizer=optimizer, device="cuda", parks=True)
    plans = {step: plan(num_frozen, 0, [HEAD], 1, 2) for step, num_frozen in ((0, 0), (2, 2), (4, 1))}
    trace = on_one(pool, train_elastic, case, plans, str(tmp_path))
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 1}))


@GPU
def test_a_gpu_draws_the_same_again(pool: Pool, bert_config: Path, tmp_path: Path) -> None:
    case = Case("bert", bert_config, 0.2, device="cuda", randomness="device")
    first, again = (on_one(pool, train_elastic, case, ALONE, str(tmp_path)) for _ in range(2))
    assert_equal(again, first)


@GPU
@pytest.mark.parametrize("kind", ["vit", "bert"])
def test_compiled_blocks_train_on_a_gpu_as_the_original_model_does(
    kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, device="cuda", compiles=True)
    trace = on_one(pool, train_elastic, case, ALONE, str(tmp_path))
    assert_equal(trace, train_reference(case, {0: 0, 2: 2, 4: 4}))


@GPU
@pytest.mark.parametrize("share", [0, 0.5])
def test_chunks_come_from_pinned_memory_and_train_as_all_on_the_gpu(
    share: float, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case("vit", bert_config, 0.2, device="cuda")
    sizes = sizes_of(case)
    budget = smallest_budget(sizes) + int(share * sum(sizes.values()))
    own = on_one(pool, train_chunked, case, {0: chunked(plan(0, 0, [HEAD], 1, 2), budget)}, str(tmp_path), True)
    assert own.are_pinned
    assert own.traffic[-1].ahead > 0
    assert max(each.peak for each in own.traffic) <= budget
    reference = train_reference(case, {})
    assert own.trace.losses == pytest.approx(reference.losses, rel=0, abs=1e-10)
    tensors_equal(own.trace.weights, reference.weights)


@pytest.mark.thinned("cpu-3-bert", "cuda")
@pytest.mark.parametrize("kind", ["vit", "bert"])
@pytest.mark.parametrize("num_frozen", [0, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_a_device_takes_the_memory_that_the_planner_reckons_with(
    device: str, num_frozen: int, kind: str, pool: Pool, bert_config: Path, tmp_path: Path
) -> None:
    case = Case(kind, bert_config, num_samples=128, batch_size=64, width=MEASURED_WIDTH, device=device)
    whole = plan(num_frozen, 0, [HEAD], 1, 4)
    predicted, measured = on_one(pool, predicted_and_measured, case, whole, str(tmp_path))
    assert measured == pytest.approx(predicted, rel=0.1)
