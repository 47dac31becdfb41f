"""DistCAPaddedMixin: trainers whose model computes padded batches packed and planned."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from hf_distca.dispatch.padded_rows import OneMicroBatch, PackedBatch, PaddedBatches
from hf_distca.models.images import image_model
from hf_distca.patches.padded_models import pack_backbone
from hf_distca.trainer.assembly import (
    gathers_whole_layers,
    pack_padded,
    sequences_share_prefixes,
)
from hf_distca.trainer.parallel import gathers_parameters
from hf_distca.trainer.planned import PlannedTraining


class DistCAPaddedMixin(PlannedTraining):
    """Padded batches, computed packed and planned, for `transformers.Trainer` or a subclass.

    Put the mixin first.

    ```python
    class MyTrainer(hf_distca.DistCAPaddedMixin, OthersTrainer): ...
    ```

    The trainer keeps its own arguments, data, collator, loss and metrics. Its `args` are a
    dataclass of `DistCAPaddedArguments` and the trainer's own arguments. The model, and the
    trainer's `ref_model` if it has one, compute padded batches as `pack_padded` lets them. Loss,
    gradients and metrics are those of the trainer without the mixin. Ranks must call their model
    equally often, as trainers do.

    Raises:
        ValueError: on every rank before training, with the reason, if this model cannot be trained.
    """

    packs_documents = False

    def _initialize(self, arguments: dict[str, Any]) -> None:
        self._is_packed = False
        self._initialize_trainer(self._checked(arguments))
        self._pack_models()

    def _pack_models(self) -> None:
        """Let the models of a trainer that is built compute padded batches, once.

        A subclass may need it early.
        """
        if self._is_packed:
            return
        self._is_packed = True
        self._prepare_planned()
        dispatcher = self.dispatcher
        self._shares_prefixes = sequences_share_prefixes(self.model, dispatcher)
        batches = PaddedBatches(
            dispatcher,
            self._count,
            at_once=self._one_micro_batch(),
            share_prefixes=self._shares_prefixes,
            image_model=image_model(self.model),
            always_encodes=gathers_parameters(self.accelerator),
        )
        pack_backbone(self.model, batches)
        reference = getattr(self, "ref_model", None)
        if reference is not None:
            pack_padded(
                self.accelerator.unwrap_model(reference),
                self.args,
                self.args.device,
                dispatcher=dispatcher,
            )

    def _one_micro_batch(self) -> OneMicroBatch | None:
        """Return why a padded batch must be one micro-batch in training; None if it need not be."""
        args: Any = self.args
        if gathers_whole_layers(self.model, self.dispatcher.run, self.accelerator):
            return OneMicroBatch(
                "ZeRO-3 gathers whole layers",
                "else set planning={'ping_pong': False} and mlp_chunk_rows=0, and train models "
                "whose layers all have attention",
            )
        if args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get(
            "use_reentrant"
        ):
            return OneMicroBatch(
                "checkpoints are reentrant",
                "else set gradient_checkpointing_kwargs={'use_reentrant': False}, which TRL sets "
                "to True for LoRA under ZeRO-3",
            )
        return None

    def _count(self, packed: PackedBatch) -> None:
        """Note a padded batch that the model is about to train on."""
        self._log_choice(packed.micro_batches[0][1].plan)
        self.meter.count_padded(packed)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return the batches of an optimizer step as the trainer does."""
        self._begin_step()
        if self.dispatcher.remote is not None:
            self.dispatcher.remote.refresh()
        return super().get_batch_samples(epoch_iterator, num_batches, *args, **kwargs)

    def compute_loss(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loss."""
        loss = super().compute_loss(model, *args, **kwargs)
        if self.model.training:
            self._begin_backward()
        return loss
