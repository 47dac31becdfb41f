"""DistCATrainer: transformers' Trainer on packed documents with balanced core attention."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import DynamoBackend
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, seed_worker

from hf_distca.collator.documents import Columns
from hf_distca.collator.streams import StreamPacker
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.dispatch.padding_free import CollatorWithLengths
from hf_distca.patches.layers import plan_layers
from hf_distca.patches.model import check_reentrant, plan_settings
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.pool.launch import TOKEN_FILE, open_pool
from hf_distca.pool.rank.pool import Pool
from hf_distca.trainer.ahead import UpcomingBatches
from hf_distca.trainer.arguments import DistCATrainingArguments
from hf_distca.trainer.data import (
    PlannedLoader,
    agreed_lengths,
    check_agreement,
    is_dispatched,
    packed_loader,
    unsharded,
)
from hf_distca.trainer.data_order import (
    CAPACITY,
    DataOrder,
    DataPlace,
    DataProgress,
    agreed_place,
    collated_order,
    packed_order,
    streamed_order,
)
from hf_distca.trainer.meter import StepMeter
from hf_distca.trainer.parallel import (
    forget_evaluation,
    gather_whole_layers,
    gathers_parameters,
    is_wrapped,
    whole_weights,
)

logger = logging.getLogger(__name__)


class DistCATrainer(Trainer):
    """Trains a causal language model on whole documents packed without padding, ranks in balance.

    A data set gives examples with `input_ids` and optionally `labels` (unshifted, -100 where no loss is
    wanted). The loss and gradients are those of one process on the same global batch.

    - A data set with a length is packed into global micro-batches that are planned as a whole.
    - A streaming data set is packed rank by rank; ranks exchange lengths and move only attention.
    - With a padding-free `data_collator` (transformers' DataCollatorWithFlattening) batches are made as
      Trainer makes them; likewise only attention moves.

    Args: those of `transformers.Trainer`, with `args` a DistCATrainingArguments.

    Raises:
        ValueError: model, arguments or data set cannot be trained so; says why, on every rank, before any
            work starts.
    """

    args: DistCATrainingArguments
    model: PreTrainedModel

    def __init__(
        self,
        model: nn.Module | None = None,
        args: DistCATrainingArguments | None = None,
        data_collator: Any = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, DistCATrainingArguments):
            raise ValueError(f"args must be DistCATrainingArguments, got {type(args).__name__}")
        if kwargs.get("compute_metrics") is not None or kwargs.get("preprocess_logits_for_metrics") is not None:
            raise ValueError(
                "compute_metrics needs logits document by document, but rows are spread over ranks as the plan "
                "says; evaluate() reports the exact token-weighted loss"
            )
        if kwargs.get("compute_loss_func") is not None:
            raise ValueError(
                "compute_loss_func would get targets that are already shifted; use the model's own loss, which takes "
                "shift_labels"
            )
        self._packs = data_collator is None
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
            if self._packs and getattr(args, name) != 1:
                raise ValueError(
                    f"{name}={getattr(args, name)} contradicts tokens_per_rank={args.tokens_per_rank}: a rank's batch "
                    "is one packed row of up to tokens_per_rank tokens; leave it at 1"
                )
        if self._packs and args.train_sampling_strategy not in ("random", "sequential"):
            raise ValueError(
                f"train_sampling_strategy={args.train_sampling_strategy!r} would be ignored: documents are packed by "
                "their lengths as it is, drawn at random or in order; choose 'random' or 'sequential'"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"this one process sees {args.n_gpu} GPUs, which Trainer would use as DataParallel; start one process "
                "per GPU: accelerate launch --num_processes N script.py"
            )
        super().__init__(model, args, data_collator, **kwargs)
        if self.accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
            raise ValueError(
                "torch.compile of a whole model leaves out planned attention and layers in which two nano-batches "
                "take turns, which is most of it; leave torch_compile=False and accelerate's --dynamo_backend at no, "
                "and compile modules inside the layers: for layer in model.model.layers: layer.mlp.compile()"
            )
        sizes = {"tensor": self.get_tp_size(), "context": self.get_cp_size(), "sequence": self.get_sp_size()}
        for kind, size in sizes.items():
            if size > 1:
                raise ValueError(
                    f"{kind} parallelism of size {size} divides what a plan already places; every rank must hold "
                    "whole rows of its own: leave it at 1"
                )
        settings = plan_settings(
            self.model, args, ranks=args.world_size, device=args.device, dtype=self._attention_dtype()
        )
        checkpointing: Any = args.gradient_checkpointing_kwargs or {}
        if args.gradient_checkpointing and checkpointing.get("use_reentrant"):
            check_reentrant(self.model)
        if not self.model_accepts_loss_kwargs:
            raise ValueError(
                f"{type(self.model).__name__} does not take num_items_in_batch, without which ranks with different "
                "numbers of targets have no exact loss"
            )
        self.dispatcher = Dispatcher(
            settings,
            args.device,
            keep_received=args.keep_received,
            keep_core_attention=args.keep_core_attention,
            timeout_s=args.exchange_timeout,
        )
        check_agreement(args, self.dispatcher.groups)
        self.pool: Pool | None = None
        if args.attention_servers != "0":
            self.pool = open_pool(
                self.dispatcher,
                args.attention_server_launch,
                address=args.attention_server_address,
                token_file=args.attention_server_token_file or f"{args.output_dir}/{TOKEN_FILE}",
                ranks_serve=args.ranks_serve,
                timeout_s=args.attention_server_timeout,
            )
        if settings.ping_pong:
            layers = plan_layers(self.model)
            if gathers_parameters(self.accelerator):
                gather_whole_layers(self.model, layers)
        self.meter = StepMeter(self.dispatcher, self.pool)
        self.add_callback(self.meter)
        # With the data set itself, so that its id stays its own.
        self._lengths: dict[int, tuple[Any, tuple[NDArray[np.int64], str]]] = {}
        self._progress = DataProgress()
        self.add_callback(self._progress)
        self._upcoming = UpcomingBatches(self.dispatcher)
        self._ended: Iterator[Any] | None = None
        self._wrapped: nn.Module | None = None  # the model that training steps were last known to be wrapped by
        self._evaluated_loss = self._evaluated_targets = 0.0

    def _attention_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else self.model.dtype

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """See `Trainer.train`. Dedicated attention servers are let go when it ends.

        Raises:
            RuntimeError: another rank failed; says which and why.
            ValueError: the documents that are left cannot be those that the checkpoint has not seen yet; says what
                must be set, on every rank, before any work starts. Or this trainer has trained before, under
                DeepSpeed; or nothing brings the gradients of ranks together.
        """
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            if self.state.global_step:
                raise ValueError(
                    "a trainer trains once under DeepSpeed, whose engine and optimizer end when train() begins again; "
                    "train all epochs in one call, or go on with a new DistCATrainer on the same model, whose "
                    "optimizer starts anew"
                )
            # An evaluation has made an engine that cannot train.
            self.model_wrapped, self.deepspeed = self.model, None
        forget_evaluation(self.model_wrapped, self.accelerator)
        try:
            with self.dispatcher.groups.failures.told():
                place = agreed_place(self._data_order(), resume_from_checkpoint, self.args, self.dispatcher.groups)
                self._progress.begin(place)
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            if self.pool is not None:
                self.pool.close()

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """See `Trainer.evaluate`; the loss is the mean over all targets."""
        with self.dispatcher.groups.failures.told():
            metrics: dict[str, float] = super().evaluate(*args, **kwargs)
            return metrics

    def _init_training_state(self, max_steps: int, steps_per_epoch: int, *args: Any) -> tuple[int, int]:
        """The epoch to begin with, and the micro-batches of it that are done, besides what Trainer sets up."""
        epochs, _ = super()._init_training_state(max_steps, steps_per_epoch, *args)
        place = self._progress.place
        if self.args.ignore_data_skip:
            place = DataPlace(place.order, epochs)
        elif place.steps == steps_per_epoch:
            place = DataPlace(place.order, place.epoch + 1)
        self._progress.begin(place)
        if self.state.global_step >= max_steps and self.is_world_process_zero():
            logger.warning(
                "nothing is left to train: the checkpoint is of step %s, and training ends at step %s; max_steps and "
                "num_train_epochs count from the very first step on",
                self.state.global_step,
                max_steps,
            )
        return place.epoch, place.steps * self.args.gradient_accumulation_steps

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if self.args.should_save:
            folder = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            self._progress.place.save(Path(self._get_output_dir(trial=trial)) / folder)
        super()._save_checkpoint(model, trial)

    # Data

    def _data_order(self) -> DataOrder:
        """What decides which documents each step trains on."""
        ranks = self.dispatcher.groups.ranks
        if not self._packs:
            return collated_order(self.args, ranks, self.train_dataset)
        if _is_stream(self.train_dataset):
            return streamed_order(self.args, ranks)
        return packed_order(self.args, ranks, *self._agreed_lengths(self.train_dataset))

    def _agreed_lengths(self, dataset: Any) -> tuple[NDArray[np.int64], str]:
        if id(dataset) not in self._lengths:
            self._lengths[id(dataset)] = (
                dataset,
                agreed_lengths(dataset, self._columns(), self.args, self.dispatcher.groups),
            )
        return self._lengths[id(dataset)][1]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """A loader of this rank's rows of the training data's micro-batches."""
        if self.train_dataset is None:
            raise ValueError("Trainer: training requires a train_dataset.")
        if not self._packs:
            with self._lengths_read_on_host(self.train_dataset):
                return super().get_train_dataloader()
        shuffle = self.args.train_sampling_strategy != "sequential"
        capacity = self._progress.place.order.get(CAPACITY, 0)  # none before training has begun
        return self._packed_dataloader(self.train_dataset, capacity=int(capacity), shuffle=shuffle)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """A loader of this rank's rows of the evaluation data's micro-batches."""
        dataset: Any = self.eval_dataset
        if eval_dataset is not None:
            dataset = dataset[eval_dataset] if isinstance(eval_dataset, str) else eval_dataset
        if not self._packs:
            with self._lengths_read_on_host(dataset):
                return PlannedLoader(super().get_eval_dataloader(eval_dataset), self.dispatcher)
        if dataset is None:
            raise ValueError("Trainer: evaluation requires an eval_dataset.")
        loader = self._packed_dataloader(dataset, shuffle=False)
        return PlannedLoader(loader, self.dispatcher) if _is_stream(dataset) else loader

    @contextmanager
    def _lengths_read_on_host(self, dataset: Any) -> Iterator[None]:
        """Loaders made inside tell the lengths of documents, read before their batches go to the device."""
        collator = self.data_collator
        if not is_dispatched(dataset, self.args):
            self.data_collator = CollatorWithLengths(collator)
        try:
            yield
        finally:
            self.data_collator = collator

    def _columns(self) -> Columns:
        """Columns of the data that count: with remove_unused_columns those alone that the model takes."""
        model_inputs: frozenset[str] | None = None
        if self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            model_inputs = frozenset(self._signature_columns or ())
        return Columns(self.args.length_column_name, model_inputs)

    def _packed_dataloader(self, dataset: Any, *, shuffle: bool, capacity: int = 0) -> DataLoader[Any]:
        args = self.args
        options: dict[str, Any] = {
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory,
            "persistent_workers": args.dataloader_persistent_workers,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        }
        columns = self._columns()
        if _is_stream(dataset):
            packer = StreamPacker(
                dataset,
                self.dispatcher.groups.ranks,
                self.dispatcher.groups.rank,
                args.tokens_per_rank,
                args.long_documents,
                columns,
            )
            return unsharded(DataLoader(packer, batch_size=None, **options), self.dispatcher.device, args)
        lengths, _ = self._agreed_lengths(dataset)
        capacity = capacity or args.world_size * args.tokens_per_rank
        return packed_loader(
            dataset, lengths, columns, args, self.dispatcher, options, capacity=capacity, shuffle=shuffle
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[dict[str, Any]], Tensor | None]:
        """The micro-batches of one optimizer step, planned, and the number of their targets on all ranks."""
        if epoch_iterator is self._ended:
            return [], None
        if self.pool is not None:
            self.pool.refresh()
        if self._packs and not _is_stream(self.train_dataset):
            batches = self._upcoming.fetch(epoch_iterator, num_batches)
        else:
            batches = self.dispatcher.plan_batches(list(islice(epoch_iterator, num_batches)), at_least=num_batches)
            if not batches:  # no rank has more in this epoch: nothing to ask one another about again
                self._ended = epoch_iterator
        self._upcoming.begin_step(batches)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> Tensor | None:
        targets: Any = super()._get_num_items_in_batch(batch_samples, device)
        # Documents of one token have no target: their loss is 0, not 0/0.
        return None if targets is None else targets.clamp(min=1)

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs on the device, their plan bound to this rank."""
        inputs = super()._prepare_inputs(inputs)
        if isinstance(inputs.get(PLAN_KEY), MicroBatchPlan):
            inputs = {**inputs, PLAN_KEY: self._upcoming.bind(inputs[PLAN_KEY])}
            if self.model_wrapped.training:
                self.meter.count(inputs[PLAN_KEY])
        return inputs

    # Steps

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """See `Trainer.training_step`; raises on every rank where ranks would train apart.

        The next micro-batch is bound before Trainer waits for this one's loss.
        """
        if model is not self._wrapped:
            error = None
            if self.args.world_size > 1 and not is_wrapped(model, self.accelerator):
                error = ValueError(
                    f"{type(model).__name__} is not wrapped for {self.args.world_size} ranks "
                    f"({self.accelerator.distributed_type}), so each would train apart; give the trainer a model that "
                    "no Accelerator has prepared, and call train()"
                )
            self.dispatcher.groups.raise_together(error)
            self._wrapped = model
        loss = super().training_step(model, *args, **kwargs)
        self._upcoming.bind_next()
        return loss

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The model's loss; raises if the plan did not reach its attention."""
        plan = inputs[PLAN_KEY]
        result = super().compute_loss(model, inputs, *args, **kwargs)
        if plan.ran.attentions == 0:
            raise ValueError(
                f"{type(self.model).__name__} did not hand {PLAN_KEY} to its attention layers, so nothing was "
                "exchanged and documents attended to one another; this model cannot train with planned attention"
            )
        return result

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, None, None]:
        """Add one micro-batch to the evaluation's loss."""
        targets = self._get_num_items_in_batch([inputs], self.args.device)
        loss, _, _ = super().prediction_step(model, inputs, True, ignore_keys)
        assert loss is not None
        assert targets is not None  # planned batches have some
        # The loss is this rank's sum over all ranks' targets, times the ranks, so that their mean is the loss.
        self._evaluated_loss += (loss * targets / self.args.world_size).item()
        self._evaluated_targets += targets.item()
        return loss, None, None

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Evaluate; the loss is the mean over all targets, however they are spread over micro-batches.

        Raises:
            ValueError: before training, where FSDP or ZeRO-1 and -2 prepare a model for training only.
        """
        needs_optimizer = self.is_fsdp_enabled or (
            self.is_deepspeed_enabled and not gathers_parameters(self.accelerator)
        )
        if needs_optimizer and not is_wrapped(self.model_wrapped, self.accelerator):
            raise ValueError(
                "evaluate() before train() is not possible under FSDP, ZeRO-1 and ZeRO-2, which prepare a model "
                "together with its optimizer; set eval_on_start=True to evaluate before the first training step"
            )
        self._evaluated_loss = self._evaluated_targets = 0.0
        with self.meter.paused():
            output = super().evaluation_loop(dataloader, description, True, ignore_keys, metric_key_prefix)
        total = sum(self.dispatcher.groups.all_gather(self._evaluated_loss))
        if self._evaluated_targets and output.metrics is not None:
            output.metrics[f"{metric_key_prefix}_loss"] = total / self._evaluated_targets
        return output

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Not available: rows are spread over ranks as the plan says, not document by document.

        Raises:
            NotImplementedError: always; says what to use.
        """
        raise NotImplementedError(
            "DistCATrainer gives no predictions document by document; evaluate() reports the exact loss, and the "
            "trained model predicts outside the trainer as any other"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model, so that `from_pretrained()` loads it; checkpoints may hold it in shards.

        Every rank calls it. Under FSDP and ZeRO-3, rank 0 gathers the weights in host memory.
        """
        is_checkpoint = _internal_call and output_dir is not None
        with nullcontext() if is_checkpoint else whole_weights(self.accelerator, self.deepspeed):
            super().save_model(output_dir, _internal_call)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the figures of the micro-batches since the last time where it is a training step's log."""
        if "loss" in logs:
            logs = {**logs, **self.meter.figures()}
        super().log(logs, start_time)


def _is_stream(dataset: Any) -> bool:
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
