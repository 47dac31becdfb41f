"""DistCAMixin: planned core attention for transformers' Trainer and its subclasses."""

import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from hf_distca.collator.limits import IGNORED_TARGET
from hf_distca.collator.refusals import Data
from hf_distca.collator.streams import EpochStream, StreamPacker
from hf_distca.dispatch.bound import Ran
from hf_distca.models.decoder import mixing_layers
from hf_distca.patches.head import count_hits
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.pool.launch import TOKEN_FILE, open_pool
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer import parallel, resuming
from hf_distca.trainer.arguments import DistCAArguments
from hf_distca.trainer.assembly import prepare_trainer
from hf_distca.trainer.card import TAG, add_to_card
from hf_distca.trainer.console import follow_log_level, log_choice, shorten_console
from hf_distca.trainer.costs import LearnedCosts
from hf_distca.trainer.loaders import EvaluationLoader, PackedLoaders, UpcomingBatches, is_stream, lengths_read_on_host
from hf_distca.trainer.metrics import PREFIX, Remedies, StepMeter
from hf_distca.trainer.optimizers import check_optimizer
from hf_distca.trainer.processes import ReadingProcesses
from hf_distca.trainer.refusals import Run, by_name, check_given, check_objects
from hf_distca.trainer.tracing import StepTracer

logger = logging.getLogger(__name__)

ACCURACY = "mean_token_accuracy"
"""Name in TRL, without its prefix, of the share of targets that the model would have chosen."""

if TYPE_CHECKING:
    _Trainer = Trainer
else:  # a subclass names the trainer
    _Trainer = object


class DistCAMixin(_Trainer):
    """Planned core attention for `transformers.Trainer` or a subclass; put the mixin before the trainer.

    ```python
    class MyTrainer(hf_distca.DistCAMixin, OthersTrainer): ...
    ```

    The trainer keeps its own arguments and methods. Its `args` are a dataclass of `DistCAArguments` and the trainer's
    own arguments. The data set, as the trainer prepares it, has examples with `input_ids` and optionally `labels`
    (unshifted, -100 where no loss is wanted). Loss and gradients are those of one process on the same documents.

    - A data set with a length is packed into micro-batches over all ranks, and each micro-batch is planned as a whole.
    - A streaming data set is packed by each rank. Ranks exchange lengths, and only core attention moves.
    - With a padding-free `data_collator`, such as transformers' `DataCollatorWithFlattening`, the trainer makes the
      batches, and only core attention moves.

    Raises:
        ValueError: on every rank before training, with the reason, if this model or data set cannot be trained.
    """

    args: DistCAArguments
    model: PreTrainedModel

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        named = by_name(super().__init__, args, kwargs)
        has_settings = isinstance(named.get("args"), DistCAArguments)
        if has_settings:
            named["args"].serve_if_server()  # before a server loads anything; its arguments are incomplete
        check_objects(named)
        if has_settings:
            named = self._prepare_given(named)
        check_given(type(self), named)
        parallel.share_on_cpu(named["args"], named.get("model"))
        self._packs = named.get("data_collator") is None  # else the collator makes the batches
        super().__init__(**named)
        follow_log_level(self.args)
        self.dispatcher = dispatcher = prepare_trainer(self)
        self.pool: Pool | None = None
        if self.args.attention_servers != 0:
            token_file = self.args.attention_server_token_file or f"{self.args.output_dir}/{TOKEN_FILE}"
            self.pool = open_pool(dispatcher, self.args, self.args.attention_server_launch, token_file)
        self._costs = LearnedCosts(dispatcher)
        self.meter = StepMeter(dispatcher, self.model, self.pool, self.args.world_size, self._costs)
        self._tracer = StepTracer(dispatcher, self.args) if self.args.trace_steps else None
        self._progress = resuming.DataProgress(resuming.DataPlace({}))
        for callback in filter(None, (self.meter, self._costs, self._tracer)):
            self.add_callback(callback)
        shorten_console(self.callback_handler)
        self._chose = False  # whether the planner's choice has been logged
        self._remedies = Remedies(self.args, ping_pong=dispatcher.settings.ping_pong)
        self._epoch_iterator: Iterator[Any] | None = None  # of the present pass over the training data
        self._loaders = PackedLoaders(self, dispatcher)
        self._processes = ReadingProcesses(
            self.args.dataloader_num_workers,
            self.args.process_index,
            self.args.exchange_timeout,
            self.args.dataloader_multiprocessing_context,
        )
        self._evaluation_loaders: dict[int, DataLoader[Any]] = {}  # by the id of the trainer's own data set
        self._upcoming = UpcomingBatches(dispatcher, self._processes)
        self._upcoming_evaluated = UpcomingBatches(dispatcher, self._processes)  # of the present evaluation
        self._mixes = bool(mixing_layers(self.model))  # rows of a document other than by attention
        self._wrapped: nn.Module | None = None  # the wrapped model of the last training step
        self._evaluated: list[tuple[float, float]] = []  # this rank's sum of losses and all targets, of micro-batches
        self._hits: list[Tensor] = []  # `Ran.hits` of the same micro-batches

    def _prepare_given(self, named: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the trainer is built with; a subclass may load what they name."""
        return named

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
        capacity, bins = resuming.capacity_and_bins(self._progress.start.order if is_training else {})
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
            if any(dataset is each for each in (own, *(own.values() if isinstance(own, dict) else ()))):
                self._evaluation_loaders[id(dataset)] = loader  # whose processes may live on
        planned = self._packs and not isinstance(loader.dataset, StreamPacker)
        self._upcoming_evaluated.close()
        self._upcoming_evaluated = UpcomingBatches(self.dispatcher, self._processes)
        return EvaluationLoader(loader, self._upcoming_evaluated, planned=planned)

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any
    ) -> tuple[list[dict[str, Any]], Tensor | int | None]:
        """Return the planned micro-batches of an optimizer step and the number of targets on all ranks."""
        if self._tracer is not None:
            self._tracer.begin_step(self.state.global_step + 1)
        begins = epoch_iterator is not self._epoch_iterator
        if begins:
            self._epoch_iterator = epoch_iterator
            self._progress.begin_pass(self.state.global_step)
        self._at("the loading of data for step {step}")
        planned = self._packs and not is_stream(self.train_dataset)
        batches = self._upcoming.fetch(epoch_iterator, num_batches, planned=planned)
        if begins and not batches and self.state.global_step == 0:  # on every rank
            raise Data.EMPTY.error(name="train_dataset")
        if self.pool is not None and batches:  # else a stream has ended: Trainer asks again until max_steps
            self.pool.refresh()
        taken, targets = super().get_batch_samples(iter(batches), len(batches), *args, **kwargs)
        if not planned and batches and self.state.global_step == 0:
            self._check_first_targets(batches)
        return taken, targets

    def _check_first_targets(self, batches: list[dict[str, Any]]) -> None:
        """Raise ValueError on every rank if no document of the first optimizer step has a target.

        A data set with a length is checked as a whole before training, and may begin with such a step. What streams
        and collators give is unknown before it comes. Later steps may have no target: their loss of 0 is a warning, as
        it is where a collator gives no labels that could be counted.
        """
        targets: Any = super()._get_num_items_in_batch(batches, self.args.device)  # of all ranks, may be 0
        if targets is not None and not targets.item():
            plans = [batch[PLAN_KEY] for batch in batches]
            raise Run.NO_TARGETS.error(tokens=sum(int(plan.tokens.sum()) - plan.fillers for plan in plans))

    def _get_num_items_in_batch(self, *args: Any, **kwargs: Any) -> Tensor | None:
        targets: Any = super()._get_num_items_in_batch(*args, **kwargs)
        # Documents of one token have no target: their loss is 0, not 0/0.
        return None if targets is None else targets.clamp(min=1)

    def _track_num_input_tokens(self, inputs: dict[str, Any]) -> None:
        """Count the tokens of all documents of a micro-batch, also those with the id of padding; but no fillers."""
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
                if not self._chose and self.args.process_index == 0 and self.args.world_size > 1:
                    log_choice(inputs[PLAN_KEY].plan, self.args, self.dispatcher.groups.ranks)
                self._chose = True
                self.meter.count(inputs[PLAN_KEY])
                self._costs.count(inputs[PLAN_KEY].plan)
        return inputs

    # Training

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as `Trainer.train` does; dedicated attention servers are released at the end.

        Raises:
            RuntimeError: Another rank failed. The message says which one and why.
            ValueError: on every rank, before training, if checkpoint, data or the model's state do not fit this run.
        """
        if self.args.num_train_epochs <= 0 and self.args.max_steps <= 0:
            raise Run.NO_STEPS.error(epochs=self.args.num_train_epochs, steps=self.args.max_steps)
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            if self.state.global_step:
                raise Run.SECOND_TRAINING.error(trainer=type(self).__name__)
            # The engine of an evaluation cannot train.
            self.model_wrapped, self.deepspeed = self.model, None
        parallel.forget_evaluation(self.model_wrapped, self.accelerator)
        groups = self.dispatcher.groups
        try:
            with groups.failures.reported("the start of training"), self._processes.explained():
                checkpoint = resuming.agreed_checkpoint(resume_from_checkpoint, self.args, self.accelerator, groups)
                resuming.warn_of_random_states(checkpoint, self.args, groups)
                order = resuming.data_order(self, self.dispatcher, self._loaders, packs=self._packs)
                place = resuming.agreed_place(order, checkpoint, self.args, groups)
                if self._packs:
                    self._loaders.check_evaluation_data()
                self._costs.resume(None if checkpoint is None else Path(checkpoint))
                if place.order is order and self._packs:  # a resumed training goes on with its micro-batches
                    place = place._replace(order=resuming.chosen_order(order, self, self.dispatcher, self._loaders))
                self._progress = resuming.DataProgress(place)
                return super().train(checkpoint, *args, **kwargs)
        finally:
            self._upcoming.close()
            self._upcoming, self._epoch_iterator = UpcomingBatches(self.dispatcher, self._processes), None
            if self.pool is not None:
                self.pool.close()

    def close(self) -> None:
        """Close this trainer's process groups, at the same point on every rank; only its model can be used again."""
        self.dispatcher.close()

    def _wrap_model(self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any) -> nn.Module:
        """Wrap the model as Trainer does; raise ValueError on every rank if the optimizer cannot step on shards."""
        if training:
            with self.dispatcher.groups.raised_together(in_world=True):
                check_optimizer(self)
        wrapped: nn.Module = super()._wrap_model(model, training, *args, **kwargs)
        return wrapped

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Trainer.training_step`, and prepare what comes next before Trainer waits for this loss."""
        if model is not self._wrapped:
            with self.dispatcher.groups.raised_together():
                if self.args.world_size > 1 and not parallel.is_wrapped(model, self.accelerator):
                    facts = {"processes": self.args.world_size, "strategy": self.accelerator.distributed_type}
                    raise Run.NOT_WRAPPED.error(model=type(model).__name__, **facts)
            self._wrapped = model
        self._section("forward")
        self._at("the forward of step {step}")
        loss = super().training_step(model, *args, **kwargs)
        self._section("between")
        self._at("the optimizer and callbacks of step {step}")
        self._upcoming.prepare_next()
        return loss

    def _at(self, place: str) -> None:
        """Note the part of the run that begins now, for messages about waits."""
        self.dispatcher.groups.waits.at(place.format(step=self.state.global_step + 1))

    def _section(self, name: str) -> None:
        if self._tracer is not None:
            self._tracer.section(name)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Return the loss over the targets of all ranks; raise ValueError if the plan did not reach attention."""
        plan = inputs[PLAN_KEY]
        if num_items_in_batch is None:  # evaluation of a trainer that takes the mean on each rank
            num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
        result = super().compute_loss(
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch, **kwargs
        )
        if self.model.training:
            self._section("backward")
            self._at("the backward of step {step}")
        if plan.ran.attentions == 0 or (self._mixes and plan.ran.mixing == 0):
            raise Run.LOST_PLAN.error(model=type(self.model).__name__, key=PLAN_KEY)
        if return_outputs and not self.model.training:
            self._count_hits(plan.ran, inputs, result[1])
        return result

    def _count_hits(self, ran: Ran, inputs: dict[str, Any], outputs: Any) -> None:
        """Note which targets of an evaluated micro-batch the model would have chosen, if its logits are known."""
        logits = outputs.get("logits") if isinstance(outputs, dict) else None
        if ran.hits is None and isinstance(logits, Tensor):  # the loss was computed from all logits at once
            count_hits(ran, IGNORED_TARGET, logits, inputs["shift_labels"])
        if ran.hits is not None:
            self._hits.append(ran.hits)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and add the figures of the micro-batches since the last log of a training step."""
        if "loss" in logs:
            steps = self.meter.steps
            figures = self.meter.figures()
            if self.args.process_index == 0:
                self._remedies.see(figures, steps)
                self._remedies.see_loss(logs["loss"])
            logs = {**logs, **{f"{PREFIX}{name}": figure for name, figure in figures.items()}}
        super().log(logs, *args, **kwargs)

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does; loss and token accuracy are exact means over all targets."""
        try:
            failures = self.dispatcher.groups.failures
            with failures.reported("the start of an evaluation"), self._processes.explained():
                return super().evaluate(*args, **kwargs)
        finally:
            self._upcoming_evaluated.close()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate with the mean loss and the accuracy over the targets of all micro-batches."""
        # ZeRO-3 alone prepares a model without its optimizer; DDP has nothing to prepare.
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        early = sharded and not parallel.gathers_parameters(self.accelerator)
        if early and not parallel.is_wrapped(self.model_wrapped, self.accelerator):
            raise Run.EARLY_EVALUATION.error()
        self._evaluated, self._hits = [], []
        with self.meter.paused():
            output = super().evaluation_loop(*args, **kwargs)
        self._at("the end of an evaluation")
        if self._evaluated and output.metrics is not None:
            loss, targets = map(sum, zip(*self._evaluated, strict=True))
            hits = torch.stack(self._hits).sum(0).tolist() if self._hits else [0, 0]
            of_ranks = self.dispatcher.groups.all_gather((loss, *hits))
            total, correct, counted = map(sum, zip(*of_ranks, strict=True))
            # Trainer's mean over batches has the only such name, with the prefix that the caller chose.
            for name in [name for name in output.metrics if name.endswith("_loss")]:
                output.metrics[name] = total / max(targets, 1)
                # Otherwise the model has several losses, or none of logits; TRL's trainer counts for itself.
                if counted == targets > 0:
                    output.metrics[f"{name.removesuffix('_loss')}_{ACCURACY}"] = correct / targets
        return output

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, *args: Any, **kwargs: Any
    ) -> tuple[Tensor | None, None, None]:
        """Add one micro-batch to the evaluation's loss."""
        self._at(f"micro-batch {len(self._evaluated) + 1} of an evaluation")
        targets: Any = super()._get_num_items_in_batch([inputs], self.args.device)  # may be 0
        loss, _, _ = super().prediction_step(model, inputs, True, *args, **kwargs)
        assert loss is not None
        self._upcoming_evaluated.prepare_next()  # before the host waits for the loss
        # The loss of all ranks is the mean over ranks of `loss`.
        self._evaluated.append(((loss * targets / self.dispatcher.groups.ranks).item(), targets.item()))
        return loss, None, None

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise NotImplementedError: the plan spreads a document's rows over ranks."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot return predictions for each document, because the rows of a document lie "
            "on several ranks. Use evaluate() for the exact loss and token accuracy, or run the trained model outside "
            "the trainer"
        )

    # Saving and resuming

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, *args: Any, **kwargs: Any
    ) -> tuple[int, int]:
        """Set up the state as Trainer does; return the first epoch and its completed micro-batches."""
        epochs, _ = super()._init_training_state(max_steps, num_update_steps_per_epoch, *args, **kwargs)
        place = self._progress.start
        if self.args.ignore_data_skip:
            place = resuming.DataPlace(place.order, epochs)
        elif place.steps == num_update_steps_per_epoch:
            place = resuming.DataPlace(place.order, place.epoch + 1)
        self._progress = resuming.DataProgress(place)
        if self.state.global_step >= max_steps and self.is_world_process_zero():
            logger.warning(
                "nothing is left to train: the checkpoint is of step %s, and training ends at step %s. Raise "
                "max_steps or num_train_epochs, which count from the first step of the first run",
                *(self.state.global_step, max_steps),
            )
        return place.epoch, place.steps * self.args.gradient_accumulation_steps

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        folder = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._at(f"the saving of {folder.name}")
        with resuming.disk_errors_named(folder):
            if self.args.should_save:
                self._progress.save(folder, self.state.global_step)
                self._costs.save(folder)
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False, **kwargs: Any) -> None:
        """Save the whole model for `from_pretrained()`; every rank calls it, and rank 0 gathers shards on its host."""
        with ExitStack() as around:
            around.enter_context(self.dispatcher.groups.waits.watched("the saving of the model"))
            if not _internal_call or output_dir is None:  # not a checkpoint
                around.enter_context(parallel.whole_weights(self.accelerator, self.deepspeed))
                around.enter_context(resuming.disk_errors_named(Path(output_dir or str(self.args.output_dir))))
            super().save_model(output_dir, _internal_call, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the trainer's model card, and add how hf_distca trained the model."""
        named = by_name(super().create_model_card, args, kwargs)
        tags = named.get("tags") or []
        super().create_model_card(**{**named, "tags": [*([tags] if isinstance(tags, str) else tags), TAG]})
        if self.is_world_process_zero():
            path = Path(str(self.args.output_dir)) / "README.md"
            add_to_card(path, self.args, self.model, self.accelerator, self.dispatcher.groups.ranks)
