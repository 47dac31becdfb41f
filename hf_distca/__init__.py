"""hf_distca: core attention disaggregation for Hugging Face.

Importing hf_distca registers `attn_implementation="distca"` with transformers, once transformers is
imported.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_distca.patches.when_imported import when_imported
from hf_distca.version import __version__ as __version__

if TYPE_CHECKING:
    from hf_distca.checks.refusal import RefusedError as RefusedError
    from hf_distca.cli.script import record as record
    from hf_distca.collator.collation import DistCACollator as DistCACollator
    from hf_distca.collator.padding_free import CollatorWithLengths as CollatorWithLengths
    from hf_distca.collator.sampler import GlobalBatchSampler as GlobalBatchSampler
    from hf_distca.collator.sources import load_documents as load_documents
    from hf_distca.config import DistCAConfig as DistCAConfig
    from hf_distca.dispatch.dispatcher import Dispatcher as Dispatcher
    from hf_distca.models.describe import describe_run as describe_run
    from hf_distca.patches.layers import plan_layers as plan_layers
    from hf_distca.planner.settings import PlanSettings as PlanSettings
    from hf_distca.run import RunSpec as RunSpec
    from hf_distca.trainer.arguments import DistCAArguments as DistCAArguments
    from hf_distca.trainer.arguments import DistCAPaddedArguments as DistCAPaddedArguments
    from hf_distca.trainer.arguments import DistCATrainingArguments as DistCATrainingArguments
    from hf_distca.trainer.assembly import make_dispatcher as make_dispatcher
    from hf_distca.trainer.assembly import pack_padded as pack_padded
    from hf_distca.trainer.padded import DistCAPaddedMixin as DistCAPaddedMixin
    from hf_distca.trainer.trainer import DistCAMixin as DistCAMixin
    from hf_distca.trainer.trainer import DistCATrainer as DistCATrainer
    from hf_distca.trainer.trl.async_grpo import DistCAAsyncGRPOConfig as DistCAAsyncGRPOConfig
    from hf_distca.trainer.trl.async_grpo import DistCAAsyncGRPOTrainer as DistCAAsyncGRPOTrainer
    from hf_distca.trainer.trl.distillation import (
        DistCADistillationConfig as DistCADistillationConfig,
    )
    from hf_distca.trainer.trl.distillation import (
        DistCADistillationTrainer as DistCADistillationTrainer,
    )
    from hf_distca.trainer.trl.gkd import DistCAGKDConfig as DistCAGKDConfig
    from hf_distca.trainer.trl.gkd import DistCAGKDTrainer as DistCAGKDTrainer
    from hf_distca.trainer.trl.preference import DistCADPOConfig as DistCADPOConfig
    from hf_distca.trainer.trl.preference import DistCADPOTrainer as DistCADPOTrainer
    from hf_distca.trainer.trl.preference import DistCAGRPOConfig as DistCAGRPOConfig
    from hf_distca.trainer.trl.preference import DistCAGRPOTrainer as DistCAGRPOTrainer
    from hf_distca.trainer.trl.preference import DistCAKTOConfig as DistCAKTOConfig
    from hf_distca.trainer.trl.preference import DistCAKTOTrainer as DistCAKTOTrainer
    from hf_distca.trainer.trl.preference import DistCARewardConfig as DistCARewardConfig
    from hf_distca.trainer.trl.preference import DistCARewardTrainer as DistCARewardTrainer
    from hf_distca.trainer.trl.preference import DistCARLOOConfig as DistCARLOOConfig
    from hf_distca.trainer.trl.preference import DistCARLOOTrainer as DistCARLOOTrainer
    from hf_distca.trainer.trl.sft import DistCASFTConfig as DistCASFTConfig
    from hf_distca.trainer.trl.sft import DistCASFTTrainer as DistCASFTTrainer

# Imported on first use: torch and transformers take seconds, which `hf-distca --help` does not
# need.
_MODULES = {
    "CollatorWithLengths": "collator.padding_free",
    "Dispatcher": "dispatch.dispatcher",
    "DistCAArguments": "trainer.arguments",
    "DistCAAsyncGRPOConfig": "trainer.trl.async_grpo",
    "DistCAAsyncGRPOTrainer": "trainer.trl.async_grpo",
    "DistCACollator": "collator.collation",
    "DistCAConfig": "config",
    **{
        f"DistCA{name}{kind}": "trainer.trl.preference"
        for name in ("DPO", "GRPO", "KTO", "RLOO", "Reward")
        for kind in ("Config", "Trainer")
    },
    "DistCADistillationConfig": "trainer.trl.distillation",
    "DistCADistillationTrainer": "trainer.trl.distillation",
    "DistCAGKDConfig": "trainer.trl.gkd",
    "DistCAGKDTrainer": "trainer.trl.gkd",
    "DistCAMixin": "trainer.trainer",
    "DistCAPaddedArguments": "trainer.arguments",
    "DistCAPaddedMixin": "trainer.padded",
    "DistCASFTConfig": "trainer.trl.sft",
    "DistCASFTTrainer": "trainer.trl.sft",
    "DistCATrainer": "trainer.trainer",
    "DistCATrainingArguments": "trainer.arguments",
    "GlobalBatchSampler": "collator.sampler",
    "PlanSettings": "planner.settings",
    "RefusedError": "checks.refusal",
    "RunSpec": "run",
    "describe_run": "models.describe",
    "load_documents": "collator.sources",
    "make_dispatcher": "trainer.assembly",
    "pack_padded": "trainer.assembly",
    "plan_layers": "patches.layers",
    "record": "cli.script",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__", "__doc__", "__name__", "__file__"})


when_imported(
    "transformers.modeling_utils", lambda: import_module("hf_distca.patches.prepare").register()
)
