"""Weights that a run ends with: those of its last step, or those of its best evaluation, from a checkpoint."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from pipetransformer.checkpoint.folder import newest_whole, open_checkpoints
from pipetransformer.checkpoint.source import CheckpointLayers
from pipetransformer.errors import DamagedCheckpoint
from pipetransformer.runtime.groups import broadcast_from_rank0

if TYPE_CHECKING:
    from pipetransformer.training.trainer import Trainer


def weights_to_save(trainer: Trainer) -> tuple[dict[str, Tensor] | None, int]:
    """Returns on rank 0 the weights that ``evaluate.save`` asks for, and their step. Collective."""
    now, best = trainer.state.step, trainer.main_metric.best_step
    if trainer.config.evaluate.save == "best" and best is not None and best != now:
        trainer.checkpoints.wait()
        state = _read_weights(trainer, best) if dist.get_rank() == 0 else None
        if broadcast_from_rank0(state is not None):
            return state, best
    return trainer.runtime.weights(), now


def _read_weights(trainer: Trainer, step: int) -> dict[str, Tensor] | None:
    """Reads the weights of a checkpoint by their original names; ``None`` with a warning where it is lost."""
    stack = trainer.components.stack
    opened = open_checkpoints(trainer.checkpoints.folder.path)
    # files are compared with their digests as they are read
    found, problems = newest_whole(opened, step, lambda *_: None)
    try:
        if found is not None:
            layers = CheckpointLayers(*found, stack)
            weights = dict(chain.from_iterable(map(layers.averages, range(len(stack)))))
            weights |= {copy.name: weights[lowest.name] for lowest, *copies in stack.ties for copy in copies}
            for layer in (stack[index] for index in range(len(stack))):
                weights |= {name: weights[first] for name, first in layer.alias_names().items()}
            return {name: weights[name] for index in range(len(stack)) for name in stack[index].original_state()}
    except DamagedCheckpoint as error:
        problems.append(str(error))
    why = "; ".join(problems) or "it is not there"
    message = f"the best checkpoint, of step {step:,}, cannot be read ({why}); the last weights are saved"
    trainer.report.write("warning", message=message)
    return None
