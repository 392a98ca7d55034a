"""The loops that people write themselves: plain, with DistributedDataParallel, with FSDP2, with accelerate."""

from __future__ import annotations

import gc

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from experiments.peers.problem import Problem, Watch


def plain(problem: Problem, watch: Watch) -> None:
    """Trains in one process: what all others have to agree with."""
    assert dist.get_world_size() == 1
    _train(problem, watch, problem.model)


def data_parallel(problem: Problem, watch: Watch) -> None:
    """Trains with DistributedDataParallel, which is built anew at each freeze: it waits for the gradients it knew."""
    optimizer, scheduler = problem.optimizer()
    model = DistributedDataParallel(problem.model, gradient_as_bucket_view=True)
    for step, batch in enumerate(problem.loader()):
        if watch.before_step(step):
            del model
            gc.collect()  # it sits in reference cycles, and its hooks would go on
            model = DistributedDataParallel(problem.model, gradient_as_bucket_view=True)
        _update(problem, model(**batch)["loss"], optimizer, scheduler)
        watch.after_step(step)


def sharded(problem: Problem, watch: Watch) -> None:
    """Trains with FSDP2: each layer is a group, and what freezes keeps its shards."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*problem.model.stack.layers, problem.model):
        # asked for a mean, gloo gives the sum in some versions of torch, without an error (its issue 162338)
        fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
    _train(problem, watch, problem.model)


def _train(problem: Problem, watch: Watch, model: Module) -> None:
    optimizer, scheduler = problem.optimizer()
    for step, batch in enumerate(problem.loader()):
        watch.before_step(step)
        _update(problem, model(**batch)["loss"], optimizer, scheduler)
        watch.after_step(step)


def _update(problem: Problem, loss: Tensor, optimizer: Optimizer, scheduler: LambdaLR) -> None:
    loss.backward()
    clip_grad_norm_(problem.model.parameters(), problem.clip_norm)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


def accelerated(problem: Problem, watch: Watch) -> None:
    """Trains with Hugging Face's accelerate, whose model is prepared anew at each freeze."""
    from accelerate import Accelerator

    # by default a prepared scheduler steps once for each rank, as if the batch were cut among them
    accelerator = Accelerator(cpu=True, step_scheduler_with_optimizer=False)
    model, optimizer, scheduler = accelerator.prepare(problem.model, *problem.optimizer())
    for step, batch in enumerate(problem.loader()):
        if watch.before_step(step):
            del model
            accelerator.free_memory()
            model = accelerator.prepare(problem.model)
        accelerator.backward(model(**batch)["loss"])
        accelerator.clip_grad_norm_(problem.model.parameters(), problem.clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        watch.after_step(step)
