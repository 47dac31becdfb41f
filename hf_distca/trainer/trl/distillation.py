"""TRL's trainers of distillation, whose student and teacher are packed alike.

Arguments, data, rollouts, loss and metrics are TRL's. The divergence of both models is computed in
tiles of their logits, so that no tensor has a value for each row and each token of the vocabulary.
"""

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_distca.checks.refusal import PackageError
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.patches.padded_models import plan_ahead
from hf_distca.server_settings import AttentionServers
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.assembly import pack_teacher
from hf_distca.trainer.padded import DistCAPaddedMixin
from hf_distca.trainer.trl.preference import RolloutMixin

try:
    from trl import DistillationConfig, DistillationTrainer
except ModuleNotFoundError as error:
    if error.name != "trl":
        raise
    raise PackageError(
        "DistCADistillationTrainer and DistCAGKDTrainer are based on TRL, which is not installed; "
        "run pip install 'hf_distca[trl]'"
    ) from error

NEVER_TRAINED = {
    "attention_servers": AttentionServers(),
    "offload_activations": False,
    "mlp_chunk_rows": 0,
}
"""Settings of a teacher, which has no backward. Ranks compute its core attention themselves."""


class TeacherMixin(DistCAPaddedMixin):
    """A teacher beside the model, which computes the same padded batches packed.

    The teacher has plans of its own, without a backward, because its heads, windows and layers may
    differ from those of the student.
    """

    teacher_model: Any
    _teacher_dispatcher: Dispatcher | None = None

    def _pack_models(self) -> None:
        """Let the student and the teacher compute padded batches, once."""
        if self._is_packed:
            return
        super()._pack_models()
        if self.teacher_model is not None:  # a server may take its place
            config: Any = copy(self.args)
            vars(config).update(NEVER_TRAINED)
            self._teacher_dispatcher = pack_teacher(self._teacher(), config, self)

    def _teacher(self) -> Any:
        """Return the teacher without what FSDP or DeepSpeed put around it."""
        return self.accelerator.unwrap_model(self.teacher_model)

    def close(self) -> None:
        """Close the process groups of the student and of the teacher, as `DistCATrainer` does."""
        super().close()
        if self._teacher_dispatcher is not None:
            self._teacher_dispatcher.close()


@dataclass
class DistCADistillationConfig(DistCAPaddedArguments, DistillationConfig):
    """`trl.DistillationConfig` with the settings of `DistCAConfig`."""


class DistCADistillationTrainer(TeacherMixin, RolloutMixin, DistillationTrainer):
    """TRL's `DistillationTrainer`, whose student and teacher compute padded batches packed.

    `args` is a `DistCADistillationConfig`.
    """

    def _plan_ahead(self, batches: list[dict[str, Tensor]]) -> None:
        """Begin to plan batches of the student, and of the teacher without a backward."""
        super()._plan_ahead(batches)
        if self.teacher_model is not None:
            with torch.no_grad():
                plan_ahead(self._teacher(), batches)
