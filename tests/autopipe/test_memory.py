from dataclasses import replace
from typing import Any

import pytest

from pipetransformer.autopipe.memory import BATCHES_AHEAD, device_memory_bytes
from pipetransformer.autopipe.plan import Plan, Stages, layer_above
from pipetransformer.autopipe.profile import AffineTime, LayerProfile, LayerShard, MeshProfile, Profile, Traffic
from pipetransformer.mesh import StageMesh

NOTHING = AffineTime(0, 0)
LAYER = LayerProfile("block", NOTHING, NOTHING, NOTHING, 0, parameter_bytes=1000, activation_bytes=7, output_bytes=3)
PROFILE = Profile((LAYER,) * 4, optimizer_state_factor=2)
TWO_STAGES = ((0, 1), (2, 3))


@pytest.mark.parametrize(("schedule", "num_in_flight"), [("1f1b", [2, 1]), ("gpipe", [3, 3])])
def test_memory_holds_weights_states_and_the_microbatches_in_flight(schedule: str, num_in_flight: list[int]) -> None:
    plan = Plan(0, 0, TWO_STAGES, num_replicas=1, num_microbatches=3, schedule=schedule)
    boundary = 3 * 2  # 3 bytes a sample, 2 samples
    # of all micro-batches the gradients from above, and of those in flight the output; tensors from below and gradients
    tensors = [3 + num_in_flight[0], 3 + 3]
    freed = 7 * 2 * (schedule == "gpipe")  # by the upper layer's backward pass, when the lower one makes its gradient
    expected = [
        2 * 1000 * (1 + 1 + 2) + 2 * 7 * 2 * waiting - freed + boundary * number
        for waiting, number in zip(num_in_flight, tensors, strict=True)
    ]
    assert list(device_memory_bytes(PROFILE, plan, batch_size=6)) == expected


def test_frozen_layers_take_their_weights_alone() -> None:
    plan = Plan(1, 0, TWO_STAGES, num_replicas=1, num_microbatches=1)
    # in the one backward pass the upper layer is through when the lower one makes its gradient
    assert device_memory_bytes(PROFILE, plan, batch_size=1) == (2 * 1000 + 3, 2 * 4000 + 7 + 3)


def test_casts_of_weights_are_held_while_they_take_a_gradient() -> None:
    profile = Profile((replace(LAYER, autocast_bytes=500),) * 4, optimizer_state_factor=2)
    plan = Plan(1, 0, TWO_STAGES, num_replicas=1, num_microbatches=3, schedule="gpipe")
    without = device_memory_bytes(PROFILE, plan, batch_size=3)
    assert device_memory_bytes(profile, plan, batch_size=3) == (without[0], without[1] + 2 * 500)


@pytest.mark.parametrize(("num_frozen", "two_stages", "one_stage"), [(0, [5700, 5700], 9700), (2, [0, 3700], 3700)])
def test_an_update_comes_after_the_passes_and_takes_one_layer_and_what_all_take_together(
    num_frozen: int, two_stages: list[int], one_stage: int
) -> None:
    layer = replace(
        LAYER, activation_bytes=0, output_bytes=0, counter_bytes=8, update_bytes=2000, peak_update_bytes=1700
    )
    profile = Profile((layer,) * 4, optimizer_state_factor=2)
    for stages, expected in ((TWO_STAGES, two_stages), (((0, 3),), [one_stage])):
        plan = Plan(num_frozen, 0, stages, num_replicas=1, num_microbatches=2)
        active = [sum(layer >= layer_above(num_frozen) for layer in range(first, last + 1)) for first, last in stages]
        held = [1000 * (last - first + 1) + 3008 * number for (first, last), number in zip(stages, active, strict=True)]
        assert list(device_memory_bytes(profile, plan, 2)) == [a + b for a, b in zip(held, expected, strict=True)]


def test_an_update_of_shards_takes_its_part() -> None:
    layer = replace(LAYER, update_bytes=40_000, peak_update_bytes=8_000)
    plan = Plan(0, 0, ((0, 3),), num_replicas=2, num_microbatches=1, fsdp=True)
    (found,) = device_memory_bytes(Profile((layer,) * 4, optimizer_state_factor=2), plan, 2)
    assert found == 4 * 4 * 1000 / 2 + (4 * 40_000 + 8_000) / 2


def test_in_host_memory_an_update_takes_nothing_of_the_device() -> None:
    layer = replace(LAYER, update_bytes=40_000, peak_update_bytes=8_000, counter_bytes=8)
    plan = Plan(0, 0, ((0, 3),), num_replicas=1, num_microbatches=1, recompute=True, chunk_bytes=3000)
    profile = Profile((layer,) * 4, optimizer_state_factor=2)
    assert device_memory_bytes(profile, plan, 2) == device_memory_bytes(PROFILE, plan, 2)


def test_a_device_has_the_inputs_of_all_microbatches_and_works_on_one_layer_at_a_time() -> None:
    layer = replace(LAYER, peak_forward_bytes=20, peak_backward_bytes=50)
    profile = Profile((layer,) * 4, optimizer_state_factor=2, input_bytes=11)
    for num_frozen, working in ((1, [20, 50]), (0, [50, 50])):
        plan = Plan(num_frozen, 0, TWO_STAGES, num_replicas=1, num_microbatches=3)
        without = device_memory_bytes(PROFILE, plan, batch_size=6)
        found = device_memory_bytes(profile, plan, batch_size=6)
        assert [one - other for one, other in zip(found, without, strict=True)] == [2 * w + 6 * 11 for w in working]


def test_recomputing_does_not_free_what_the_loss_keeps() -> None:
    layer = replace(LAYER, parameter_bytes=0)
    for recompute in (False, True):
        plan = Plan(0, 0, TWO_STAGES, 1, 3, "gpipe", recompute=recompute)
        without, found = (
            device_memory_bytes(Profile((layer,) * 3 + (head,), 2), plan, batch_size=6)
            for head in (layer, replace(layer, loss_bytes=500))
        )
        assert found == (without[0], without[1] + 3 * 2 * 500), "of three micro-batches"


def test_what_a_gradient_takes_before_it_is_added_is_there_whatever_the_samples_are() -> None:
    profile = Profile((replace(LAYER, peak_backward_fixed_bytes=400),) * 4, optimizer_state_factor=2)
    plan = Plan(0, 0, TWO_STAGES, num_replicas=1, num_microbatches=3)
    for batch_size in (3, 6):
        without = device_memory_bytes(PROFILE, plan, batch_size)
        assert device_memory_bytes(profile, plan, batch_size) == tuple(each + 400 for each in without)


def test_replicas_of_the_whole_model_have_buckets_and_those_of_stages_sum_after_the_passes() -> None:
    def taken(stages: Stages, replicas: int, profile: Profile) -> tuple[int, ...]:
        return device_memory_bytes(profile, Plan(0, 0, stages, replicas, 1, "gpipe"), batch_size=replicas)

    many = Profile((replace(LAYER, activation_bytes=7000),) * 4, optimizer_state_factor=2)
    whole, parts = ((0, 3),), TWO_STAGES
    # the gradients are views of the buckets, which are there before the passes
    assert taken(whole, 2, many) == (4 * (1000 + 2000 + 1000 + 7000),)
    assert taken(whole, 1, many) == (4 * (1000 + 2000) + 4 * 7000 + 1000,), "when there is one gradient"
    assert taken(parts, 2, PROFILE) == tuple(2 * (3000 + 1000) + 2000 + 2 * 3 for _ in parts), "a bucket of them"
    copies = replace(PROFILE, copied_bytes=(500,) * 4)
    assert taken(whole, 1, copies) == (4 * (3000 + 1000) + 4 * 500,), "a bucket of what ranks of a mesh have twice"


def test_what_is_read_from_the_cache_takes_memory_as_an_input_and_so_does_what_is_read_ahead() -> None:
    features = 5 * 3 * (1 + BATCHES_AHEAD)
    assert device_memory_bytes(PROFILE, Plan(2, 2, ((3, 3),), 1, 1), batch_size=5) == (4000 + 5 * 7 + features,)


def test_the_first_of_two_stages_alone_reads_ahead() -> None:
    """Both have weights, gradient and state; the first one's features, the input of the other, and their gradients."""
    reading, other = device_memory_bytes(PROFILE, Plan(1, 1, ((2, 2), (3, 3)), 1, 1), batch_size=5)
    first, second = 5 * 3 * (1 + BATCHES_AHEAD + 2), 5 * 3 * 2
    assert (reading, other) == (4000 + 5 * 7 + first, 4000 + 5 * 7 + second)


CUBE = StageMesh(tp=2, algorithm="3d")  # of whose ranks each computes one of two rows that it reads
PART = replace(LAYER, parameter_bytes=250)
ON_CUBE = MeshProfile(CUBE, (LayerShard(PART, Traffic(), Traffic(), Traffic(), Traffic()),) * 4)


@pytest.mark.parametrize(
    ("options", "batch_size", "expected"),
    [
        ({}, 6, 3 * 1000 + 6 * 500 - (1000 + 3 * 7)),  # instead of a gradient and what one micro-batch saves
        ({"chunk_bytes": 3000, "recompute": True}, 6, 1000 + 6 * 500 - 3 * 7),  # a layer at a time, besides the chunks
        ({"mesh": CUBE}, 12, 3 * 1000 + 12 * 500 - (250 + 3 * 7)),  # whole layers on each rank, for all rows
    ],
)
def test_what_the_cache_has_no_room_for_takes_the_weights_of_the_cached_layers_and_the_memory_to_run_them(
    options: dict[str, Any], batch_size: int, expected: int
) -> None:
    layer = replace(LAYER, peak_forward_bytes=500)
    profile = Profile((layer,) * 4, optimizer_state_factor=2, meshes=(ON_CUBE,))
    plan = Plan(2, 2, ((3, 3),), 1, num_microbatches=2, **options)
    (whole,), (short,) = (
        device_memory_bytes(replace(profile, cache_miss_rate=missing), plan, batch_size) for missing in (0.0, 0.5)
    )
    assert short - whole == expected


@pytest.mark.parametrize("num_frozen", [0, 1])
def test_checkpointing_saves_inputs_and_one_layer_at_a_time(num_frozen: int) -> None:
    plan = Plan(num_frozen, 0, TWO_STAGES, 1, num_microbatches=3, schedule="gpipe", recompute=True)
    saved = [0 + 3, 3 + 3] if num_frozen == 0 else [0, 3 + 3]  # the model's own input counts nowhere
    # in the lower layer's turn the upper one's input is free, and its own is there
    again = [7 - 3, 7 - 3 - 3] if num_frozen == 0 else [0, 7 - 3 - 3]
    weights = [8000, 8000] if num_frozen == 0 else [2000, 8000]
    tensors = [6, 6] if num_frozen == 0 else [3, 3]
    expected = [w + 2 * (3 * s + a + 3 * n) for w, s, a, n in zip(weights, saved, again, tensors, strict=True)]
    assert list(device_memory_bytes(PROFILE, plan, batch_size=6)) == expected


def test_chunks_of_a_device_add_up() -> None:
    plan = Plan(0, 0, ((0, 0), (1, 1), (2, 2), (3, 3)), 1, 2, "interleaved1f1b", stages_per_rank=2)
    # the lower chunk of each device makes its gradient when the upper one has nothing in flight, but its gradient
    tensors = 4 + (4 + 4)  # gradients and outputs to above; and from below, with their gradients
    assert device_memory_bytes(PROFILE, plan, batch_size=2) == (8000 + 7 * 2 + 3 * tensors,) * 2


def test_weights_that_never_train_have_no_gradient_and_no_state() -> None:
    """As the base weights of adapters: of 1,000 bytes 900 are fixed."""
    adapted = Profile((replace(LAYER, fixed_bytes=900),) * 4, optimizer_state_factor=2)
    plan = Plan(1, 0, TWO_STAGES, num_replicas=1, num_microbatches=1)
    assert device_memory_bytes(adapted, plan, batch_size=1) == (2 * 1000 + 3, 2 * (1000 + 3 * 100) + 7 + 3)
