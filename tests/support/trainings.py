"""The same training twice: under given plans on the ranks of a world, and plainly in one process."""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from timm.data import Mixup
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from pipetransformer.autocache.cache import AutoCache
from pipetransformer.autocache.capacity import SHARD_SIZE, CacheCapacity, FeatureFormat
from pipetransformer.autocache.layout import Budgets, bytes_needed
from pipetransformer.autodp.sampler import SampleOrder, batch_ids, epoch_order, num_batches
from pipetransformer.autopipe.plan import Plan
from pipetransformer.data.base import Split
from pipetransformer.data.images.library_rng import kept_generators, seed_generators
from pipetransformer.data.images.mixing import MIXING, Mixing
from pipetransformer.models.stack import LayerStack
from pipetransformer.planning.timeline import Timeline
from pipetransformer.report.reporter import Reporter
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.fsdp import gather
from pipetransformer.runtime.groups import ProcessGroups, RankContext
from pipetransformer.runtime.precision import PRECISIONS, Precision
from pipetransformer.runtime.result import TransitionReport
from pipetransformer.runtime.rng import PerSampleRng, sample_keys
from pipetransformer.training.cache_session import CacheSession, CacheTerms
from pipetransformer.training.cache_setup import WorldCommunicator
from pipetransformer.training.loader import BatchLoader, sample_source
from support.cases import CLIP_NORM, OPTIMIZERS, SEED, Case, name_in_stack
from support.kernels import KERNELS

Plans = dict[int, Plan]
NUM_STEPS = 7


@dataclass
class Trace:
    """The numbers of a training; equal traces mean equal mathematics."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, Tensor] = field(default_factory=dict)
    ties_hold: bool = True  # after every step, bit for bit


def rate(step: int) -> float:
    return OPTIMIZERS["adamw"].rate(step, NUM_STEPS)


def ids_of(case: Case, step: int) -> np.ndarray:
    epoch, index = divmod(step, num_batches(case.num_samples, case.batch_size))
    return batch_ids(epoch_order(case.num_samples, epoch, SEED), index, case.batch_size)


class CachedLoader(BatchLoader):
    """The samples of a case, with all that a run does about its cache."""

    def __init__(self, case: Case, runtime: ElasticRuntime, folder: Path) -> None:
        split = case.split()
        source = sample_source(split, runtime.resident.stack.hidden_shape)
        feature_format = FeatureFormat(source.hidden_size, runtime.precision.param_dtype)
        whole = bytes_needed(source.lengths, feature_format.codec().row_bytes, SHARD_SIZE)
        budgets = Budgets(*(int(share * whole) for share in case.cache_shares))
        capacity = CacheCapacity([source], feature_format, budgets, persistent=False)
        self.cache = AutoCache(capacity, {source.name: folder}, WorldCommunicator())
        super().__init__(split, source, SEED, self.cache.reader)
        per_epoch = num_batches(case.num_samples, case.batch_size)
        timeline = Timeline(case.num_samples, case.batch_size, per_epoch, case.num_steps, decision_every=1)
        order = SampleOrder(case.num_samples, SEED, case.batch_size)
        terms = CacheTerms(folder)
        self.cache_session = CacheSession(self.cache, self, (), runtime, Reporter(), timeline, order, terms)

    def close(self) -> None:
        self.cache_session.release()
        self.cache.close()


def build(
    case: Case, folder: str, own_rates: bool = False, offload_folder: Path | None = None
) -> tuple[ElasticRuntime, CachedLoader, ProcessGroups]:
    spec, precision = OPTIMIZERS[case.optimizer], PRECISIONS[case.precision]
    device = torch.device(case.device, dist.get_rank() if case.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    context = RankContext.create(device, precision, 60, case.randomness, case.compiles, offload_folder)
    runtime = ElasticRuntime(case.stack(), case.task, spec, context, own_rates=own_rates, parks=case.parks)
    if precision.scales_loss:
        runtime.loss_scale.value = case.loss_scale
    loader = CachedLoader(case, runtime, Path(folder))
    return runtime, loader, context.groups


def train_elastic(case: Case, plans: Plans, cache_folder: str | None = None) -> Trace:
    """Every rank calls it. Goes to ``plans[step]`` before that step; a plan with a cache level fills the cache."""
    with KERNELS[case.kernels]():
        return _elastic(case, plans, cache_folder)


def _elastic(case: Case, plans: Plans, cache_folder: str | None) -> Trace:
    runtime, loader, groups = build(case, cache_folder or tempfile.gettempdir())
    trace = Trace()
    for step in range(case.num_steps):
        if step in plans:
            go(runtime, loader, plans[step], step)
        result = runtime.train_step(loader, ids_of(case, step), step, rate(step))
        trace.losses.append(result.loss)
        trace.norms.append(result.total_norm)
        trace.ties_hold &= copies_are_equal(runtime)
    loader.cache_session.release()
    trace.moments = moments(runtime)
    trace.weights = runtime.weights() or {}
    loader.close()
    groups.close()
    return trace


def train_all_elastic(case: Case, plans: list[Plan], cache_folder: str) -> list[Trace]:
    """One training for each plan, from the start."""
    return [train_elastic(case, then(plan), cache_folder) for plan in plans]


def then(plan: Plan) -> Plans:
    """A step of plain data parallelism, then a plan: so that there is optimizer state to move and a model to cache."""
    whole = Plan(0, 0, ((0, plan.num_layers - 1),), plan.num_devices, num_microbatches=1)
    return {0: whole, 1: plan}


def go(runtime: ElasticRuntime, loader: CachedLoader, plan: Plan, step: int = 0) -> TransitionReport:
    assert loader.cache_session.advance_to(plan.cache_level, step)
    report = runtime.apply_plan(plan)
    loader.cache_session.start_reading(plan.cache_level)
    return report


def copies_are_equal(runtime: ElasticRuntime) -> bool:
    """Compares all copies of each shared weight on all ranks bit for bit; every rank calls it."""
    stack, held = runtime.resident.stack, runtime.resident.held()
    equal = True
    for tie in stack.ties:
        copies = [gather(stack[layer].by_name()[name].detach()) for layer, name in tie if layer in held]
        gathered: list[list[bytes]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(gathered, [copy.cpu().view(torch.uint8).numpy().tobytes() for copy in copies])
        first, *others = (numbers for part in gathered for numbers in part)
        equal &= bool(others) and all(first == other for other in others)
    return equal


def moments(runtime: ElasticRuntime) -> dict[str, Tensor]:
    """On rank 0 the optimizer state of all ranks by original parameter name and key; whole, and equal on replicas.

    What is parked counts.
    """
    if runtime.resident.cuts.any:
        gathered_parts = runtime.gather_optimizer_state()
        return {f"{name}/{key}": t.double() for name, own in gathered_parts.items() for key, t in own.items()}
    known = {**(runtime.optimizer.state if runtime.optimizer else {}), **runtime.resident.parked()}
    own: dict[str, np.ndarray] = {}
    for index in runtime.resident.held():
        layer = runtime.resident.stack[index]
        for name, parameter in layer.module.named_parameters():
            state = known.get(parameter, {})
            whole = {key: gather(like(parameter, torch.as_tensor(value))) for key, value in state.items()}
            own |= {f"{layer.prefix}{name}/{key}": value.double().cpu().numpy() for key, value in whole.items()}
    gathered: list[dict[str, np.ndarray]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(own, gathered)
    merged: dict[str, np.ndarray] = {}
    for part in gathered or ():
        for name, array in part.items():
            np.testing.assert_array_equal(merged.setdefault(name, array), array, name)
    return {name: torch.from_numpy(array) for name, array in merged.items()}


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """Shards optimizer state of this rank's shard of a parameter as the parameter is."""
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor) or not value.ndim:
        return value
    placed = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, *placed, shape=parameter.shape, stride=parameter.stride())


def train_reference(case: Case, frozen: dict[int, int], num_microbatches: int = 1) -> Trace:
    """One process, no part of the runtime: the original model, whole batches, ``frozen[step]`` blocks from a step on.

    The optimizer makes no step with frozen weights. It keeps their state where the case parks it, and else forgets it.

    With dropout the layers of the stack run one by one, because the original model does not draw by sample; in mixed
    precision too, because each is to give numbers of the type of the weights.
    """
    return _reference(
        replace(case, cache_shares=Case.cache_shares, device=Case.device), tuple(frozen.items()), num_microbatches
    )


class Watch(Protocol):
    """Looks at a training in one process."""

    def begin(self, stack: LayerStack, owners: dict[nn.Parameter, int]) -> None:
        """Takes the model before the first step, and the layer that each weight belongs to."""

    def before_step(self, step: int, num_frozen: int) -> None:
        """Is called before a step, and before blocks freeze there."""

    def before_update(self) -> None:
        """Is called when the gradient is whole, before clipping."""

    def after_update(self) -> None:
        """Is called when the weights have changed."""


def watch_reference(case: Case, frozen: dict[int, int], watch: Watch) -> Trace:
    """The same, with somebody who looks at it."""
    assert case.dropout, "the layers of the stack run, and not the original model"
    return _plain(case, frozen, 1, watch)


@cache
def _reference(case: Case, frozen_from: tuple[tuple[int, int], ...], num_microbatches: int) -> Trace:
    """Trained once: many tests compare with the same one."""
    with KERNELS[case.kernels]():
        return _plain(case, dict(frozen_from), num_microbatches)


def _plain(case: Case, frozen: dict[int, int], num_microbatches: int, watch: Watch | None = None) -> Trace:
    stack, spec, precision = case.stack(), OPTIMIZERS[case.optimizer], PRECISIONS[case.precision]
    by_layer = [list(stack[index].by_name()) for index in range(len(stack))]
    if case.dropout or precision.compute_dtype:
        _tie(stack)
        parameters = {name: p for index in range(len(stack)) for name, p in stack[index].by_name().items()}
        forward = _by_layers(stack, precision)
    else:
        original = case.original()
        parameters = {name_in_stack(n): p for n, p in original.named_parameters(remove_duplicate=False)}
        forward = _by_original(original, case)
    lowest: dict[nn.Parameter, int] = {}  # a weight freezes with the lowest layer that has it
    for layer, names in enumerate(by_layer):
        for name in names:
            lowest.setdefault(parameters[name], layer)
    for ref in stack.fixed:
        lowest.pop(parameters[ref.name])
    used = list(lowest)
    for name in parameters:
        parameters[name].requires_grad_(parameters[name] in lowest)
    optimizer = spec.build_layers({layer: [p for p in used if lowest[p] == layer] for layer in range(len(stack))})
    assert optimizer is not None
    scale = case.loss_scale if precision.scales_loss else 1.0
    trace, num_frozen, split = Trace(), 0, case.split()
    if watch is not None:
        watch.begin(stack, lowest)
    for step in range(case.num_steps):
        if watch is not None:
            watch.before_step(step, num_frozen)
        if step in frozen:
            num_frozen = frozen[step]
            for parameter, layer in lowest.items():
                is_frozen = bool(num_frozen) and layer <= num_frozen
                parameter.requires_grad_(not is_frozen)
                if is_frozen:
                    parameter.grad = None
                    if not case.parks:
                        optimizer.state.pop(parameter, None)
        ids = ids_of(case, step)
        for group in optimizer.param_groups:
            below_head = len(stack) - 1 - min(lowest[p] for p in group["params"])
            group["lr"] = rate(step) * spec.layer_decay**below_head
        optimizer.zero_grad()
        trace.losses.append(0.0)
        inputs, context, targets = _read(split, ids, precision.param_dtype)
        keys, divisor = sample_keys(SEED, step, ids), _divisor(split, ids)
        if split.mixing is not None:
            inputs, targets = mixed_by_timm(split.mixing, step, inputs, targets)
        for rows in torch.arange(len(ids)).chunk(num_microbatches):
            output = forward(inputs[rows], {name: t[rows] for name, t in context.items()}, keys[rows], num_frozen)
            loss = case.task.loss(output, targets[rows]).sum() / divisor
            (scale * loss).backward()
            trace.losses[-1] += loss.item()
        active = [p for p in used if p.requires_grad]
        for parameter in active:
            assert parameter.grad is not None
            parameter.grad /= scale
        if watch is not None:
            watch.before_update()
        trace.norms.append(nn.utils.clip_grad_norm_(active, CLIP_NORM).item())
        optimizer.step()
        if watch is not None:
            watch.after_update()
    trace.weights = {name: parameters[name].detach() for names in by_layer for name in names}
    trace.moments = {
        f"{n}/{k}": torch.as_tensor(v).double()
        for names in by_layer
        for n in names
        for k, v in optimizer.state.get(parameters[n], {}).items()
    }
    return trace


def mixed_by_timm(mixing: Mixing, step: int, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mixes a global batch by timm's own code in the state of its generator in which a run draws; float64."""
    options = mixing.mixup, mixing.cutmix, None, mixing.prob, mixing.switch_prob, mixing.mode
    mix = Mixup(*options, label_smoothing=0.0, num_classes=mixing.num_outputs)
    torch.set_default_dtype(torch.float64)  # in which timm makes the targets
    try:
        with kept_generators():
            seed_generators(SEED, step, MIXING)
            return mix(inputs, targets)
    finally:
        torch.set_default_dtype(torch.float32)


def _tie(stack: LayerStack) -> None:
    """Makes copies one weight again."""
    for lowest, *copies in stack.ties:
        for layer, name in copies:
            path, _, leaf = name.removeprefix(stack[layer].prefix).rpartition(".")
            setattr(stack[layer].module.get_submodule(path), leaf, stack[lowest.layer].by_name()[lowest.name])


Forward = Callable[..., Tensor]


def _divisor(split: Split, ids: np.ndarray) -> float:
    """Samples of the batch, or of all their tokens those that count; where none does, the loss is zero."""
    return len(ids) if split.loss_weights is None else split.loss_weights[ids].sum() or 1.0


def _read(split: Split, ids: np.ndarray, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    lengths = split.lengths
    padded = None if lengths is None else min(-(-int(lengths[ids].max()) // 8) * 8, int(lengths.max()))
    inputs = split.inputs(ids.tolist(), padded)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    return inputs, split.context(ids.tolist(), padded), split.targets(ids.tolist(), padded)


def _by_original(model: nn.Module, case: Case) -> Forward:
    def forward(inputs: Tensor, context: dict[str, Tensor], keys: Tensor, num_frozen: int) -> Tensor:
        if case.reads_images:
            output = model(inputs)
            return output if isinstance(output, Tensor) else output.logits
        output = model(inputs, **context)
        if case.task.head.kind == "span":
            return torch.stack([output.start_logits, output.end_logits], dim=-1)
        return output.logits

    return forward


def _by_layers(stack: LayerStack, precision: Precision) -> Forward:
    def forward(x: Tensor, context: dict[str, Tensor], keys: Tensor, num_frozen: int) -> Tensor:
        for index in range(len(stack)):
            layer = stack[index].train(not (num_frozen and index <= num_frozen))
            products = precision.compute_dtype
            with torch.autocast("cpu", products) if products else nullcontext(), PerSampleRng(keys, index):
                x = layer(x, **context)
            x = x.to(precision.param_dtype)
        return x

    return forward
