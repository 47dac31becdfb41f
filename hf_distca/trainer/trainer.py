"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

from typing import Any

from transformers import Trainer

from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.mixin import DistCAMixin
from hf_distca.trainer.refusals import named_arguments
from hf_distca.trainer.text import Tokenizing, loaded_model


class DistCATrainer(DistCAMixin, Trainer):
    """transformers' `Trainer` on packed documents with balanced core attention.

    The arguments are those of `transformers.Trainer`; `args` is a `DistCATrainingArguments`. Two things are added:

    - `model` may be a name. The model is then loaded with `attn_implementation="distca"` and `args.model_init_kwargs`.
    - A data set without `input_ids` is tokenized with `processing_class`: the text in the column
      `args.dataset_text_field`, with an end-of-sequence token after each document.

    Raises:
        ValueError: The model, the arguments or the data set cannot be trained this way. Every rank raises it before
            training begins, with the reason.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Trainer's own __init__ names its arguments; the mixin's takes anything.
        given = named_arguments(super(DistCAMixin, self).__init__, args, kwargs)
        settings, model = given.get("args"), given.get("model")
        if isinstance(settings, DistCAArguments):
            settings.serve_if_server()  # before a server loads anything
            init_kwargs = getattr(settings, "model_init_kwargs", None)
            if isinstance(model, str):
                given["model"] = loaded_model(model, init_kwargs or {})
            elif init_kwargs is not None:
                raise ValueError(
                    f"model_init_kwargs={init_kwargs!r} would be without effect: the model is loaded already; give "
                    "its name as model, or leave them out"
                )
            if given.get("data_collator") is None:
                _tokenize_data(given, settings, model if isinstance(model, str) else None)
        super().__init__(**given)


def _tokenize_data(given: dict[str, Any], settings: Any, model_name: str | None) -> None:
    """Replace data sets of text among a trainer's arguments by data sets of tokens."""
    field = getattr(settings, "dataset_text_field", "text")
    tokenizing = Tokenizing(settings, field, given.get("processing_class"), model_name)
    for name in ("train_dataset", "eval_dataset"):
        if given.get(name) is not None:
            given[name] = tokenizing.tokens_of(given[name], name)
    if tokenizing.processing_class is not None:
        given["processing_class"] = tokenizing.processing_class
