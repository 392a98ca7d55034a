"""The memory of a rank under a plan, predicted and counted."""

import weakref
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pipetransformer.autodp.topology import Topology
from pipetransformer.autopipe.memory import device_memory_bytes
from pipetransformer.autopipe.plan import Plan
from pipetransformer.autopipe.profile import LayerProfile
from pipetransformer.config.sections import Parallel
from pipetransformer.mesh import SINGLE, StageMesh
from pipetransformer.planning.planner import Planner
from pipetransformer.profiling.layers import profile
from pipetransformer.profiling.memory import LiveBytes
from pipetransformer.runtime.chunks import ChunkedStage
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.precision import PRECISIONS
from pipetransformer.training.evaluate import _predicted
from pipetransformer.training.loader import BatchLoader
from pipetransformer.training.planner_setup import make_planner
from pipetransformer.training.world import NodeLayout
from support.cases import OPTIMIZERS, Case
from support.chunking import bytes_on_the_host
from support.jobs import with_made_up_times
from support.observations import one_step
from support.plans import HEAD, plan
from support.trainings import build


class ResizedBytes(LiveBytes):
    """Counts at every operation anew: FSDP takes a tensor's memory away and gives it back, and the tensor lives on."""

    def add(self, tensor: Tensor) -> None:
        storage = local_part(tensor).untyped_storage()
        if not tensor.is_meta:
            self._known[storage._cdata] = weakref.ref(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.add(leaf)
        self.now = sum(storage.nbytes() for known in self._known.values() if (storage := known()) is not None)
        self.peak = max(self.peak, self.now)
        return result


def predicted_and_measured(case: Case, under: Plan, folder: str) -> tuple[int, int]:
    """Bytes of this rank under a plan: by the memory model, and the most that live in its second step."""
    runtime, loader, groups = build(case, folder)
    planner = _planner(case, loader, runtime.device, under.mesh)
    device = Topology(under, dist.get_rank()).device
    predicted = device_memory_bytes(planner.profile, under, case.batch_size)[device]
    # cuDNN takes memory for the time of a convolution, as much as it likes; torch's own takes a sample's columns
    with torch.backends.cudnn.flags(enabled=False), ResizedBytes() if under.fsdp else LiveBytes() as live:
        _add_weights(live, runtime)
        runtime.apply_plan(under)
        one_step(runtime, loader, case, 0)
        live.peak = live.now
        if runtime.device.type == "cuda":
            besides = torch.cuda.memory_allocated() - live.now  # what libraries keep for themselves
            torch.cuda.reset_peak_memory_stats()
        one_step(runtime, loader, case, 1)
    measured = torch.cuda.max_memory_allocated() - besides if runtime.device.type == "cuda" else live.peak
    for stage in runtime.engine.stages.values() if runtime.engine and runtime.device.type == "cpu" else ():
        if isinstance(stage, ChunkedStage):  # there host and device are one
            measured -= bytes_on_the_host(stage.chunks, runtime.optimizer)
    loader.close()
    groups.close()
    return predicted, measured


def _add_weights(live: LiveBytes, runtime: ElasticRuntime) -> None:
    """Keeps none of them: the plan may move it."""
    for _, weight in runtime.resident.stack.named_parameters():
        live.add(weight)


def peaks_of_step_and_evaluation(case: Case, under: Plan, folder: str) -> tuple[int, int]:
    """The most bytes of tensors that live at a time in a step, and in the evaluation of as many samples."""
    runtime, loader, groups = build(case, folder)
    with LiveBytes() as live:
        _add_weights(live, runtime)
        runtime.apply_plan(under)
        one_step(runtime, loader, case, 0)
        live.peak = live.now
        one_step(runtime, loader, case, 1)
        in_step, live.peak = live.peak, live.now
        for _ in range(2):  # the second comes while the first one's outputs are there, if anything keeps them
            runtime.evaluate(loader, np.arange(case.batch_size), partial(_predicted, loader, None))
    loader.close()
    groups.close()
    return in_step, live.peak


def _planner(case: Case, loader: BatchLoader, device: torch.device, mesh: StageMesh = SINGLE) -> Planner:
    with with_made_up_times():
        return make_planner(
            case.stack(), case.task.loss, loader, OPTIMIZERS[case.optimizer], Parallel(), case.batch_size, device,
            PRECISIONS[case.precision], NodeLayout.here(), meshes=tuple(dict.fromkeys((SINGLE, mesh))),
        )  # fmt: skip


def blocks_by_length(case: Case, folder: str) -> tuple[LayerProfile, LayerProfile, LayerProfile]:
    """Returns a block as the planner knows it, and as a short and a long sample alone show it."""
    runtime, loader, groups = build(case, folder)
    known = _planner(case, loader, runtime.device).profile
    lengths = loader.split.lengths
    assert lengths is not None
    alone = []
    for sample in (lengths.argmin(), lengths.argmax()):
        batch = loader.batch(np.array([sample]), Topology(plan(0, 0, [HEAD], 1, 1), 0))
        batch = batch.to(runtime.device, PRECISIONS[case.precision].param_dtype)
        spec, precision = OPTIMIZERS[case.optimizer], PRECISIONS[case.precision]
        alone.append(profile(case.stack(), case.task.loss, (batch, batch), spec, runtime.device, precision).layers[1])
    loader.close()
    groups.close()
    return known.layers[1], alone[0], alone[1]
