"""axolotl's trainers with planned core attention."""

from typing import Any

from axolotl.core.trainers import AxolotlTrainer
from axolotl.core.trainers.dpo.trainer import AxolotlDPOTrainer

from hf_distca.trainer.padded import DistCAPaddedMixin
from hf_distca.trainer.trainer import DistCAMixin


class DistCAAxolotlTrainer(DistCAMixin, AxolotlTrainer):
    """axolotl's trainer of causal language models, on packed documents.

    Args:
        data_collator: axolotl's, which pads documents. hf_distca packs them instead.
        kwargs: arguments of `AxolotlTrainer`.
    """

    def __init__(self, *, data_collator: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)

    def _accumulate_token_counts(self, inputs: dict[str, Any]) -> None:
        """Count the targets of a micro-batch, for axolotl's tokens per second."""
        super()._accumulate_token_counts({"labels": inputs["shift_labels"]})


class DistCAAxolotlDPOTrainer(DistCAPaddedMixin, AxolotlDPOTrainer):
    """axolotl's `DPOTrainer`, whose padded batches are computed packed.

    Args:
        model: the model that is trained.
        ref_model: the model that it is compared with; None if the model is an adapter's.
        kwargs: arguments of `AxolotlDPOTrainer`.
    """

    def __init__(self, model: Any, ref_model: Any = None, **kwargs: Any) -> None:
        named: dict[str, Any] = {"model": model, "ref_model": ref_model, **kwargs}
        super().__init__(**named)
