"""PlannedTraining: what a training with planned core attention needs, whatever its batches are.

It prepares model and dispatcher, opens the pool, explains waits and failures of ranks, and logs
figures. Two mixins add the batches: `DistCAMixin` packs documents, and with `DistCAPaddedMixin` the
model takes padded batches.
"""

import inspect
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput

from hf_distca.checks.run_rules import Run
from hf_distca.collator.documents import is_stream
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.dispatcher import Dispatcher
from hf_distca.models.decoder import mixing_layers
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.planner.settings import UNBALANCED
from hf_distca.pool.launch import open_pool
from hf_distca.profiling.costs import PROFILE_FILE
from hf_distca.run import RunSpec
from hf_distca.timeline.tracing import StepTracer
from hf_distca.trainer import parallel, resuming
from hf_distca.trainer.arguments import DistCAPaddedArguments
from hf_distca.trainer.assembly import prepare_trainer
from hf_distca.trainer.launch_facts import check_given, check_optimizer, check_training
from hf_distca.trainer.loaders import batch_timeout, warn_of_forks
from hf_distca.trainer.metrics import PREFIX, Remedies, StepMeter, shorten_console
from hf_distca.units import counted
from hf_distca.version import __version__

logger = logging.getLogger(__name__)

LIBRARY = "hf_distca"
"""Name of the logger above those of all modules of hf_distca."""
PASSIVE = "passive"
"""Value of `log_level` that leaves levels as they are."""
TAG = "hf_distca"
"""Tag of the model card."""
NAMES = {"ddp": "DDP", "fsdp2": "FSDP2", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}
"""Strategies, as the card names them."""
NO_NAME = re.compile(r"\b(?:an unknown|the None|the generator) dataset\.")
"""What transformers writes of data without a name."""
BATCH_SIZES = re.compile(r"^- (?:total_)?(?:train|eval)_batch_size: .*\n", re.MULTILINE)
"""Lines of transformers about numbers of examples, which packed documents do not have."""
PARAGRAPH = """
## Training with hf_distca

hf_distca {version} packed the documents without padding
and balanced their core attention over ranks.

- Data: {data}
- Ranks: {ranks}, under {strategy}
- `tokens_per_rank`: {tokens_per_rank:,}, so that a micro-batch has up to {tokens:,} tokens
- `document_layout`: {document_layout}
"""
STEP = "- Optimizer step: {micro_batches}, up to {tokens:,} tokens\n"
"""A further line, where a step has planned micro-batches of packed documents."""

if TYPE_CHECKING:
    _Trainer = Trainer
else:  # a subclass names the trainer
    _Trainer = object


class PlannedTraining(_Trainer):
    """Part of a planned training that packed documents and padded batches have in common."""

    packs_documents: ClassVar[bool]
    """Whether the trainer packs documents. Otherwise it gets padded batches."""
    _packs: bool = False
    """Whether hf_distca packs documents here; not those of a custom collator."""
    args: DistCAPaddedArguments
    model: PreTrainedModel
    dispatcher: Dispatcher

    if not TYPE_CHECKING:  # checkers of types and editors see the trainer's own constructor

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._initialize(arguments_by_name(super().__init__, args, kwargs))

    def _initialize(self, arguments: dict[str, Any]) -> None:
        """Check the arguments, build the trainer, and prepare its planned training."""
        raise NotImplementedError

    def _initialize_trainer(self, arguments: dict[str, Any]) -> None:
        """Call the constructor of the trainer that follows the mixin."""
        super().__init__(**arguments)

    def _checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the trainer is built with, or raise ValueError.

        Args:
            arguments: arguments of the trainer's `__init__` by name.
        """
        if isinstance(arguments.get("args"), DistCAPaddedArguments):
            # Ends a process that does not train, whose arguments are incomplete.
            arguments["args"].serve_if_server()
        check_given(type(self), arguments, packs=self.packs_documents)
        arguments = self._prepare_arguments(arguments)
        parallel.share_on_cpu(arguments["args"], arguments.get("model"))
        return arguments

    def _prepare_arguments(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that the trainer is built with.

        A subclass may load the model or the data that they name.
        """
        return arguments

    def _prepare_planned(self) -> None:
        """Prepare the model of a trainer that is built, and everything that a training needs.

        A collective.
        """
        args = self.args
        follow_log_level(args)
        self.dispatcher = dispatcher = prepare_trainer(self, packs=self.packs_documents)
        folder = Path(str(args.output_dir))
        if args.remote_workers:
            open_pool(dispatcher, args.attention_servers, args.attention_server_launch, folder)
        self.meter = StepMeter(dispatcher, self.model, args.world_size)
        self.add_callback(self.meter)
        self._continuation = resuming.Continuation()
        self.add_callback(self._continuation)
        self._tracer: StepTracer | None = None
        if args.trace_steps:
            self._tracer = StepTracer(
                dispatcher, args.trace_steps, folder, processes=args.world_size
            )
            self.add_callback(self._tracer)
        shorten_console(self.callback_handler)
        self._has_logged_choice = False  # of the planner
        self._remedies = Remedies(args, ping_pong=dispatcher.settings.may_ping_pong)
        warn_of_forks(args)
        self._wrapped: nn.Module | None = None  # the wrapped model of the last training step
        # Whether layers mix the rows of a document otherwise than by attention.
        self._mixes = bool(mixing_layers(self.model))

    # Training

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trainer's loader, which does not wait for ever for a batch."""
        loader: Any = super()._get_dataloader(*args, **kwargs)
        base = loader.base_dataloader
        if base.num_workers > 0:
            base.timeout = batch_timeout(self.args)
        return loader

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as `Trainer.train` does; remote workers are released at the end.

        Raises:
            RuntimeError: Another rank failed. The message says which one and why.
            ValueError: on every rank, before training, if checkpoint, data or the model's state do
                not fit this run.
        """
        check_training(self)
        if self.optimizer is None and self.args.learning_rate == 0:
            logger.warning("learning_rate=0 is set, so that training changes no weight")
        if self.is_deepspeed_enabled and self.deepspeed is not None:
            # The engine of an evaluation cannot train.
            self.model_wrapped = self.model
            self.deepspeed = None
        parallel.forget_evaluation(self.model_wrapped, self.accelerator)
        groups = self.dispatcher.groups
        try:
            with groups.waits.watched("the start of training"):
                checkpoint = resuming.agreed_checkpoint(resume_from_checkpoint, self)
                with self._continuation.of(checkpoint, self.args):
                    self._prepare_training(checkpoint)
                    return super().train(checkpoint, *args, **kwargs)
        finally:
            self._end_training()
            if self.dispatcher.remote is not None:
                self.dispatcher.remote.close()

    def _prepare_training(self, checkpoint: str | None) -> None:
        """Check the data, and find the place from which a resumed training reads. A collective."""

    def _end_training(self) -> None:
        """Release what a training used, also after an error."""

    def close(self) -> None:
        """Close this trainer's process groups, at the same point on every rank.

        Only its model can be used again.
        """
        self.dispatcher.close()

    def _wrap_model(
        self, model: nn.Module, training: bool = True, *args: Any, **kwargs: Any
    ) -> nn.Module:
        """Wrap the model as Trainer does.

        Raise ValueError on every rank if the optimizer cannot step on shards.
        """
        if training:
            with self.dispatcher.groups.raised_together(in_world=True):
                check_optimizer(self)
        wrapped: nn.Module = super()._wrap_model(model, training, *args, **kwargs)
        return wrapped

    def _begin_step(self) -> None:
        """Note that an optimizer step begins, before its batches are fetched."""
        if self._tracer is not None:
            self._tracer.begin_step(self.state.global_step + 1)
        self._at("the loading of data for step {step}")

    def training_step(self, model: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        """Run `Trainer.training_step` with a model that is wrapped for all ranks."""
        if model is not self._wrapped:
            with self.dispatcher.groups.raised_together():
                self._check_is_wrapped(model)
            self._wrapped = model
        self._section("forward")
        self._at("the forward of step {step}")
        loss = super().training_step(model, *args, **kwargs)
        self._section("between")
        self._at("the optimizer and callbacks of step {step}")
        return loss

    def _check_is_wrapped(self, model: nn.Module) -> None:
        """Raise ValueError if several ranks would train this model each alone."""
        if self.args.world_size > 1 and not parallel.is_wrapped(model, self.accelerator):
            raise Run.NOT_WRAPPED.error(
                model=type(model).__name__,
                processes=self.args.world_size,
                strategy=self.accelerator.distributed_type,
            )

    def _check_plan_arrived(self, plan: BoundPlan) -> None:
        """Raise ValueError if a model has run without passing its plan on to all layers."""
        if plan.ran.attentions == 0 or (self._mixes and plan.ran.mixing == 0):
            raise Run.LOST_PLAN.error(model=type(self.model).__name__, key=PLAN_KEY)
        if plan.target_rows is not None and not plan.ran.selected_targets:
            raise Run.LOST_TARGETS.error(model=type(self.model).__name__)

    def _begin_backward(self) -> None:
        """Note that the backward of a micro-batch begins."""
        self._section("backward")
        self._at("the backward of step {step}")

    def _log_choice(self, plan: MicroBatchPlan) -> None:
        """Log the planner's choice of the first micro-batch."""
        is_first_process = self.args.process_index == 0
        if not self._has_logged_choice and is_first_process and self.args.world_size > 1:
            log_choice(plan, self.args, self.dispatcher.groups.ranks)
        self._has_logged_choice = True

    def _at(self, place: str) -> None:
        """Note the part of the run that begins now, for messages about waits.

        Args:
            place: name of the part; `{step}` in it stands for the number of the present step.
        """
        self.dispatcher.groups.waits.at(place.format(step=self.state.global_step + 1))

    def _section(self, name: str) -> None:
        """Begin a section of the step in a trace, if steps are traced."""
        if self._tracer is not None:
            self._tracer.section(name)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log, and add the figures of the micro-batches since the last log of a training step."""
        if "loss" in logs:
            steps = self.meter.steps
            figures = self.meter.figures()
            if self.args.process_index == 0:
                self._remedies.see(figures, steps)
                if self.packs_documents:  # losses of other trainers may be 0
                    self._remedies.see_loss(logs["loss"])
            prefixed = {f"{PREFIX}{name}": figure for name, figure in figures.items()}
            logs = {**logs, **prefixed}
        super().log(logs, *args, **kwargs)

    # Evaluation

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate as `Trainer.evaluate` does; an error names the rank that failed."""
        with self.dispatcher.groups.waits.watched("the start of an evaluation"):
            return super().evaluate(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Evaluate outside the time of training."""
        # FSDP, ZeRO-1 and ZeRO-2 prepare a model only together with its optimizer. ZeRO-3 can
        # prepare the model alone, and DDP has nothing to prepare.
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        needs_optimizer = is_sharded and not parallel.gathers_parameters(self.accelerator)
        if needs_optimizer and not parallel.is_wrapped(self.model_wrapped, self.accelerator):
            raise Run.EARLY_EVALUATION.error()
        with self.meter.paused():
            output = super().evaluation_loop(*args, **kwargs)
        self._at("the end of an evaluation")
        return output

    # Saving and resuming

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Warn of weights that a loaded checkpoint lacks, except of weights tied to loaded ones."""
        missing = resuming.without_tied(self.model, load_result.missing_keys)
        super()._issue_warnings_after_load(load_result._replace(missing_keys=missing))

    def _save_checkpoint(self, model: nn.Module, trial: Any, *args: Any, **kwargs: Any) -> None:
        output_dir = Path(self._get_output_dir(trial=trial))
        folder = output_dir / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._at(f"the saving of {folder.name}")
        with resuming.full_disk_named(folder):
            if self.args.should_save:
                self._save_place(folder)
            super()._save_checkpoint(model, trial, *args, **kwargs)

    def _save_place(self, folder: Path) -> None:
        """Save the place in the data, and corrected costs, in the folder of a checkpoint."""

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False, **kwargs: Any
    ) -> None:
        """Save the whole model for `from_pretrained()`.

        Every rank calls it, and rank 0 gathers shards on its host.
        """
        is_of_checkpoint = _internal_call and output_dir is not None
        with ExitStack() as contexts:
            contexts.enter_context(self.dispatcher.groups.waits.watched("the saving of the model"))
            if not is_of_checkpoint:
                folder = Path(output_dir or str(self.args.output_dir))
                contexts.enter_context(parallel.whole_weights(self.accelerator, self.deepspeed))
                contexts.enter_context(resuming.full_disk_named(folder))
            super().save_model(output_dir, _internal_call, **kwargs)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the trainer's model card, and add how hf_distca trained the model."""
        arguments = arguments_by_name(super().create_model_card, args, kwargs)
        tags = arguments.get("tags") or []
        if isinstance(tags, str):
            tags = [tags]
        arguments["tags"] = [*tags, TAG]
        folder = Path(str(self.args.output_dir))
        super().create_model_card(**arguments)
        if self.is_world_process_zero():
            complete_card(
                folder / "README.md",
                self._training_data(),
                self.dispatcher.run,
                self.args.gradient_accumulation_steps,
                packs=self._packs,
            )

    def _training_data(self) -> str:
        """Return the training data in a few words; no collective."""
        dataset: Any = self.train_dataset
        if dataset is None:
            return "unknown data"
        return "a stream of examples" if is_stream(dataset) else counted(len(dataset), "example")


# Arguments, messages and the model card


def arguments_by_name(
    method: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a bound method by name.

    Raise TypeError for one whose position has no name.
    """
    names = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    if len(args) > len(names):
        raise TypeError(
            f"{method.__qualname__} takes {len(names)} positional arguments, got {len(args)}; pass "
            "the others by name"
        )
    return {**dict(zip(names, args, strict=False)), **kwargs}


def follow_log_level(args: Any) -> None:
    """Give the library's messages the level that `log_level` names.

    Trainer does so for the messages of transformers.
    """
    library = logging.getLogger(LIBRARY)
    if args.log_level == PASSIVE:
        return
    library.setLevel(args.get_process_log_level())
    if not library.hasHandlers():  # Python then prints warnings and errors only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(f"[{LIBRARY}] %(message)s"))
        library.addHandler(handler)


def log_choice(plan: MicroBatchPlan, args: Any, ranks: int) -> None:
    """Log how the first micro-batch of a training is planned, and why."""
    summary, choice = plan.summary, plan.choice
    moved_mb = summary.exchange.bytes_bottleneck / 1e6
    balance = (summary.packed_max_over_mean, summary.max_over_mean, moved_mb)
    outcome = (
        "imbalance of core attention %.2f -> %.2f, %.1f MB through the busiest rank in a layer's "
        "forward"
    )
    if choice is None:
        chosen = f"document_layout={args.document_layout!r}, planning={args.planning.plain()}"
        reason = args.why_nothing_is_compared
        logger.info(
            f"plans follow {chosen}: the planner does not compare plans, because {reason}. First "
            f"micro-batch: {outcome}",
            *balance,
        )
        return
    group = (
        "each on one rank"
        if choice.group == 1
        else f"each on a group of at most {choice.group} of the {ranks} ranks"
    )
    even = (
        "not balanced further"
        if choice.tolerance >= UNBALANCED
        else f"balanced within {choice.tolerance:.0%}"
    )
    logger.info(
        "the planner chose for the first micro-batch: documents %s, core attention %s, "
        "nano-batches: %s. It is the fastest of the plans that were compared, by the costs in "
        "%s: %.1f ms for forward and backward, and %.1f ms if documents were packed in order; "
        f"{outcome}. Other micro-batches may get other choices",
        *(
            group,
            even,
            choice.nano_batches,
            args.device_profile or f"{args.output_dir}/{PROFILE_FILE}",
        ),
        *(choice.seconds * 1e3, choice.packed_seconds * 1e3, *balance),
    )


def complete_card(path: Path, data: str, run: RunSpec, accumulation: int, *, packs: bool) -> None:
    """Describe data and training in a model card that a trainer has just written.

    Args:
        data: the training data in a few words.
        accumulation: micro-batches of an optimizer step.
        packs: whether hf_distca packs documents, so that no batch has a number of examples.
    """
    plans = run.plans
    paragraph = PARAGRAPH.format(
        version=__version__,
        data=data,
        ranks=plans.ranks,
        strategy=NAMES[run.strategy],
        tokens_per_rank=plans.rows_per_rank,
        tokens=plans.capacity,
        document_layout=plans.document_layout,
    )
    text = NO_NAME.sub(f"{data}.", path.read_text(encoding="utf-8"))
    if packs:
        text = BATCH_SIZES.sub("", text)
        paragraph += STEP.format(
            micro_batches=counted(accumulation, "micro-batch", "micro-batches"),
            tokens=accumulation * plans.capacity,
        )
    path.write_text(text + paragraph, encoding="utf-8")
