"""DistCAMixin: planned core attention for transformers' Trainer and its subclasses."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
)

from hf_distca.collator.documents import check_dataset
from hf_distca.collator.refusals import Data
from hf_distca.collator.streams import EpochStream, StreamPacker
from hf_distca.models.decoder import mixing_layers
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.trainer import resuming
from hf_distca.trainer.costs import LearnedCosts
from hf_distca.trainer.loaders import (
    EvaluationLoader,
    PackedLoaders,
    UpcomingBatches,
    is_stream,
    lengths_read_on_host,
)
from hf_distca.trainer.planned import PlannedTraining
from hf_distca.trainer.predictions import EvaluatedRows, Predictions
from hf_distca.trainer.refusals import Run, by_name

logger = logging.getLogger(__name__)

ACCURACY, ENTROPY = "mean_token_accuracy", "entropy"
"""Names in TRL, without their prefix: share of targets that have the greatest logit, and mean
entropy in nats."""


class DistCAMixin(PlannedTraining):
    """Planned core attention for `transformers.Trainer` or a subclass.

    Put the mixin before the trainer.

    ```python
    class MyTrainer(hf_distca.DistCAMixin, OthersTrainer): ...
    ```

    The trainer keeps its own arguments and methods. Its `args` are a dataclass of `DistCAArguments`
    and the trainer's own arguments. The data set, as the trainer prepares it, has examples with
    `input_ids` and optionally `labels` (unshifted, -100 where no loss is wanted). Loss and
    gradients are those of one process on the same documents.

    - A data set with a length is packed into micro-batches over all ranks, and each micro-batch is
      planned as a whole.
    - A streaming data set is packed by each rank. Ranks exchange lengths, and only core attention
      moves.
    - With a padding-free `data_collator`, such as transformers' `DataCollatorWithFlattening`, the
      trainer makes the batches, and only core attention moves.

    Raises:
        ValueError: on every rank before training, with the reason, if this model or data set cannot
            be trained.
    """

    packs_documents = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = self._checked(by_name(super().__init__, args, kwargs))
        self._packs = named.get("data_collator") is None  # else the collator makes the batches
        super().__init__(**named)
        self._prepare_planned()
        dispatcher = self.dispatcher
        self._costs = LearnedCosts(dispatcher)
        self.meter.compare_with(self._costs)
        self.add_callback(self._costs)
        self._progress = resuming.DataProgress(resuming.DataPlace({}))
        self._epoch_iterator: Iterator[Any] | None = (
            None  # of the present pass over the training data
        )
        self._loaders = PackedLoaders(self, dispatcher)
        self._evaluation_loaders: dict[
            int, DataLoader[Any]
        ] = {}  # by the id of the trainer's own data set
        self._upcoming = UpcomingBatches(dispatcher, self._processes)
        self._upcoming_evaluated = UpcomingBatches(
            dispatcher, self._processes
        )  # of the present evaluation
        self._mixes = bool(mixing_layers(self.model))  # rows of a document other than by attention
        self._evaluated: list[
            tuple[float, float]
        ] = []  # this rank's sum of losses and all targets, of micro-batches
        self._rows = EvaluatedRows()  # of the present evaluation

    # Data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader of this rank's rows, for training and evaluation alike."""
        named = by_name(super()._get_dataloader, args, kwargs)
        dataset, is_training = named["dataset"], named.get("is_training", False)
        if not self._packs:
            if is_stream(dataset):
                named["dataset"] = EpochStream.around(dataset)
            with lengths_read_on_host(self, dataset):
                loader = super()._get_dataloader(**named)
            self._processes.watch(loader)
            return loader
        shuffle = is_training and self.args.train_sampling_strategy != "sequential"
        capacity, bins = resuming.capacity_and_bins(
            self._progress.start.order if is_training else {}
        )
        loader = self._loaders.loader(dataset, shuffle=shuffle, capacity=capacity, bins=bins)
        if is_training and not is_stream(dataset):
            self._loaders.print_summary(dataset, capacity, bins)
        self._processes.watch(loader)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of planned micro-batches of the evaluation data: this rank's rows, one micro-batch ahead."""
        named = by_name(super().get_eval_dataloader, args, kwargs)
        chosen = named.get("eval_dataset")
        own: Any = self.eval_dataset
        if isinstance(chosen, str) and not (isinstance(own, dict) and chosen in own):
            raise Data.A_NAME.error(name="eval_dataset", given=chosen)
        dataset = own if chosen is None else own[chosen] if isinstance(chosen, str) else chosen
        loader = self._evaluation_loaders.get(id(dataset))
        if loader is None:
            # Trainer keeps loaders by a name that data sets share.
            vars(self).pop("_eval_dataloaders", None)
            loader = super().get_eval_dataloader(**named)
            if any(
                dataset is each for each in (own, *(own.values() if isinstance(own, dict) else ()))
            ):
                self._evaluation_loaders[id(dataset)] = loader  # whose processes may live on
        return self._read_ahead(loader)

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return the same for the data of `predict`."""
        check_dataset(test_dataset, "test_dataset")
        return self._read_ahead(super().get_test_dataloader(test_dataset))

    def _read_ahead(self, loader: DataLoader[Any]) -> EvaluationLoader:
        """Return a loader of the same batches, planned one ahead."""
        planned = self._packs and not isinstance(loader.dataset, StreamPacker)
        self._upcoming_evaluated.close()
        self._upcoming_evaluated = UpcomingBatches(self.dispatcher, self._processes)
        return EvaluationLoader(loader, self._upcoming_evaluated, planned=planned)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return the planned micro-batches of an optimizer step and the number of targets on all ranks."""
        self._begin_step()
        begins = epoch_iterator is not self._epoch_iterator
        if begins:
            self._epoch_iterator = epoch_iterator
            self._progress.begin_pass(self.state.global_step)
        planned = self._packs and not is_stream(self.train_dataset)
        batches = self._upcoming.fetch(epoch_iterator, num_batches, planned=planned)
        if begins and not batches and self.state.global_step == 0:  # on every rank
            raise Data.EMPTY.error(name="train_dataset")
        if (
            self.pool is not None and batches
        ):  # else a stream has ended: Trainer asks again until max_steps
            self.pool.refresh()
        taken, targets = super().get_batch_samples(iter(batches), len(batches), *args, **kwargs)
        if not planned and batches and self.state.global_step == 0:
            self._check_first_targets(batches)
        return taken, targets

    def _check_first_targets(self, batches: list[dict[str, Any]]) -> None:
        """Raise ValueError on every rank if no document of the first optimizer step has a target.

        A data set with a length is checked as a whole before training, and may begin with such a
        step. What streams and collators give is unknown before it comes. Later steps may have no
        target: their loss of 0 is a warning, as it is where a collator gives no labels that could
        be counted.
        """
        targets: Any = super()._get_num_items_in_batch(
            batches, self.args.device
        )  # of all ranks, may be 0
        if targets is not None and not targets.item():
            plans = [batch[PLAN_KEY] for batch in batches]
            raise Run.NO_TARGETS.error(
                tokens=sum(int(plan.tokens.sum()) - plan.fillers for plan in plans)
            )

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Tensor | None:
        targets: Any = super()._get_num_items_in_batch(*args, **kwargs)
        # Documents of one token have no target: their loss is 0, not 0/0.
        return None if targets is None else targets.clamp(min=1)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of all documents of a micro-batch, also those with the id of padding.

        But no fillers.
        """
        if self.args.include_num_input_tokens_seen != "no":
            plan: MicroBatchPlan = inputs[PLAN_KEY]
            self.state.num_input_tokens_seen += int(plan.tokens.sum()) - plan.fillers

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move the inputs to the device and bind their plan to this rank."""
        inputs = super()._prepare_inputs(inputs)
        if isinstance(inputs.get(PLAN_KEY), MicroBatchPlan):
            is_training = self.model.training
            upcoming = self._upcoming if is_training else self._upcoming_evaluated
            inputs = {**inputs, PLAN_KEY: upcoming.bind(inputs[PLAN_KEY])}
            if is_training:
                self._log_choice(inputs[PLAN_KEY].plan)
                self.meter.count(inputs[PLAN_KEY])
                self._costs.count(inputs[PLAN_KEY].plan)
        return inputs

    # Training

    def _prepare_training(self, checkpoint: str | None) -> None:
        groups = self.dispatcher.groups
        order = resuming.data_order(self, self.dispatcher, self._loaders, packs=self._packs)
        place = resuming.agreed_place(order, checkpoint, self.args, groups)
        if self._packs:
            self._loaders.check_evaluation_data()
        self._costs.resume(None if checkpoint is None else Path(checkpoint))
        if (
            place.order is order and self._packs
        ):  # a resumed training goes on with its micro-batches
            place = place._replace(
                order=resuming.chosen_order(order, self, self.dispatcher, self._loaders)
            )
        self._progress = resuming.DataProgress(place)

    def _end_training(self) -> None:
        self._upcoming.close()
        self._upcoming, self._epoch_iterator = (
            UpcomingBatches(self.dispatcher, self._processes),
            None,
        )

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Trainer.training_step`, and prepare what comes next before Trainer waits for this loss."""
        loss = super().training_step(model, *args, **kwargs)
        self._upcoming.prepare_next()
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss over the targets of all ranks.

        Raise ValueError if the plan did not reach attention.
        """
        plan = inputs[PLAN_KEY]
        if num_items_in_batch is None:  # evaluation of a trainer that takes the mean on each rank
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        evaluates, rows = return_outputs and not self.model.training, self._rows
        seen = rows.seen
        plan.ran.watch = rows.see if evaluates else None
        result = super().compute_loss(
            model,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
            **kwargs,
        )
        if self.model.training:
            self._begin_backward()
        if plan.ran.attentions == 0 or (self._mixes and plan.ran.mixing == 0):
            raise Run.LOST_PLAN.error(model=type(self.model).__name__, key=PLAN_KEY)
        logits = result[1].get("logits") if evaluates and isinstance(result[1], dict) else None
        if rows.seen == seen and isinstance(
            logits, Tensor
        ):  # the loss was computed from all logits at once
            rows.see_all(logits[0], inputs["shift_labels"][0])
        return result

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does.

        Loss, token accuracy and entropy are exact means over all targets.
        """
        try:
            return super().evaluate(*args, **kwargs)
        finally:
            self._upcoming_evaluated.close()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate with means over the targets of all micro-batches, and with predictions if the caller wants them."""
        named = by_name(super(PlannedTraining, self).evaluation_loop, args, kwargs)
        loss_alone, prefix = (
            named.get("prediction_loss_only"),
            named.get("metric_key_prefix", "eval"),
        )
        if loss_alone is None:
            loss_alone = self.args.prediction_loss_only
        predictions = None if loss_alone else self._new_predictions(named["dataloader"])
        self._evaluated, self._rows = [], EvaluatedRows(predictions)
        output = super().evaluation_loop(**named)
        if self._evaluated and output.metrics is not None:
            loss, targets = map(sum, zip(*self._evaluated, strict=True))
            of_ranks = self.dispatcher.groups.all_gather((loss, *self._rows.figures.sums()))
            total, counted, hits, entropy = map(sum, zip(*of_ranks, strict=True))
            output.metrics[f"{prefix}_loss"] = total / max(targets, 1)
            # Otherwise the model has several losses, or none of logits; TRL's trainer counts for
            # itself.
            if counted == targets > 0:
                output.metrics[f"{prefix}_{ACCURACY}"] = hits / targets
                output.metrics[f"{prefix}_{ENTROPY}"] = entropy / targets
        if predictions is None or not self._evaluated:
            return output
        values, labels = predictions.joined()
        metrics = dict(output.metrics or {})
        if self.compute_metrics is not None:
            given: Any = self.compute_metrics(EvalPrediction(predictions=values, label_ids=labels))
            for name, value in denumpify_detensorize(given).items():
                metrics[name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"] = value
        return output._replace(predictions=values, label_ids=labels, metrics=metrics)

    def _new_predictions(self, loader: EvaluationLoader) -> Predictions:
        """Return where predictions for a loader's documents are collected."""
        function, sampler = self.preprocess_logits_for_metrics, loader.sampler
        if function is None:
            raise Run.ALL_LOGITS.error()
        if sampler is None:
            raise Run.NO_ORDER.error()
        documents: Any = loader.dataset
        return Predictions(
            function, sampler.excerpts_in_order(), len(documents), self.dispatcher.groups
        )

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor | None, None, None]:
        """Add one micro-batch to the evaluation's loss."""
        self._at(f"micro-batch {len(self._evaluated) + 1} of an evaluation")
        targets: Any = super()._get_num_items_in_batch([inputs], self.args.device)  # may be 0
        predictions = self._rows.predictions
        if predictions is not None:
            predictions.begin(inputs[PLAN_KEY], inputs["shift_labels"][0])
        loss, _, _ = super().prediction_step(model, inputs, True, *args, **kwargs)
        if predictions is not None:
            predictions.end()
        assert loss is not None
        self._upcoming_evaluated.prepare_next()  # before the host waits for the loss
        # The loss of all ranks is the mean over ranks of `loss`.
        self._evaluated.append(
            ((loss * targets / self.dispatcher.groups.ranks).item(), targets.item())
        )
        return loss, None, None

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Return what `preprocess_logits_for_metrics` makes of each token's logits, by document of the data set.

        Predictions and labels are [documents, longest, ...], with -100 elsewhere. Labels are
        unshifted: the prediction of a token is for the label after it. The first label of a
        document is -100.
        """
        failures = self.dispatcher.groups.failures
        try:
            with failures.reported("the start of a prediction"), self._processes.explained():
                return super().predict(*args, **kwargs)
        finally:
            self._upcoming_evaluated.close()

    # Saving and resuming

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Set up the state as Trainer does.

        Return the first epoch and its completed micro-batches.
        """
        epochs, _ = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, *args, **kwargs
        )
        place = self._progress.start
        if self.args.ignore_data_skip:
            place = resuming.DataPlace(place.order, epochs)
        elif place.steps == num_update_steps_per_epoch:
            place = resuming.DataPlace(place.order, place.epoch + 1)
        self._progress = resuming.DataProgress(place)
        if self.state.global_step >= max_steps and self.is_world_process_zero():
            logger.warning(
                "nothing is left to train: the checkpoint is of step %s, and training ends at step "
                "%s. Raise max_steps or num_train_epochs, which count from the first step of the "
                "first run",
                *(self.state.global_step, max_steps),
            )
        return place.epoch, place.steps * self.args.gradient_accumulation_steps

    def _save_place(self, folder: Path) -> None:
        self._progress.save(folder, self.state.global_step)
        self._costs.save(folder)
