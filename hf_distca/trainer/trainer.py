"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from transformers import Trainer

from hf_distca.trainer.mixin import DistCAMixin


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' Trainer with planned core attention; see DistCAMixin.

    Args: those of `transformers.Trainer`, with `args` a DistCATrainingArguments.

    Raises:
        ValueError: model, arguments or data set cannot be trained so; says why, on every rank, before any
            work starts.
    """
