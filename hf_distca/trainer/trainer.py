"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer

from hf_distca.collator.texts import with_tokens
from hf_distca.models.loading import load_model
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.mixin import DistCAMixin


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' `Trainer` on packed documents with balanced core attention.

    The arguments are those of `transformers.Trainer`; `args` is a `DistCATrainingArguments`. Two
    things are added:

    - `model` may be a name. The model is then loaded with `args.model_init_kwargs`, and gets
      planned attention.
    - A data set without `input_ids` is tokenized with `processing_class`: the text in the column
      `args.dataset_text_field`, with one end-of-sequence token after each document. Streams are
      tokenized as they are read.
    """

    if TYPE_CHECKING:  # as transformers has it, but the model may be a name

        def __init__(
            self,
            model: str | nn.Module | None = None,
            args: DistCAArguments | None = None,
            data_collator: Any = None,
            train_dataset: Any = None,
            eval_dataset: Any = None,
            processing_class: Any = None,
            model_init: Any = None,
            compute_loss_func: Any = None,
            compute_metrics: Any = None,
            callbacks: list[Any] | None = None,
            optimizers: tuple[Any, Any] = (None, None),
            optimizer_cls_and_kwargs: tuple[type[Any], dict[str, Any]] | None = None,
            preprocess_logits_for_metrics: Any = None,
        ) -> None: ...

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        model = arguments.get("model")
        if isinstance(model, str):
            options: Any = getattr(arguments["args"], "model_init_kwargs", None) or {}
            arguments = {**arguments, "model": load_model(model, options)}
        if arguments.get("data_collator") is not None:
            return arguments
        return with_tokens(arguments, model)
