"""Dispatcher: makes a collator's batch one whose core attention is planned and bound."""

import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import chain, zip_longest
from typing import Any

import torch

from hf_distca.batches.limits import NO_LIMITS, Limits
from hf_distca.batches.packed import REPLACED_BY_PLAN, checked_document_lengths, filler_batch
from hf_distca.checks.plan_rules import Plans
from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.bound import BoundPlan, Runtime
from hf_distca.dispatch.exchange import Exchange
from hf_distca.dispatch.features import BoundImages
from hf_distca.dispatch.host_copies import ActivationOffload, OffloadedForward
from hf_distca.dispatch.process_groups import EXCHANGE_CTAS, Groups
from hf_distca.dispatch.recorder import Recorder
from hf_distca.dispatch.remote import RemoteWorkers
from hf_distca.dispatch.world import RankMesh, check_alike
from hf_distca.kernels import get_kernel
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.planner.micro_batch import plan_placed
from hf_distca.planner.pods import pods_around
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.seconds import StepCosts
from hf_distca.run import RunSpec

logger = logging.getLogger(__name__)

BEYOND_TRAINED = (
    "a document has %d tokens, but max_position_embeddings of the model is %d: it may have learned "
    "nothing about later positions. Extend them by rope_parameters in the config (such as YaRN), "
    "cut documents with long_documents, or raise max_position_embeddings in the config if this "
    "training teaches them"
)
"""Warning about documents beyond the positions of a rotary embedding."""


class Dispatcher:
    """Planner and executor of the core attention of one training run.

    `make_dispatcher` makes a dispatcher for a model: a collective call of every process of the
    world, with the same settings.

    Args:
        settings: Settings of plans, the same on every rank.
        device: Device of this rank.
        mesh: Ranks that train together, `settings.ranks` in number. None takes all ranks.
        exchange_timeout: Seconds until an exchange with a rank that does not answer fails.

    Attributes:
        run: What is known of the training. A dispatcher that `make_dispatcher` made has it.
        limits: Limits of the model's tables, against which batches are checked when they are
            planned.
        remote: Remote workers for the plans that are bound from now on; None for none.
        offload: Host memory for activation checkpoints in plans that are bound from now on; None
            for none.

    Raises:
        ValueError: The settings differ between ranks or do not fit the number of ranks.
        ImportError: The package of the kernel is not installed. If only some ranks lack it, all
            raise ValueError.
    """

    def __init__(
        self,
        settings: PlanSettings,
        device: torch.device,
        mesh: RankMesh | None = None,
        *,
        exchange_timeout: float = 1800.0,
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.groups = Groups(self.device, exchange_timeout, mesh)
        self.recorder = Recorder(self.device)
        self.run: RunSpec
        self.limits: Limits = NO_LIMITS
        self.remote: RemoteWorkers | None = None
        self.offload: ActivationOffload | None = None
        self._warned_of_positions = False
        with self.groups.raised_together(in_world=True):
            # Leave SMs for the blocks of the exchange; a single rank exchanges nothing.
            sm_margin = EXCHANGE_CTAS if self.groups.ranks > 1 else 0
            self.kernel = get_kernel(settings.kernel, self.device, sm_margin=sm_margin)
        # Compare the kernel's own name: "auto" depends on the installed packages.
        mine: dict[str, Any] = {"attention_kernel": self.kernel.name}
        mine |= {field.name: getattr(settings, field.name) for field in fields(settings)}
        settings_of_ranks = self.groups.all_gather(mine)
        with self.groups.raised_together(in_world=True):
            if settings.ranks != self.groups.ranks:
                raise Plans.OTHER_RANKS.error(planned=settings.ranks, ranks=self.groups.ranks)
            check_alike(settings_of_ranks)
        self.groups.connect_pods(pods_around(settings, self.groups.rank))
        self.groups.connect_nodes(settings.nodes)
        self.exchange = Exchange(self.groups)

    def choose_by(self, costs: StepCosts | None) -> None:
        """Plan micro-batches by these costs from now on; every rank gives the same."""
        self.settings = replace(self.settings, costs=costs)

    @property
    def pod(self) -> range:
        """Ranks that plan together what lies on them: the smallest pod of this rank.

        Without costs these are all ranks.
        """
        has_costs = self.settings.costs is not None
        return self.groups.block if has_costs else range(self.settings.ranks)

    @property
    def settings_of_pod(self) -> PlanSettings:
        """Settings of plans of the ranks in `pod`."""
        has_pods = len(self.pod) < self.settings.ranks
        return self.settings.of_pod(self.pod) if has_pods else self.settings

    def costs(self) -> StepCosts | None:
        """Return the costs by which micro-batches are planned.

        None where the planner chooses nothing.
        """
        return self.settings.costs

    def see_length(self, longest: int) -> None:
        """Warn once, on rank 0, of a document that is longer than the model is made for."""
        trained = self.limits.trained_positions
        if trained is None or longest <= trained or self._warned_of_positions:
            return
        self._warned_of_positions = True
        if self.groups.members[self.groups.rank] == 0:
            logger.warning(BEYOND_TRAINED, longest, trained)

    def close(self) -> None:
        """Close the process groups of this dispatcher, on every rank at the same point.

        The model stays usable.
        """
        self.groups.close()

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Bind a plan to this rank, once per micro-batch.

        With remote workers, tasks are planned for them again.

        Raises:
            ValueError: The plan was made for other nodes than those of the dispatcher's settings.
        """
        ranks = plan.ranks
        nodes_of_pod = self.settings.of_pod(ranks).nodes
        for kind_plan in chain.from_iterable(nano.plans.values() for nano in plan.nano_batches):
            nodes = kind_plan.nodes and kind_plan.nodes[: len(ranks)]
            if nodes is not None and nodes != nodes_of_pod:
                raise PlannedStep.OTHER_NODES.error_here(planned=nodes, nodes=nodes_of_pod)
        self.see_length(
            max(int(nano_batch.layout.lengths.max()) for nano_batch in plan.nano_batches)
        )
        self.recorder.drain()
        remote = None
        if self.remote is not None:
            plan, remote = self.remote.bind(plan, self.settings)
        offload = None if self.offload is None else OffloadedForward(self.offload)
        runtime = Runtime(
            self.device, self.exchange, self.kernel, self.recorder, remote, offload=offload
        )
        bound = BoundPlan(plan, self.groups.rank, runtime)
        for modality, images in (plan.images or {}).items():
            bound.images[modality] = BoundImages(images, self.groups, ranks, self.device)
        return bound

    def plan_lengths(
        self, micro_batches: Sequence[Sequence[int]], at_least: int = 0
    ) -> list[MicroBatchPlan]:
        """Plan micro-batches from the lengths of the documents on this rank.

        Tokens stay on their rank. Ranks of a pod plan together, and all pods have equally many
        micro-batches.

        A collective call. A rank without documents in a micro-batch takes part with a single row
        without a target: models cannot run on zero rows.

        Args:
            micro_batches: For each micro-batch, the lengths of this rank's documents in the order
                of its rows.
            at_least: Least number of plans, also if no rank has a micro-batch.
        """
        own = [list(map(int, lengths)) for lengths in micro_batches]
        gathered = self.groups.all_gather_in_pod(
            self.pod, lambda: own, _tokens_of_micro_batches, contents="lengths of documents"
        )
        count = max(at_least, *map(len, gathered.of_pods))
        plans = []
        for index in range(count):
            lengths_of_ranks = [
                rank[index] if index < len(rank) else [] for rank in gathered.values
            ]
            # A rank without a batch computes a `filler_batch`, which has one token.
            filled = [lengths or [1] for lengths in lengths_of_ranks]
            plan = replace(
                plan_placed(filled, self.settings_of_pod),
                fillers=lengths_of_ranks.count([]),
                first_rank=self.pod.start,
                rows_of_other_pods=sum(
                    sum(tokens[index : index + 1]) for tokens in gathered.of_pods
                )
                - sum(gathered.own[index : index + 1]),
            )
            plans.append(plan)
        return plans

    def plan_batches(
        self, batches: Sequence[dict[str, Any]], at_least: int = 0
    ) -> list[dict[str, Any]]:
        """Plan the padding-free batches of one optimizer step, whose tokens stay on this rank.

        A collective call. A rank whose data has ended gives fewer batches than others, or none:
        batches of one row without a target follow.

        Args:
            at_least: Least number of batches to return, also if no rank has one.

        Raises:
            ValueError: A batch is not packed without padding, or is beyond the model's tables.
                Every rank raises it, also for another rank's batch.
        """
        with self.groups.raised_together():
            name = f"a batch of rank {self.groups.rank}"
            lengths = [checked_document_lengths(batch, self.limits, name) for batch in batches]
        plans = self.plan_lengths(lengths, at_least)
        fillers = [filler_batch(self.device) for _ in range(len(plans) - len(batches))]
        planned_batches = []
        for batch, plan in zip([*batches, *fillers], plans, strict=True):
            kept = {name: value for name, value in batch.items() if name not in REPLACED_BY_PLAN}
            planned_batches.append(kept | {PLAN_KEY: plan})
        return planned_batches

    def plan_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Plan one batch of a padding-free collator.

        Return the batch ready for `model(**batch)`.

        A collective call, once per micro-batch. `plan_batches` is for ranks with different numbers
        of micro-batches.

        Args:
            batch: `input_ids` [1, T] and one of `document_lengths`, `cu_seq_lens_q` and
                `position_ids` that restart at 0 with each document.
        """
        (planned,) = self.plan_batches([batch])
        return self.prepare(planned)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Bind the plan that `DistCACollator` or `plan_batches` put in a batch.

        Return what `model(**batch)` takes.
        """
        return {**batch, PLAN_KEY: self.bind(batch[PLAN_KEY])}


def _tokens_of_micro_batches(lengths_of_ranks: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the tokens of each micro-batch, from the lengths of each rank's documents in each."""
    of_ranks = [[sum(lengths) for lengths in rank] for rank in lengths_of_ranks]
    return [sum(tokens) for tokens in zip_longest(*of_ranks, fillvalue=0)]
