"""The signals of a training twice: by the collectors under given plans, and by their formulas in one process."""

import math
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from pipetransformer.models.stack import LayerStack
from pipetransformer.runtime.elastic import ElasticRuntime
from pipetransformer.runtime.resident import REFERENCE, ResidentLayers
from pipetransformer.runtime.signals import collect, gradients, probe, updates
from pipetransformer.runtime.signals.base import SignalContext
from pipetransformer.runtime.signals.collect import COLLECTORS, SignalCollectors
from support.cases import NUM_BLOCKS, Case
from support.trainings import Plans, build, go, ids_of, rate

MEASURED = [name for name in COLLECTORS if name != "step_share"]
READ_AT = (2, 4, 6)
EVERY = 2
"""Steps from one measured update to the next here: of the two between decisions only the first."""
NUM_PROBED = 8

Found = list[dict[str, tuple[float, ...]]]


def step_shares() -> tuple[float, ...]:
    return (1.0,) * (NUM_BLOCKS + 1)


def measure(
    case: Case, plans: Plans, folder: str | None = None, names: tuple[str, ...] = (), mutation: str | None = None
) -> tuple[Found, list[float]]:
    """Every rank calls it. Returns the signals before each step of READ_AT, and the losses."""
    with (
        mock.patch.object(collect, "EVERY", EVERY),
        mock.patch.object(probe, "NUM_SAMPLES", NUM_PROBED),
        nullcontext() if mutation is None else MUTATIONS[mutation](),
    ):
        return _measure(case, plans, folder, names or tuple(MEASURED))


def _measure(case: Case, plans: Plans, folder: str | None, names: tuple[str, ...]) -> tuple[Found, list[float]]:
    runtime, loader, groups = build(case, folder or tempfile.gettempdir())
    signals = SignalCollectors(names, SignalContext(runtime, loader.source, step_shares))
    runtime.observer = signals.observer
    found, losses, num_updates = Found(), [], 0
    for step in range(case.num_steps):
        if step in READ_AT:
            saved = dist.get_rank() == 0 and signals.state_dict()
            values = [saved]
            dist.broadcast_object_list(values)  # as a checkpoint does, whose state is that of rank 0
            signals.load_state_dict(values[0])
            first = signals.read()
            found.append(signals.read())
            assert found[-1] == first, "a run that is stopped before its decision measures again"
            signals.start_anew()
            num_updates = 0
        if step in plans:
            go(runtime, loader, plans[step], step)
        signals.set_due(num_updates)
        result = runtime.train_step(loader, ids_of(case, step), step, rate(step))
        signals.add_step(result)
        losses.append(result.loss)
        num_updates += 1
    loader.cache_session.release()
    loader.close()
    groups.close()
    return found, losses


class SignalReference:
    """The signals by their formulas, with no part of the runtime; see :class:`support.trainings.Watch`."""

    def __init__(self, case: Case) -> None:
        self.found = Found()
        self._split = case.split()
        self._before: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}
        self._steps: list[tuple[list[float], list[float], list[float]]] = []  # norm, relative update, loss drop
        self._last_norms: list[float] | None = None
        self._changes: list[tuple[list[float], list[float]]] = []
        self._references: dict[nn.Parameter, Tensor] = {}
        self._grams: list[Tensor] = []
        self._similarities: list[Tensor] = []

    def begin(self, stack: LayerStack, owners: dict[nn.Parameter, int]) -> None:
        self._stack, self._owners = stack, owners

    def _of_block(self, block: int) -> list[nn.Parameter]:
        return [p for p, layer in self._owners.items() if layer == block + 1 and p.requires_grad]

    def before_update(self) -> None:
        self._references = {p: each for p, each in self._references.items() if p.requires_grad}
        for parameter in self._owners:
            if parameter.requires_grad:
                assert parameter.grad is not None
                self._before[parameter] = parameter.detach().clone(), parameter.grad.clone()

    def after_update(self) -> None:
        norms, relative, drops = [], [], []
        for block in range(NUM_BLOCKS):
            own = self._of_block(block)
            norms.append(math.sqrt(sum(self._before[p][1].square().sum().item() for p in own)))
            moved = sum((p.detach() - self._before[p][0]).square().sum().item() for p in own)
            size = sum(self._before[p][0].square().sum().item() for p in own)
            relative.append(math.sqrt(moved / size) if size else 0.0)
            drops.append(-sum(((p.detach() - self._before[p][0]) * self._before[p][1]).sum().item() for p in own))
        self._steps.append((norms, relative, drops))
        if self._last_norms is not None:
            both = [(a, b) if a and b else (0.0, 0.0) for a, b in zip(norms, self._last_norms, strict=True)]
            self._changes.append(([abs(a - b) for a, b in both], [a for a, _ in both]))
        self._last_norms = norms

    def before_step(self, step: int, num_frozen: int) -> None:
        if step not in READ_AT:
            return
        norms, relative, drops = (np.array(each) for each in zip(*self._steps, strict=True))
        changes, sizes = (np.array(each).sum(0) for each in zip(*self._changes, strict=True))
        values = {
            "gradient_norm": norms.mean(0),
            "gradient_change": np.divide(changes, sizes, out=np.zeros(NUM_BLOCKS), where=sizes > 0),
            "relative_update": relative[::EVERY].mean(0),
            "loss_drop": drops[::EVERY].mean(0),
            "weight_change": self._weight_change(num_frozen),
            **self._probed(num_frozen),
        }
        self.found.append({name: tuple(map(float, each)) for name, each in values.items()})
        self._steps, self._changes = [], []

    def _weight_change(self, num_frozen: int) -> list[float]:
        changes = []
        for block in range(NUM_BLOCKS):
            own = self._of_block(block)
            if block < num_frozen:
                changes.append(0.0)
            elif any(p not in self._references for p in own):
                changes.append(math.inf)
            else:
                moved = sum((p.detach() - self._references[p]).square().sum().item() for p in own)
                changes.append(math.sqrt(moved / sum(self._references[p].square().sum().item() for p in own)))
        self._references = {p: p.detach().clone() for p in self._owners if p.requires_grad}
        return changes

    @torch.no_grad()
    def _probed(self, num_frozen: int) -> dict[str, list[float]]:
        """Runs the probe batch sample by sample, each without padding, and compares all pairs one by one."""
        lengths = self._split.lengths
        ids = np.linspace(0, len(self._split) - 1, NUM_PROBED).round().astype(int)
        self._stack.eval()
        outputs = []  # of each sample each block's output
        for i in ids.tolist():
            num_tokens = None if lengths is None else int(lengths[i])
            x, context = self._split.inputs([i], num_tokens), self._split.context([i], num_tokens)
            x = x.double() if x.is_floating_point() else x
            layers = []
            for layer in range(NUM_BLOCKS + 1):
                x = self._stack[layer](x, **context)
                layers.append(x[0])
            outputs.append(layers[1:])
        self._stack.train()
        grams = [_pairs([sample[block] for sample in outputs]) for block in range(NUM_BLOCKS)]
        similarities = [gram / gram.norm(dim=1, keepdim=True) for gram in grams]
        change = [1 - _cka(a, b) for a, b in zip(grams, self._grams, strict=False)] or [math.inf] * NUM_BLOCKS
        plasticity = [
            ((a - b).square().sum() / NUM_PROBED**2).item()
            for a, b in zip(similarities, self._similarities, strict=False)
        ] or [math.inf] * NUM_BLOCKS
        self._grams = grams
        self._similarities = [
            (a + b) / 2 for a, b in zip(similarities, self._similarities, strict=False)
        ] or similarities
        active = [block >= num_frozen for block in range(NUM_BLOCKS)]
        return {
            name: [value if trains else 0.0 for value, trains in zip(values, active, strict=True)]
            for name, values in (("feature_change", change), ("plasticity", plasticity))
        }


def _pairs(samples: list[Tensor]) -> Tensor:
    """The products of all pairs; of texts of different lengths, of the tokens that both have."""
    return torch.tensor([[_product(a, b) for b in samples] for a in samples], dtype=torch.float64)


def _product(one: Tensor, other: Tensor) -> float:
    common = min(len(one), len(other))
    return float((one[:common] * other[:common]).sum())


def _cka(one: Tensor, other: Tensor) -> float:
    centring = torch.eye(len(one), dtype=torch.float64) - 1 / len(one)
    one, other = centring @ one @ centring, centring @ other @ centring
    return float(torch.trace(one @ other) / math.sqrt(torch.trace(one @ one) * torch.trace(other @ other)))


def _own_sums(self: ElasticRuntime, values: Tensor) -> Tensor:
    return values


_around, _stash = updates.UpdateMeter.around, ResidentLayers.stash_optimizer_state


def _with_clipping(self: updates.UpdateMeter, runtime: ElasticRuntime, factor: float, update: Any) -> None:
    _around(self, runtime, 1.0, update)


def _stash_without_references(self: ResidentLayers, optimizer: Optimizer | None, first_active: int) -> None:
    for state in optimizer.state.values() if optimizer else ():
        state.pop(REFERENCE, None)
    _stash(self, optimizer, first_active)


def _no_mask(x: Tensor, mask: Tensor) -> Tensor:
    return x.double().flatten(1) @ x.double().flatten(1).T


MUTATIONS: dict[str, Callable[[], Any]] = {
    "sums are those of the part that a rank has": lambda: mock.patch.object(
        ElasticRuntime, "sum_over_parts", _own_sums
    ),
    "the gradient is that after clipping": lambda: mock.patch.object(updates.UpdateMeter, "around", _with_clipping),
    "every update counts": lambda: mock.patch.object(collect, "EVERY", 1),
    "padding counts": lambda: mock.patch.object(probe, "gram", _no_mask),
    "the reference does not move": lambda: mock.patch.object(probe, "REFERENCE_DECAY", 1.0),
    "the last norm is forgotten": lambda: mock.patch.object(
        gradients.GradientChange, "load_state_dict", _forget_last(gradients.GradientChange.load_state_dict)
    ),
    "references stay behind": lambda: mock.patch.object(
        ResidentLayers, "stash_optimizer_state", _stash_without_references
    ),
    "outputs are not centred": lambda: mock.patch.object(probe, "_centred", lambda matrix: matrix),
}


def _forget_last(load: Callable[..., None]) -> Callable[..., None]:
    return lambda self, state: load(self, state | {"last": None})
