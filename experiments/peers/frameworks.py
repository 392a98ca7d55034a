"""The loops that a framework runs: Hugging Face's Trainer and Lightning's, each with freezing as a callback.

Neither lets a callback build DistributedDataParallel anew, so that with freezing both look for unused parameters in
each step, and go on all-reducing zeros for what is frozen.
"""

from __future__ import annotations

import logging
import tempfile
from typing import Any

import torch.distributed as dist
from torch import Tensor

from experiments.peers.problem import Batch, Problem, Watch


def hugging_face(problem: Problem, watch: Watch) -> None:
    """Trains with the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Between(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.before_step(state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.after_step(state.global_step - 1)  # it has counted the step

    class OwnBatches(Trainer):
        def get_train_dataloader(self) -> Any:
            return problem.loader()

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            ddp_find_unused_parameters=bool(watch.freezes),
            max_steps=problem.num_steps,
            per_device_train_batch_size=problem.config.batch_size // dist.get_world_size(),
            max_grad_norm=problem.clip_norm,
            # the default multiplies the loss by the ranks where a model takes the number of items, as this one could
            average_tokens_across_devices=False,
            seed=problem.config.seed,
            remove_unused_columns=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = OwnBatches(problem.model, arguments, callbacks=[Between()], optimizers=problem.optimizer())
        trainer.train()


def lightning(problem: Problem, watch: Watch) -> None:
    """Trains with the Trainer of Lightning."""
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.strategies import DDPStrategy

    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # its import asks for more

    class Training(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.model

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = problem.optimizer()
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
            watch.before_step(batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Batch, batch_idx: int) -> None:
            watch.after_step(batch_idx)

    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu",
            devices=dist.get_world_size(),
            strategy=DDPStrategy(process_group_backend="gloo", find_unused_parameters=bool(watch.freezes)),
            max_epochs=1,  # the loader's one pass is the whole run
            gradient_clip_val=problem.clip_norm,
            use_distributed_sampler=False,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Training(), problem.loader())
