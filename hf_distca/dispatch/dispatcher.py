"""The dispatcher: turns the batch a collator made into one whose core attention is planned and bound."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from hf_distca.dispatch.backends import EXCHANGE_CTAS
from hf_distca.dispatch.bound import BoundPlan
from hf_distca.dispatch.exchange import Exchange
from hf_distca.dispatch.groups import Groups, RankMesh
from hf_distca.dispatch.padding_free import FILLER_LENGTHS, TOLD_BY_PLAN, batch_document_lengths, filler_batch
from hf_distca.dispatch.recorder import Recorder
from hf_distca.dispatch.remote import RemoteWorkers
from hf_distca.kernels import Kernel, get_kernel
from hf_distca.plan import PLAN_KEY, MicroBatchPlan
from hf_distca.planner.micro_batch import plan_placed_documents
from hf_distca.planner.settings import Choices, PlanSettings


class Dispatcher:
    """Plans, binds and carries out the core attention of the micro-batches of one training run.

    Creating it is a collective of the world: every process does it at the same point, with the same settings.
    `hf_distca.make_dispatcher` makes one for a model, of a DistCAConfig.

    Args:
        settings: what plans depend on. `settings.ranks` must be the number of ranks that train together,
            `settings.kernel` names the attention kernel, see `hf_distca.kernels.get_kernel`.
        device: the rank's device.
        mesh: the ranks that train together; None for all ranks of the world.
        keep_received: keep received Q, K and V rows between forward and backward.
        keep_core_attention: under gradient checkpointing keep O and log-sum-exp of core attention for the backward
            instead of exchanging and computing again.
        exchange_timeout: seconds after which an exchange with a silent rank fails.

    Attributes:
        recorder: measures what time goes to.
        remote: dedicated attention servers that take part in what is bound from now on; None, or set it.

    Raises:
        ValueError: the settings differ between ranks, or do not fit the number of ranks.
        ImportError: the package of the kernel is missing; where only some ranks lack it, ValueError on all.
    """

    def __init__(
        self,
        settings: PlanSettings,
        device: torch.device,
        mesh: RankMesh | None = None,
        *,
        keep_received: bool = False,
        keep_core_attention: bool = True,
        exchange_timeout: float = 1800.0,
    ) -> None:
        self.settings = settings
        self.device = torch.device(device)
        self.groups = Groups(self.device, exchange_timeout, mesh)
        self.recorder = Recorder(self.device)
        self.kernel = self._kernel()
        self.keep_received = keep_received
        self.keep_core_attention = keep_core_attention
        self.remote: RemoteWorkers | None = None
        self.groups.raise_together(self._wrong_settings(), in_world=True)
        self.groups.connect_nodes(settings.nodes)
        self.exchange = Exchange(self.groups)

    def _kernel(self) -> Kernel:
        """The kernel that the settings name; on every rank, or none."""
        # Room for the exchange, whose blocks each take an SM; where nothing is exchanged, attention has them all.
        sm_margin = EXCHANGE_CTAS if self.groups.ranks > 1 else 0
        kernel, error = None, None
        try:
            kernel = get_kernel(self.settings.kernel, self.device, sm_margin=sm_margin)
        except (ImportError, ValueError) as caught:
            error = caught
        self.groups.raise_together(error, in_world=True)
        assert kernel is not None
        return kernel

    def _wrong_settings(self) -> ValueError | None:
        if self.settings.ranks != self.groups.ranks:
            return ValueError(
                f"PlanSettings.ranks is {self.settings.ranks}, but {self.groups.ranks} ranks run; set it to that"
            )
        # With the name of the kernel itself: "auto" may be another where other packages are installed.
        mine = (self.settings, self.kernel.name, self.keep_received, self.keep_core_attention)
        others = self.groups.all_gather(mine)
        if any(other != others[0] for other in others):
            return ValueError(f"settings differ between ranks, here they are {mine}; start all ranks alike")
        return None

    def choose_by(self, choices: Choices | None) -> None:
        """Plan micro-batches by these choices from now on; the same on every rank."""
        self.settings = replace(self.settings, choices=choices)

    def choices(self) -> Choices | None:
        """Return what micro-batches are planned by now; None where nothing is chosen."""
        return self.settings.choices

    def close(self) -> None:
        """End the groups of this run, their threads and connections, for a process that goes on to other work.

        Every rank calls it at the same point. The dispatcher plans and exchanges nothing afterwards; the model goes on
        outside planned steps, or with a new dispatcher.
        """
        self.groups.close()

    def bind(self, plan: MicroBatchPlan) -> BoundPlan:
        """Bind a plan to this rank: index tensors on its device, made once per micro-batch.

        Where dedicated servers take part, its tasks are planned again for the workers that are there now.

        Raises:
            ValueError: the plan is made for ranks on other nodes.
        """
        self._check_nodes(plan)
        self.recorder.drain()
        remote = None
        if self.remote is not None:
            plan, remote = self.remote.bind(plan, self.settings)
        return BoundPlan(
            plan,
            self.groups.rank,
            self.device,
            self.exchange,
            self.kernel,
            self.recorder,
            keep_received=self.keep_received,
            keep_core_attention=self.keep_core_attention,
            remote=remote,
        )

    def _check_nodes(self, plan: MicroBatchPlan) -> None:
        """Raise if rows are to be passed on inside nodes that are not connected so."""
        for nano in plan.nano_batches:
            for of_kind in nano.plans.values():
                nodes = of_kind.nodes and of_kind.nodes[: self.groups.ranks]
                if nodes is not None and nodes != self.settings.nodes:
                    raise ValueError(
                        f"the plan is made for ranks on the nodes {nodes}, but the dispatcher's settings have "
                        f"{self.settings.nodes}: plan with the same ranks_per_node as the dispatcher's"
                    )

    def plan_lengths(self, micro_batches: Sequence[Sequence[int]], at_least: int = 0) -> list[MicroBatchPlan]:
        """Plan micro-batches whose documents already lie on ranks; tokens stay where they are. A collective.

        Args:
            micro_batches: for each micro-batch, the lengths of the documents on this rank, in the order
                of its rows. A rank that has fewer micro-batches than another, or no documents in one, takes
                part with a single row without a target: models cannot run on no rows at all.

            at_least: how many plans to make where any rank has a micro-batch.

        Returns:
            One plan for each micro-batch of the rank that has the most; none where no rank has any.
        """
        gathered = self.groups.all_gather([list(map(int, lengths)) for lengths in micro_batches])
        count = max(map(len, gathered))
        if count:
            count = max(count, at_least)
        held = [[rank[i] if i < len(rank) else [] for rank in gathered] for i in range(count)]
        return [
            replace(
                plan_placed_documents([lengths or FILLER_LENGTHS for lengths in of_ranks], self.settings),
                fillers=of_ranks.count([]),
            )
            for of_ranks in held
        ]

    def plan_batches(self, batches: Sequence[dict[str, Any]], at_least: int = 0) -> list[dict[str, Any]]:
        """Plan batches whose documents already lie on this rank; their tokens stay. A collective.

        Args:
            batches: from a StreamPacker or any padding-free collator; fewer than other ranks have, or none,
                where this rank's data has ended.
            at_least: batches to fill up to where any rank has one: those of one optimizer step.

        Returns:
            The batches with their plans, and fillers without a target where other ranks have more; none
            where no rank has any.

        Raises:
            ValueError: on every rank, where a batch of any rank is not packed without padding.
        """
        error, lengths = None, []
        try:
            lengths = [batch_document_lengths(batch) for batch in batches]
        except ValueError as caught:
            error = caught
        self.groups.raise_together(error)
        plans = self.plan_lengths(lengths, at_least)
        fillers = [filler_batch(self.device) for _ in range(len(plans) - len(batches))]
        return [
            {name: value for name, value in batch.items() if name not in TOLD_BY_PLAN} | {PLAN_KEY: plan}
            for batch, plan in zip([*batches, *fillers], plans, strict=True)
        ]

    def plan_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Plan one batch of a padding-free collator and bind the plan: ready for `model(**batch)`. A collective.

        Every rank calls it once per micro-batch; where ranks may have different numbers of them, see
        `plan_batches`.

        Args:
            batch: `input_ids` [1, T] and `position_ids` that restart at 0 with each document, or what else
                `batch_document_lengths` reads, such as transformers' DataCollatorWithFlattening gives.

        Raises:
            ValueError: on every rank, where the batch of any rank is not packed without padding.
        """
        (planned,) = self.plan_batches([batch])
        return self.prepare(planned)

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch with its plan bound to this rank, ready for `model(**batch)`.

        Args:
            batch: from a DistCACollator or `plan_batches`: it carries a plan.
        """
        return {**batch, PLAN_KEY: self.bind(batch[PLAN_KEY])}
