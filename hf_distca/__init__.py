"""hf_distca: core attention disaggregation for Hugging Face.

Importing it makes `attn_implementation="distca"` known to transformers.
"""

from hf_distca.collator.packing import DistCACollator
from hf_distca.collator.sampler import GlobalBatchSampler
from hf_distca.config import DistCAConfig
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.model import plan_settings
from hf_distca.patches.register import register
from hf_distca.planner.micro_batch import PlanSettings
from hf_distca.trainer.arguments import DistCATrainingArguments
from hf_distca.trainer.trainer import DistCATrainer

__all__ = [
    "Dispatcher",
    "DistCACollator",
    "DistCAConfig",
    "DistCATrainer",
    "DistCATrainingArguments",
    "GlobalBatchSampler",
    "PlanSettings",
    "plan_settings",
]

register()
