"""Gradients of a step: their mean over the replicas, tied weights, norms, and clipping.

The gradients of a pipeline are averaged after its last backward pass. DistributedDataParallel would do it within the
last pass of each stage, and the stage below would get its own gradient only after that::

    with DDP     device 1   B2 B3 [all-reduce]                       here    device 1   B2 B3 [all-reduce]
                 device 0      B2              B3 [all-reduce]               device 0      B2 B3 [all-reduce]
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from pipetransformer.autopipe.memory import BUCKET_BYTES
from pipetransformer.autopipe.plan import Plan
from pipetransformer.host_copies import Download, copy_stream
from pipetransformer.models.stack import LayerStack, Tie
from pipetransformer.runtime.fsdp import local_part
from pipetransformer.runtime.groups import ResolvedTopology
from pipetransformer.runtime.stage import ParametersByLayer


def all_reduce_gradients(parameters: Iterable[nn.Parameter], replicas: ProcessGroup) -> None:
    """Replaces each gradient by its mean over the replicas. All ranks of the group call it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, replicas.size())
        sum_gradients(gradients, replicas)


def sum_gradients(gradients: Sequence[Tensor], group: ProcessGroup) -> None:
    """Replaces each gradient by its sum over a group, equal bit for bit on its ranks, all of which call it.

    Gradients of :data:`BUCKET_BYTES` and more are all-reduced in place, smaller ones in buckets of up to that size.
    """
    in_place = [each for each in gradients if _is_reduced_in_place(each)]
    pending = [dist.all_reduce(each, group=group, async_op=True) for each in in_place]
    for bucket in _buckets(each for each in gradients if not _is_reduced_in_place(each)):
        _sum_bucket(bucket, group)
    for work in pending:
        assert work is not None
        work.wait()


def _sum_bucket(bucket: list[Tensor], group: ProcessGroup) -> None:
    flat = bucket[0].new_empty(sum(each.numel() for each in bucket))
    split = flat.split([each.numel() for each in bucket])
    parts = [part.view(each.shape) for part, each in zip(split, bucket, strict=True)]
    torch._foreach_copy_(parts, bucket)
    dist.all_reduce(flat, group=group)
    torch._foreach_copy_(bucket, parts)


def _is_reduced_in_place(gradient: Tensor) -> bool:
    return gradient.nbytes >= BUCKET_BYTES and gradient.is_contiguous()


def _buckets(gradients: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yields gradients in order, as many at a time as fit a bucket, and at least one."""
    bucket: list[Tensor] = []
    for gradient in gradients:
        if bucket and sum(each.nbytes for each in bucket) + gradient.nbytes > BUCKET_BYTES:
            yield bucket
            bucket = []
        bucket.append(gradient)
    if bucket:
        yield bucket


class TiedWeights:
    """The gradients of a rank's tied weights under a plan.

    Each copy gets the sum of the copies' gradients, after the mean over the replicas and before norms are computed.
    With the same gradient and the same optimizer state the copies stay equal bit for bit::

        replica 0    rank 0 [E 1 2]    rank 1 [3 4]    rank 2 [5 6 H]        E's gradient + H's, in the group of 0 and 2
        replica 1    rank 3 [E 1 2]    rank 4 [3 4]    rank 5 [5 6 H]                                        of 3 and 5

    Args:
        stack: The model with its ties.
        resolved: The topology, resolved with the layers of :func:`tied_layers`.
    """

    def __init__(self, stack: LayerStack, resolved: ResolvedTopology) -> None:
        own = resolved.topology.layers
        self._shared: list[tuple[list[nn.Parameter], ProcessGroup]] = []
        for tie in _active_ties(stack, resolved.plan):
            copies = [stack[layer].by_name()[name] for layer, name in tie if layer in own]
            if copies:
                self._shared.append((copies, resolved.holders(place.layer for place in tie)))

    def all_reduce(self) -> None:
        """Gives every copy the sum, equal bit for bit. All ranks of the pipeline call it."""
        for copies, group in self._shared:
            total, *others = map(gradient_or_zero, copies)
            for other in others:
                total += other
            if group.size() > 1:
                dist.all_reduce(total, group=group)
            for other in others:
                other.copy_(total)


def tied_layers(stack: LayerStack, plan: Plan) -> Iterator[list[int]]:
    """Yields for each tied weight that trains the layers that share it."""
    for tie in _active_ties(stack, plan):
        yield [place.layer for place in tie]


def _active_ties(stack: LayerStack, plan: Plan) -> list[Tie]:
    return [tie for tie in stack.ties if tie[0].layer >= plan.first_active_layer and tie[0] not in stack.fixed]


def gradient_or_zero(parameter: nn.Parameter) -> Tensor:
    """Returns the gradient of a copy; zero where the copy took no part."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def squared_gradient_norms(parameters: ParametersByLayer, num_layers: int, device: torch.device) -> Tensor:
    """Computes the squared norm of this rank's part of each layer's gradient.

    Returns:
        Shape (num_layers,), float64; zero for layers of which the rank has no gradient.
    """
    gradients = {
        layer: [local_part(p.grad) for p in parameters.get(layer, ()) if p.grad is not None]
        for layer in range(num_layers)
    }
    if not (flat := [*chain.from_iterable(gradients.values())]):
        return torch.zeros(num_layers, dtype=torch.float64, device=device)
    squared = torch.stack(torch._foreach_norm(flat)).double().square().to(device)
    lengths = numbers_on_device(tuple(map(len, gradients.values())), device)
    # in one order, so that replicas agree; the check of the lengths would make the host wait
    return torch.segment_reduce(squared, "sum", lengths=lengths, initial=0.0, unsafe=True)


@lru_cache(maxsize=16)
def numbers_on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns numbers (N,) on a device; copied once, because every step of a plan has the same ones."""
    return torch.tensor(numbers, device=device)


def all_reduce_squared_norms(squared_norms: Tensor, norm_group: ProcessGroup) -> Tensor:
    """Sums squared norms (num_layers,) over the ranks that have the whole gradient between them.

    Args:
        squared_norms: Those of this rank's part of the gradient.
        norm_group: The ranks over which they are summed, each with another part.
    """
    if norm_group.size() > 1:
        dist.all_reduce(squared_norms, group=norm_group)
    return squared_norms


def unscale_and_clip(
    parameters: ParametersByLayer, total_norm: Tensor | float, clip_norm: float | None, loss_scale: float
) -> Tensor:
    """Divides the gradients by the loss scale, and clips them where the total norm exceeds ``clip_norm``.

    A norm that lies on the device is not read by the host.

    Args:
        parameters: The active parameters of this rank.
        total_norm: The norm of the whole gradient without the scale, over all ranks.
        clip_norm: The largest norm allowed; ``None`` clips nothing.
        loss_scale: The factor of the loss in backward.

    Returns:
        The factor by which they were clipped, 1 where they were not, (), float64.
    """
    total = torch.as_tensor(total_norm, dtype=torch.float64)
    clipped = torch.ones_like(total) if clip_norm is None else (clip_norm / (total + 1e-6)).clamp(max=1)  # as torch's
    if clip_norm is not None or loss_scale != 1:
        gradients = [local_part(p.grad) for own in parameters.values() for p in own if p.grad is not None]
        if gradients:
            factor, own = clipped / loss_scale, gradients[0]
            # as a tensor, a number of the host would be copied, and the host would wait for the device
            torch._foreach_mul_(gradients, factor.to(own) if factor.device == own.device else factor.item())
    return clipped


class AsyncSum:
    """Sums over all ranks of the world that run while this rank goes on.

    From a GPU they are on their way to the host as soon as they are there, beside the kernels of later steps: to read
    them waits for nothing else.

    Args:
        values: This rank's value of each sum, (N,).
        is_summed: They are the sums.
    """

    def __init__(self, values: Tensor, is_summed: bool = False) -> None:
        self._total = values.detach()
        is_summed |= dist.get_world_size() == 1
        self._work = None if is_summed else dist.all_reduce(self._total, async_op=True)
        self._download = self._start_download() if self._total.is_cuda else None

    def _start_download(self) -> Download:
        stream = copy_stream(self._total.device, "down")
        stream.wait_stream(torch.cuda.current_stream(self._total.device))
        with torch.cuda.stream(stream):
            if self._work is not None:
                self._work.wait()  # the stream waits, and not the host
            self._total.record_stream(stream)
            return Download(self._total)

    def values(self) -> list[float]:
        """Waits for the sums; equal on every rank."""
        if self._download is not None:
            return self._download.values()
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self._total.tolist()
