"""All settings of hf_distca in one dataclass."""

import os
from argparse import SUPPRESS
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from hf_distca.checks.refusal import RefusedError, raise_all
from hf_distca.kernel_names import KERNEL_NAMES
from hf_distca.planning_settings import PlanningOrNone, read_planning
from hf_distca.server_settings import Servers, read_servers
from hf_distca.units import (
    AUTO,
    BytesOrAuto,
    NumberOrAuto,
    Switch,
    TokensOrAuto,
    read_values,
    setting,
    unusable_values,
)

DOCUMENT_LAYOUTS = (AUTO, "fixed", "whole")
LongDocuments = Literal["error", "truncate", "split"]
ZERO = {
    "loss_chunk_bytes": "all logits at once",
    "mlp_chunk_rows": "all rows at once",
    "trace_steps": "no trace",
}
"""Meaning of 0 for the settings that may be 0; all other numbers must be positive."""


@dataclass
class DistCAConfig:
    """Settings for packing documents and balancing their core attention over ranks.

    `tokens_per_rank` is the one setting to choose; the defaults of all others are fast and exact.
    Every rank needs the same settings.

    Raises:
        ValueError: A value is out of range. The message names the value and what is expected.
    """

    tokens_per_rank: TokensOrAuto = setting(
        AUTO,
        "Maximum number of tokens that a rank holds in a micro-batch, such as 32768 or 32k (k = "
        "1024). All ranks together hold whole documents of up to ranks * tokens_per_rank tokens, "
        "without padding. Activation memory grows with this number. 'auto' is 8192, or "
        "per_device_train_batch_size * max_length where arguments of TRL have both.",
    )
    long_documents: LongDocuments = setting(
        "error",
        "What happens to a document that is too long: 'error' refuses it, 'truncate' keeps its "
        "first tokens, 'split' divides it into documents that fit. A document may have ranks * "
        "tokens_per_rank tokens, or tokens_per_rank tokens where documents stay whole.",
        choices=get_args(LongDocuments),
    )
    document_layout: str = setting(
        AUTO,
        "Where the tokens of documents are placed. 'auto' lets the planner choose for every "
        "micro-batch: whole documents without exchange, or long documents over several ranks, "
        "inside groups of ranks or nodes. Where full micro-batches would wait for exchanges, "
        "'auto' also draws micro-batches that are a little smaller, so that their documents fit "
        "into whole ranks. For models with Mamba-1 or another module that mixes rows in order and "
        "cannot take a part of a document, 'auto' is 'whole'. 'whole' keeps each document, of at "
        "most tokens_per_rank tokens, on one rank and moves only core attention. 'fixed' packs "
        "documents in order and moves only core attention.",
        choices=DOCUMENT_LAYOUTS,
    )
    attention_kernel: str = setting(
        "auto",
        "Kernel that computes core attention. 'auto' is the fastest installed kernel that supports "
        "the model: 'cpu' on the CPU; on CUDA 'flash_attn_3' or 'flash_attn_4' on the GPUs that "
        "they are made for, else 'torch_varlen' or 'flash_attn'.",
        choices=KERNEL_NAMES,
    )
    offload_activations: Switch = setting(
        AUTO,
        "Under gradient checkpointing, a layer's activation checkpoint goes to host memory while "
        "the next layer computes. It comes back before the layer's backward pass. At most two of "
        "the moved activation checkpoints are on the device at a time. True moves those of all "
        "layers except the last two. 'auto' moves as many as do not fit into a GPU, by the memory "
        "that a trainer counts before training; it moves none on CPUs and in custom loops.",
    )
    loss_chunk_bytes: BytesOrAuto = setting(
        AUTO,
        "Maximum size of the float32 logits of a chunk of rows, such as 256MiB. The loss is "
        "computed chunk by chunk, so that no tensor of tokens × vocabulary is made. A chunk reads "
        "and writes the head's whole gradient, so that larger chunks are faster and take more "
        "memory: some 2.5 times their size. 'auto' is 256 MiB on CPUs. On GPUs 'auto' is 4096 "
        "rows, but at most 1/64 of the memory of the smallest GPU, and at least 256 MiB. 0 "
        "computes all logits at once, as the model does without hf_distca: for a second backward "
        "pass through the same loss, or for logits with gradients after the forward pass under "
        "FSDP2.",
    )
    mlp_chunk_rows: NumberOrAuto = setting(
        AUTO,
        "Compute the MLPs and norms of decoder layers over this many rows at a time, and again in "
        "the backward pass. The memory between an MLP's projections then does not grow with "
        "tokens_per_rank. Under gradient checkpointing, where the recomputation of a layer ends "
        "before its MLP, this takes no further forward pass of the MLPs; elsewhere it takes one. 0 "
        "computes all rows at once; 4096 to 16384 keep a GPU busy. Experts are not changed. "
        "Gradients of weights are summed chunk by chunk, which rounds them more often: 'auto' "
        "takes 8192 rows where training would not fit into a GPU otherwise, by the memory that a "
        "trainer counts before training, with activation checkpoints on the host. 'auto' takes all "
        "rows at once on CPUs and in custom loops.",
    )
    share_prefixes: bool = setting(
        True,
        "Prefix sharing: compute an equal prefix of several sequences once, if it has 128 tokens "
        "or more. The prompt of several completions is such a prefix. So is the history that "
        "documents of an agent's session repeat. Documents that share a prefix come together in a "
        "micro-batch. Where prefix sharing would change results, no prefixes are shared, and the "
        "reason is logged once. The reasons are dropout, hybrid models whose documents stay "
        "whole, and rotary embeddings that depend on a document's length. Packed documents of "
        "streams, evaluations and predictions never share prefixes.",
    )
    ranks_per_node: str = setting(
        AUTO,
        "Number of training ranks that share a node, within which links (NVLink) are faster than "
        "between nodes: one number, or one for each node in the order of the ranks, such as "
        "'8,8,4'. Plans keep exchanges inside nodes where they can. 'auto' takes the nodes of the "
        "launch; 1 treats all links alike.",
    )
    trace_steps: int = setting(
        0,
        "Write a trace of this many steps, after the first three of a training, to "
        "trace_rank_N.json in the output folder. The trace shows what each rank computed, "
        "exchanged and waited for; open it with `hf-distca timeline` or ui.perfetto.dev. On GPUs "
        "the host waits for the device at the end of each traced step. 0 measures and writes "
        "nothing.",
    )
    device_profile: str | None = setting(
        None,
        "Costs of the device and its links, by which 'auto' settings are chosen: h100, h200, cpu, "
        "or a file that `hf-distca profile` wrote. None measures the costs when training begins, "
        "which takes some seconds, and writes them to device_profile.json in the output folder, "
        "from where the same run takes them again. Training corrects costs that are wrong by more "
        "than a tenth.",
    )
    exchange_timeout: float = setting(
        1800.0, "Seconds until an exchange with a rank that does not answer fails."
    )
    attention_servers: Servers = setting(
        0,
        "Experimental: dedicated attention servers. A number N makes the last N processes of this "
        "launch servers, and the others train. 'external' lets servers started with `hf-distca "
        "serve` join and leave at any time. A dictionary, as JSON on a command line, sets more: "
        "count (the number or 'external'), ranks_serve, address, token_file, timeout, transport.",
    )
    planning: PlanningOrNone = setting(None, SUPPRESS)
    """Expert settings of plans, see `Planning`; no help shows them."""

    @property
    def default_tokens_per_rank(self) -> int:
        """Meaning of "auto" for `tokens_per_rank`."""
        return 8192

    def __post_init__(self) -> None:
        raise_all(self._refused())

    def _refused(self) -> list[RefusedError]:
        """Read the values of all settings, and return the errors of those that cannot be used."""
        unread = read_values(self, read_servers, read_planning)
        tokens: int | str = self.tokens_per_rank
        if tokens == AUTO:
            self.tokens_per_rank = self.default_tokens_per_rank
        if isinstance(self.device_profile, os.PathLike):
            self.device_profile = os.fspath(self.device_profile)
        try:
            self.ranks_per_node = _ranks_per_node(self.ranks_per_node)
        except RefusedError as error:
            unread["ranks_per_node"] = error
        return [*unread.values(), *unusable_values(self, DistCAConfig, ZERO, unread)]

    @property
    def remote_workers(self) -> bool:
        """Whether workers that hold no rows may compute core attention. They may join and leave."""
        return self.attention_servers.count != 0

    @property
    def why_nothing_is_compared(self) -> str:
        """Reason for a log in which the planner compares no plans."""
        if self.remote_workers:
            return "attention servers may come and go"
        return "none of them is 'auto'"

    def of_all_ranks(self) -> dict[str, Any]:
        """Return the settings that every rank needs alike, by name."""
        settings = {setting.name: getattr(self, setting.name) for setting in fields(DistCAConfig)}
        return {
            **settings,
            "attention_servers": self.attention_servers.of_all_ranks(),
            "planning": self.planning.plain(),
        }

    def plan_settings(
        self, ranks: int, ranks_per_node: int | tuple[int, ...] = 1
    ) -> dict[str, Any]:
        """Return the settings on which plans depend, by their names in PlanSettings.

        Ping-pong is off on one rank without remote workers, because nothing is exchanged.

        Args:
            ranks: number of ranks that train together.
            ranks_per_node: meaning of "auto", see `dispatch.world.World.ranks_per_node`; 1
                without a launch.
        """
        if self.ranks_per_node != AUTO:
            numbers = tuple(map(int, self.ranks_per_node.split(",")))
            ranks_per_node = numbers[0] if len(numbers) == 1 else numbers
        return {
            "ranks": ranks,
            "rows_per_rank": self.tokens_per_rank,
            "document_layout": self.document_layout,
            **vars(self.planning),
            **({} if ranks > 1 or self.remote_workers else {"ping_pong": False}),
            "ranks_per_node": ranks_per_node,
        }


def _ranks_per_node(value: Any) -> str:
    """Return the setting as a string, from any form in YAML or Python, such as [8, 8, 4]."""
    parts = [
        str(part).strip()
        for part in (value if isinstance(value, list | tuple) else str(value).split(","))
    ]
    if parts == [AUTO]:
        return AUTO
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise RefusedError(
            "ranks_per_node must be one number of ranks, a number for each node such as '8,8,4', "
            f"or 'auto', got {value!r}"
        )
    return ",".join(str(int(part)) for part in parts)
