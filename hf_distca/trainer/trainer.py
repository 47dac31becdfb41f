"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention.

`DistCAMixin` is all that it adds, for any trainer that is a subclass of transformers' `Trainer`.
"""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    PredictionOutput,
    denumpify_detensorize,
)

from hf_distca.checks.data_rules import Data
from hf_distca.checks.run_rules import Run
from hf_distca.collator.collation import TARGET_ROWS
from hf_distca.collator.documents import check_dataset, is_stream
from hf_distca.collator.padding_free import gives_rows, lengths_read_on_host
from hf_distca.collator.place import DataPlace, DataProgress, capacity_and_bins
from hf_distca.collator.streams import EpochStream, StreamPacker
from hf_distca.collator.texts import with_tokens
from hf_distca.dispatch.upcoming import UpcomingBatches
from hf_distca.models.loading import load_model
from hf_distca.models.sharing import shares_prefixes, why_training_shares_nothing
from hf_distca.patches.targets import repeat_target_rows
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.profiling.costs import LearnedCosts
from hf_distca.trainer import resuming
from hf_distca.trainer.arguments import DistCAArguments, print_left_out
from hf_distca.trainer.evaluation import Evaluated, EvaluationLoader, Predictions
from hf_distca.trainer.loaders import PackedLoaders, check_beginnings
from hf_distca.trainer.planned import PlannedTraining, arguments_by_name
from hf_distca.units import counted

logger = logging.getLogger(__name__)


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

    def _initialize(self, arguments: dict[str, Any]) -> None:
        collator = arguments.get("data_collator")
        left_out = collator if gives_rows(collator) else None
        if left_out is not None:
            arguments = {**arguments, "data_collator": None}
        arguments = self._checked(arguments)
        # Otherwise the user's collator makes the batches.
        self._packs = arguments.get("data_collator") is None
        self._initialize_trainer(arguments)
        if self._packs and self.args.process_index == 0:
            print_left_out(self.args, left_out)
        # The number of targets reaches the loss as the plan reaches attention: as a keyword. Models
        # with a tower say otherwise (`accepts_loss_kwargs`), since images change what they count.
        self.model_accepts_loss_kwargs = True
        self._prepare_planned()
        dispatcher = self.dispatcher
        self._costs = LearnedCosts(dispatcher)
        self.meter.compare_with(self._costs)
        self.add_callback(self._costs)
        self._progress = DataProgress(DataPlace({}))
        self._loaders = PackedLoaders(self, dispatcher)
        self._shares = self._packs and shares_prefixes(
            self.args.share_prefixes, why_training_shares_nothing(self), self.args.process_index
        )
        # Iterator of the present pass over the training data.
        self._epoch_iterator: Iterator[Any] | None = None
        self._upcoming = UpcomingBatches(dispatcher)
        # Packer of the training data if that is a stream.
        self._packer: StreamPacker | None = None
        # Loaders of the trainer's own evaluation data, by the id of the data set.
        self._evaluation_loaders: dict[int, DataLoader[Any]] = {}
        # Of the present evaluation: micro-batches to come, and what was evaluated.
        self._upcoming_evaluated = UpcomingBatches(dispatcher)
        self._evaluated = Evaluated()

    # Data

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Return a loader of this rank's rows, for training and evaluation alike."""
        arguments = arguments_by_name(super(PlannedTraining, self)._get_dataloader, args, kwargs)
        dataset = arguments["dataset"]
        is_training = arguments.get("is_training", False)
        if not self._packs:
            if is_stream(dataset):
                arguments["dataset"] = EpochStream.around(dataset)
            with lengths_read_on_host(self, dataset):
                others: DataLoader[Any] = super()._get_dataloader(**arguments)
            return others
        shuffle = is_training and self.args.train_sampling_strategy != "sequential"
        capacity, bins = capacity_and_bins(self._progress.start.order if is_training else {})
        loader = self._loaders.loader(
            dataset,
            shuffle=shuffle,
            capacity=capacity,
            bins=bins,
            shares=is_training and self._shares,
        )
        packer = loader.dataset if isinstance(loader.dataset, StreamPacker) else None
        if is_training:
            self._packer = packer
        if is_training and packer is None:
            self._loaders.print_summary(dataset, capacity, bins)
        return loader

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return a loader of this rank's rows of the evaluation data.

        It reads and plans one micro-batch ahead.
        """
        arguments = arguments_by_name(super().get_eval_dataloader, args, kwargs)
        dataset = self._evaluation_dataset(arguments.get("eval_dataset"))
        loader = self._evaluation_loaders.get(id(dataset))
        if loader is None:
            # Trainer keeps loaders by a name that data sets share.
            vars(self).pop("_eval_dataloaders", None)
            loader = super().get_eval_dataloader(**arguments)
            if self._is_own_evaluation_dataset(dataset):
                # The next evaluation uses it again: its processes may live on.
                self._evaluation_loaders[id(dataset)] = loader
        return self._read_ahead(loader)

    def _evaluation_dataset(self, chosen: Any) -> Any:
        """Return the data set that an evaluation's argument `eval_dataset` means.

        Args:
            chosen: a data set, the key of one of the trainer's data sets, or None for all of the
                trainer's.
        """
        datasets: Any = self.eval_dataset
        if chosen is None:
            return datasets
        if not isinstance(chosen, str):
            return chosen
        if not isinstance(datasets, dict):
            raise Data.A_NAME.error(name="eval_dataset", given=chosen)
        return datasets[chosen]

    def _is_own_evaluation_dataset(self, dataset: Any) -> bool:
        """Return whether a data set lives as long as the trainer, so that its id stays its own."""
        datasets: Any = self.eval_dataset
        if isinstance(datasets, dict) and any(dataset is value for value in datasets.values()):
            return True
        return dataset is datasets

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Return a loader of this rank's rows of the data that `predict` gets."""
        check_dataset(test_dataset, "test_dataset")
        return self._read_ahead(super().get_test_dataloader(test_dataset))

    def _read_ahead(self, loader: DataLoader[Any]) -> EvaluationLoader:
        """Return a loader of the same batches that reads and plans one micro-batch ahead."""
        planned = self._packs and not isinstance(loader.dataset, StreamPacker)
        self._upcoming_evaluated.close()
        self._upcoming_evaluated = UpcomingBatches(self.dispatcher)
        groups = self.dispatcher.groups
        return EvaluationLoader(loader, self._upcoming_evaluated, groups, planned=planned)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return an optimizer step's planned micro-batches and its number of targets.

        The targets are those of all ranks.
        """
        self._begin_step()
        begins_pass = epoch_iterator is not self._epoch_iterator
        if begins_pass:
            self._epoch_iterator = epoch_iterator
            self._progress.begin_pass(self.state.global_step)
        # Batches of streams and collators are planned here, by all ranks together.
        planned = self._packs and not is_stream(self.train_dataset)
        batches = self._upcoming.fetch(epoch_iterator, num_batches, planned=planned)
        if begins_pass and self._packer is not None:
            check_beginnings(self._packer, self.dispatcher.groups)
        is_first_step = self.state.global_step == 0
        if begins_pass and not batches and is_first_step:  # on every rank
            raise Data.EMPTY.error(name="train_dataset")
        # Without batches a stream has ended, and Trainer asks again until max_steps.
        if self.dispatcher.remote is not None and batches:
            self.dispatcher.remote.refresh()
        samples, targets = super().get_batch_samples(iter(batches), len(batches), *args, **kwargs)
        if not planned and batches and is_first_step:
            self._check_first_targets(batches)
        return samples, targets

    def _check_first_targets(self, batches: list[dict[str, Any]]) -> None:
        """Raise ValueError on every rank if no document of the first optimizer step has a target.

        This checks batches of streams and of collators, whose documents are unknown before they
        come. All documents of a data set with a length are checked before training, and its first
        step may have no target. Later steps may have no target either: `Remedies.see_loss` warns of
        their loss of 0.
        """
        # Of all ranks; None where a collator gives no labels that could be counted.
        targets: Any = super()._get_num_items_in_batch(batches, self.args.device)
        if targets is not None and not targets.item():
            tokens = sum(batch[PLAN_KEY].document_tokens for batch in batches)
            raise Run.NO_TARGETS.error(tokens=tokens)

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Tensor | None:
        targets: Any = super()._get_num_items_in_batch(*args, **kwargs)
        # An integer: FSDP2 casts floats that a model is given to bfloat16, which has no 2,044.
        # Documents of one token have no target: their loss is 0, not 0/0.
        return None if targets is None else targets.long().clamp(min=1)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of a micro-batch's documents on all ranks.

        Tokens of documents count even if they have the id of padding. Fillers do not count.
        """
        if self.args.include_num_input_tokens_seen != "no":
            self.state.num_input_tokens_seen += inputs[PLAN_KEY].document_tokens

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Move the inputs to the device and bind their plan to this rank."""
        inputs = super()._prepare_inputs(inputs)
        plan = inputs.get(PLAN_KEY)
        if not isinstance(plan, MicroBatchPlan):
            return inputs
        target_rows = inputs.pop(TARGET_ROWS, None)
        is_training = self.model.training
        upcoming = self._upcoming if is_training else self._upcoming_evaluated
        bound = upcoming.bind(plan)
        bound.target_rows = target_rows
        if is_training:
            self._log_choice(bound.plan)
            self.meter.count(bound)
            self._costs.count(bound.plan)
        return {**inputs, PLAN_KEY: bound}

    # Training

    def _prepare_training(self, checkpoint: str | None) -> None:
        groups = self.dispatcher.groups
        order = resuming.data_order(
            self, self.dispatcher, self._loaders, packs=self._packs, shares=self._shares
        )
        if self._loaders.prefixes(self.train_dataset, shares=self._shares) is not None:
            repeat_target_rows(self.model)
        place = resuming.agreed_place(order, checkpoint, self.args, groups)
        if self._packs:
            self._loaders.check_evaluation_data()
        self._costs.resume(None if checkpoint is None else Path(checkpoint))
        # A resumed training goes on with the micro-batches of its checkpoint.
        is_new = place.order is order
        if is_new and self._packs:
            chosen = resuming.chosen_order(
                order, self, self.dispatcher, self._loaders, shares=self._shares
            )
            place = place._replace(order=chosen)
        self._progress = DataProgress(place)

    def _end_training(self) -> None:
        self._upcoming.close()
        self._upcoming = UpcomingBatches(self.dispatcher)
        self._epoch_iterator = None

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Trainer.training_step`, and prepare the next micro-batch."""
        loss = super().training_step(model, *args, **kwargs)
        # The device still computes: Trainer waits for this loss later.
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
        evaluates = return_outputs and not self.model.training
        rows_before = self._evaluated.seen
        # The head gives the rows' logits to this function, a chunk at a time.
        plan.ran.watch = self._evaluated.see if evaluates else None
        result = super().compute_loss(
            model,
            inputs,
            return_outputs=return_outputs,
            num_items_in_batch=num_items_in_batch,
            **kwargs,
        )
        if self.model.training:
            self._begin_backward()
        self._check_plan_arrived(plan)
        if evaluates and isinstance(result[1], dict):
            logits = result[1].get("logits")
            # Where the head gave no rows, the loss was computed from all logits at once.
            if self._evaluated.seen == rows_before and isinstance(logits, Tensor):
                self._evaluated.see_all(logits[0], inputs["shift_labels"][0])
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
        """Evaluate with means over the targets of all micro-batches.

        The output has predictions if the caller wants more than the loss.
        """
        # 1. Evaluate, and collect sums over targets, and predictions if they are wanted.
        arguments = arguments_by_name(super(PlannedTraining, self).evaluation_loop, args, kwargs)
        prefix = arguments.get("metric_key_prefix", "eval")
        loss_alone = arguments.get("prediction_loss_only")
        if loss_alone is None:
            loss_alone = self.args.prediction_loss_only
        predictions = None if loss_alone else self._new_predictions(arguments["dataloader"])
        self._evaluated = Evaluated(predictions)
        output = super().evaluation_loop(**arguments)
        if not self._evaluated.micro_batches:
            return output
        # 2. Means over all targets take the place of means over micro-batches.
        if output.metrics is not None:
            for name, mean in self._evaluated.means(self.dispatcher.groups).items():
                output.metrics[f"{prefix}_{name}"] = mean
        if predictions is None:
            return output
        # 3. Predictions by document, and the caller's metrics of them.
        values, labels = predictions.joined()
        metrics = dict(output.metrics or {})
        if self.compute_metrics is not None:
            computed: Any = self.compute_metrics(
                EvalPrediction(predictions=values, label_ids=labels)
            )
            for name, value in denumpify_detensorize(computed).items():
                prefixed = name if name.startswith(f"{prefix}_") else f"{prefix}_{name}"
                metrics[prefixed] = value
        return output._replace(predictions=values, label_ids=labels, metrics=metrics)

    def _new_predictions(self, loader: EvaluationLoader) -> Predictions:
        """Return an empty collection of predictions for a loader's documents."""
        function = self.preprocess_logits_for_metrics
        sampler = loader.sampler
        if function is None:
            raise Run.ALL_LOGITS.error()
        if sampler is None:
            raise Run.NO_ORDER.error()
        documents: Any = loader.dataset
        return Predictions(
            function, sampler.spans_in_order(), len(documents), self.dispatcher.groups
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
        self._at(f"micro-batch {self._evaluated.micro_batches + 1} of an evaluation")
        targets: Any = super()._get_num_items_in_batch([inputs], self.args.device)  # may be 0
        predictions = self._evaluated.predictions
        if predictions is not None:
            predictions.begin(inputs[PLAN_KEY], inputs["shift_labels"][0])
        loss, _, _ = super().prediction_step(model, inputs, True, *args, **kwargs)
        if predictions is not None:
            predictions.end()
        assert loss is not None
        self._upcoming_evaluated.prepare_next()  # before the host waits for the loss
        # The loss of all ranks is the mean over ranks of `loss`.
        loss_sum = (loss * targets / self.dispatcher.groups.ranks).item()
        self._evaluated.add(loss_sum, targets.item())
        return loss, None, None

    def predict(self, *args: Any, **kwargs: Any) -> PredictionOutput:
        """Return what `preprocess_logits_for_metrics` makes of each document's logits.

        Predictions and labels are [documents, longest, ...], with -100 beyond a document's end.
        Labels are unshifted: the prediction of a token is for the label after it. The first label
        of a document is -100.
        """
        waits = self.dispatcher.groups.waits
        try:
            with waits.watched("the start of a prediction"):
                return super().predict(*args, **kwargs)
        finally:
            self._upcoming_evaluated.close()

    # Saving and resuming

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[int, int]:
        """Set up the state as Trainer does.

        Return the first epoch and its completed micro-batches.
        """
        first_epoch, _ = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, *args, **kwargs
        )
        place = self._progress.start
        if self.args.ignore_data_skip:
            place = DataPlace(place.order, first_epoch)
        elif place.steps == num_update_steps_per_epoch:  # the checkpoint is of the end of a pass
            place = DataPlace(place.order, place.epoch + 1)
        self._progress = DataProgress(place)
        if self.state.global_step >= max_steps:
            if self.is_world_process_zero():
                logger.warning(
                    "nothing is left to train: the checkpoint is of step %s, and training ends at "
                    "step %s. Raise max_steps or num_train_epochs, which count from the first step "
                    "of the first run",
                    self.state.global_step,
                    max_steps,
                )
            return num_train_epochs, 0  # Trainer looks at the number of steps after a step
        return place.epoch, place.steps * self.args.gradient_accumulation_steps

    def _training_data(self) -> str:
        dataset: Any = self.train_dataset
        if not self._packs or dataset is None:
            return super()._training_data()
        if is_stream(dataset):
            return "a stream of documents"
        documents = counted(len(dataset), "document")
        tokens = self._loaders.known_tokens(dataset)
        return documents if tokens is None else f"{documents} of {counted(tokens, 'token')}"

    def _save_place(self, folder: Path) -> None:
        self._progress.save(folder, self.state.global_step)
        self._costs.save(folder)


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
