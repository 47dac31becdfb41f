"""DistCAGKDTrainer: TRL's experimental GKDTrainer, whose divergence is computed in tiles.

TRL's GKDTrainer computes the logits of student and teacher for all tokens, and its loss makes some
more tensors of this size. TRL's DistillationTrainer computes the same divergence in tiles. Here the
loss of the one takes the divergence of the other.
"""

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from trl import DistillationTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.models.utils import _ForwardRedirection

from hf_distca.models.decoder import base_model
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.trl.distillation import TeacherMixin


@dataclass
class DistCAGKDConfig(DistCAPaddedArguments, GKDConfig):
    """`trl.experimental.gkd.GKDConfig` with the settings of `DistCAConfig`."""


class TiledGKDTrainer(GKDTrainer):
    """TRL's `GKDTrainer`, whose loss makes no tensor of all tokens times the vocabulary."""

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return TRL's loss, without whole logits unless they are returned too."""
        if return_outputs:
            of_whole_logits: Any = super().compute_loss
            return of_whole_logits(model, inputs, return_outputs, num_items_in_batch)
        student = self.accelerator.unwrap_model(model)
        # Inside the forward of a wrapped model its weights are whole.
        redirection = _ForwardRedirection()
        computing = SimpleNamespace(
            accelerator=self.accelerator,
            args=self.args,
            state=self.state,
            beta=self.beta,
            temperature=1.0,  # TRL's GKD takes its temperature for rollouts alone
            teacher_model=self.teacher_model,
            model_kwarg_keys=(),
            _is_vlm=False,
            _forward_redirection=redirection,
        )
        of_trl: Any = DistillationTrainer
        computing._get_last_hidden_state = partial(of_trl._get_last_hidden_state, computing)
        loss, _, _ = redirection(
            model,
            student,
            of_trl._compute_loss,
            computing,
            base_model(student),
            _as_rollouts(inputs),
            num_items_in_batch,
        )
        return loss


class DistCAGKDTrainer(TeacherMixin, TiledGKDTrainer):
    """TRL's `GKDTrainer`, whose student and teacher compute padded batches packed.

    `args` is a `DistCAGKDConfig`.
    """


def _as_rollouts(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return a batch of GKD as one of DistillationTrainer: all tokens but the first as completions.

    Tokens without a label take no part in the loss.
    """
    return {
        "prompt_ids": inputs["input_ids"][:, :1],
        "completion_ids": inputs["input_ids"][:, 1:],
        "prompt_mask": inputs["attention_mask"][:, :1],
        "completion_mask": inputs["attention_mask"][:, 1:],
        "tool_mask": (inputs["labels"][:, 1:] != -100).long(),
    }
