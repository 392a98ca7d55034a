"""Elastic fine-tuning of Transformers: freeze, pack, replicate, cache.

The public names are imported when they are used: importing the package imports neither torch nor Hydra.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipetransformer.autopipe.cluster import Cluster as Cluster
    from pipetransformer.autopipe.cluster import Link as Link
    from pipetransformer.autopipe.constraints import PlanConstraints as PlanConstraints
    from pipetransformer.autopipe.plan import Plan as Plan
    from pipetransformer.autopipe.profile import AffineTime as AffineTime
    from pipetransformer.autopipe.profile import LayerProfile as LayerProfile
    from pipetransformer.autopipe.profile import Profile as Profile
    from pipetransformer.autopipe.search.search import best_plan as best_plan
    from pipetransformer.config.schema import Config as Config
    from pipetransformer.config.sections import Cache as Cache
    from pipetransformer.config.sections import Checkpointing as Checkpointing
    from pipetransformer.config.sections import Evaluation as Evaluation
    from pipetransformer.config.sections import Guard as Guard
    from pipetransformer.config.sections import Launch as Launch
    from pipetransformer.config.sections import Loading as Loading
    from pipetransformer.config.sections import Parallel as Parallel
    from pipetransformer.config.sections import Profiling as Profiling
    from pipetransformer.config.sections import Resume as Resume
    from pipetransformer.data.images.datasets import Digits as Digits
    from pipetransformer.data.images.datasets import HubImages as HubImages
    from pipetransformer.data.images.datasets import IdxImages as IdxImages
    from pipetransformer.data.images.table import TableImages as TableImages
    from pipetransformer.data.text.causal_lm import CausalLM as CausalLM
    from pipetransformer.data.text.glue import Glue as Glue
    from pipetransformer.data.text.squad import Squad as Squad
    from pipetransformer.data.text.table import TextDataset as TextDataset
    from pipetransformer.data.text.token_classification import TokenClassification as TokenClassification
    from pipetransformer.errors import UserError as UserError
    from pipetransformer.freeze.alpha import AlphaCap as AlphaCap
    from pipetransformer.freeze.autofreeze import AutoFreeze as AutoFreeze
    from pipetransformer.freeze.base import FreezePolicy as FreezePolicy
    from pipetransformer.freeze.budget import BudgetRule as BudgetRule
    from pipetransformer.freeze.cka import CkaRule as CkaRule
    from pipetransformer.freeze.egeria import Egeria as Egeria
    from pipetransformer.freeze.freezeout import FreezeOut as FreezeOut
    from pipetransformer.freeze.linear import LinearSchedule as LinearSchedule
    from pipetransformer.freeze.none import NoFreezing as NoFreezing
    from pipetransformer.freeze.pipetransformer import PaperRule as PaperRule
    from pipetransformer.freeze.prefix import Prefix as Prefix
    from pipetransformer.freeze.random import RandomSchedule as RandomSchedule
    from pipetransformer.freeze.schedule import FixedSchedule as FixedSchedule
    from pipetransformer.freeze.threshold import ThresholdRule as ThresholdRule
    from pipetransformer.launch.start import train as train
    from pipetransformer.models.adapters import Lora as Lora
    from pipetransformer.models.huggingface import HuggingFaceModel as HuggingFaceModel
    from pipetransformer.models.huggingface_vision import HuggingFaceVisionModel as HuggingFaceVisionModel
    from pipetransformer.models.stack import LayerStack as LayerStack
    from pipetransformer.models.timm import TimmModel as TimmModel
    from pipetransformer.optim.base import SGD as SGD
    from pipetransformer.optim.base import AdamW as AdamW
    from pipetransformer.optim.base import Lamb as Lamb
    from pipetransformer.optim.named import TimmOptimizer as TimmOptimizer
    from pipetransformer.optim.named import TorchOptimizer as TorchOptimizer
    from pipetransformer.report.tensorboard import TensorBoardLogger as TensorBoardLogger
    from pipetransformer.report.tensorboard import WandbAndTensorBoard as WandbAndTensorBoard
    from pipetransformer.report.wandb import NoLogger as NoLogger
    from pipetransformer.report.wandb import WandbLogger as WandbLogger
    from pipetransformer.simulate.run import simulate as simulate
    from pipetransformer.training.elastic_trainer import ElasticTrainer as ElasticTrainer
    from pipetransformer.training.trainer import Callback as Callback

MODULES = {
    "ElasticTrainer": "pipetransformer.training.elastic_trainer",
    "Callback": "pipetransformer.training.trainer",
    "LayerStack": "pipetransformer.models.stack",
    "Plan": "pipetransformer.autopipe.plan",
    "Profile": "pipetransformer.autopipe.profile",
    "LayerProfile": "pipetransformer.autopipe.profile",
    "AffineTime": "pipetransformer.autopipe.profile",
    "Cluster": "pipetransformer.autopipe.cluster",
    "Link": "pipetransformer.autopipe.cluster",
    "PlanConstraints": "pipetransformer.autopipe.constraints",
    "best_plan": "pipetransformer.autopipe.search.search",
    "simulate": "pipetransformer.simulate.run",
    "FreezePolicy": "pipetransformer.freeze.base",
    "train": "pipetransformer.launch.start",
    "Cache": "pipetransformer.config.sections",
    "Checkpointing": "pipetransformer.config.sections",
    "Evaluation": "pipetransformer.config.sections",
    "Config": "pipetransformer.config.schema",
    "Guard": "pipetransformer.config.sections",
    "Loading": "pipetransformer.config.sections",
    "Launch": "pipetransformer.config.sections",
    "Profiling": "pipetransformer.config.sections",
    "Resume": "pipetransformer.config.sections",
    "Parallel": "pipetransformer.config.sections",
    "CausalLM": "pipetransformer.data.text.causal_lm",
    "Glue": "pipetransformer.data.text.glue",
    "Digits": "pipetransformer.data.images.datasets",
    "HubImages": "pipetransformer.data.images.datasets",
    "TableImages": "pipetransformer.data.images.table",
    "IdxImages": "pipetransformer.data.images.datasets",
    "Squad": "pipetransformer.data.text.squad",
    "TokenClassification": "pipetransformer.data.text.token_classification",
    "TextDataset": "pipetransformer.data.text.table",
    "UserError": "pipetransformer.errors",
    "NoFreezing": "pipetransformer.freeze.none",
    "PaperRule": "pipetransformer.freeze.pipetransformer",
    "Prefix": "pipetransformer.freeze.prefix",
    "FixedSchedule": "pipetransformer.freeze.schedule",
    "AlphaCap": "pipetransformer.freeze.alpha",
    "AutoFreeze": "pipetransformer.freeze.autofreeze",
    "BudgetRule": "pipetransformer.freeze.budget",
    "CkaRule": "pipetransformer.freeze.cka",
    "Egeria": "pipetransformer.freeze.egeria",
    "FreezeOut": "pipetransformer.freeze.freezeout",
    "LinearSchedule": "pipetransformer.freeze.linear",
    "RandomSchedule": "pipetransformer.freeze.random",
    "ThresholdRule": "pipetransformer.freeze.threshold",
    "Lora": "pipetransformer.models.adapters",
    "HuggingFaceModel": "pipetransformer.models.huggingface",
    "HuggingFaceVisionModel": "pipetransformer.models.huggingface_vision",
    "TimmModel": "pipetransformer.models.timm",
    "SGD": "pipetransformer.optim.base",
    "AdamW": "pipetransformer.optim.base",
    "Lamb": "pipetransformer.optim.base",
    "TensorBoardLogger": "pipetransformer.report.tensorboard",
    "WandbAndTensorBoard": "pipetransformer.report.tensorboard",
    "TimmOptimizer": "pipetransformer.optim.named",
    "TorchOptimizer": "pipetransformer.optim.named",
    "NoLogger": "pipetransformer.report.wandb",
    "WandbLogger": "pipetransformer.report.wandb",
}
"""The module of each public name."""

__all__ = sorted(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(MODULES[name]), name)
    return sys.modules.get(f"{__name__}.{name}", found)  # a package of that name, which is callable


def __dir__() -> list[str]:
    return sorted({*globals(), *MODULES})
