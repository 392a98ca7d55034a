"""Trainings in which dropout draws by the device's own generator."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F

from pipetransformer.runtime.batch import Batch
from pipetransformer.runtime.rng import DeviceRng, PerSampleRng
from support.cases import Case
from support.mixed import measured_layers
from support.trainings import Plans, Trace, train_elastic


@contextmanager
def counting_attention(counts: dict[str, int]) -> Iterator[None]:
    """Counts the calls of torch's own attention that drops out."""
    own = F.scaled_dot_product_attention

    def call(*args: Any, **options: Any) -> torch.Tensor:
        counts["dropping"] = counts.get("dropping", 0) + (options.get("dropout_p", 0.0) > 0)
        return own(*args, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", call):
        yield


def train_and_count(case: Case, plans: Plans, folder: str) -> tuple[Trace, int, bool]:
    """The training, the calls of torch's own attention with dropout, and whether the generator is as it was."""
    torch.manual_seed(11)
    before, counts = torch.get_rng_state(), dict[str, int]()
    with counting_attention(counts):
        trace = train_elastic(case, plans, folder)
    return trace, counts.get("dropping", 0), torch.equal(torch.get_rng_state(), before)


def keys_on_host(case: Case, plans: Plans, folder: str) -> set[bool]:
    """Whether the keys of batches stay where the host reads them."""
    with mock.patch.object(Batch, "to", autospec=True, side_effect=Batch.to) as spy:
        train_elastic(case, plans, folder)
    return {call.args[3] for call in spy.call_args_list}


def kinds_that_are_drawn(case: Case, randomness: str) -> dict[str, int]:
    """How often the layers of a model began numbers of each kind while they were measured."""
    kinds: dict[str, type[PerSampleRng] | type[DeviceRng]] = {"sample": PerSampleRng, "device": DeviceRng}
    with ExitStack() as patches:
        spies = {
            name: patches.enter_context(mock.patch.object(kind, "layer", autospec=True, side_effect=kind.layer))
            for name, kind in kinds.items()
        }
        measured_layers(case, randomness)
    return {name: spy.call_count for name, spy in spies.items()}
