"""All settings of hf_distca in one dataclass."""

from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

from hf_distca.kernels import KERNEL_NAMES
from hf_distca.units import AUTO, Bytes, Servers, Switch, Tokens, Tolerance, read_values

DOCUMENT_LAYOUTS = (AUTO, "joint", "fixed", "whole")
TRANSPORTS = (AUTO, "tcp", "nixl")
AS_LAUNCHED = "auto"
"""Ranks per node as the launcher of the processes says."""
LongDocuments = Literal["error", "truncate", "split"]
SWITCHES = ("ping_pong",)
"""Settings that are on, off or "auto"."""


@dataclass
class DistCAConfig:
    """How documents are packed and how their core attention is balanced over ranks.

    A user who sets nothing but `tokens_per_rank` gets the fast, exact behaviour. The same on every rank.

    Raises:
        ValueError: a value is out of range; says what was got and what is expected.
    """

    tokens_per_rank: Tokens = field(
        default=cast(Any, 8192),
        metadata={
            "help": "The most tokens that a rank holds in a micro-batch, such as 32768 or 32k (k = 1024). All ranks "
            "together hold whole documents of up to ranks * tokens_per_rank tokens, without padding; activation "
            "memory grows with it."
        },
    )
    long_documents: LongDocuments = field(
        default="error",
        metadata={
            "help": "A document longer than ranks * tokens_per_rank, or tokens_per_rank where documents stay whole: "
            "'error' refuses it, 'truncate' keeps its first tokens, 'split' makes it into documents that fit.",
        },
    )
    document_layout: str = field(
        default=AUTO,
        metadata={
            "help": "'joint' places tokens and attention together, which moves the fewest bytes; 'fixed' packs "
            "documents in order and moves only attention; 'whole' leaves every document, of at most tokens_per_rank "
            "tokens, on one rank and moves only attention. 'auto' is 'whole' for models with state space layers, "
            "linear attention or convolutions, which are wrong for a document that is cut. For other models the "
            "planner then chooses for every micro-batch: whole documents without exchange, documents inside groups of "
            "ranks or nodes, or the joint layout.",
            "choices": DOCUMENT_LAYOUTS,
        },
    )
    balance_tolerance: Tolerance = field(
        default=cast(Any, AUTO),
        metadata={
            "help": "How far above the mean a rank's core attention may lie, as a fraction of the mean. More saves "
            "bytes; less costs bytes and planning time. 0 is as fine as whole rows allow. 'auto' lets the planner "
            "choose for every micro-batch, by what the exchange of rows takes."
        },
    )
    balance_block_size: int = field(
        default=128,
        metadata={"help": "Rows. Documents are cut at multiples of it, the block size of attention kernels."},
    )
    attention_kernel: str = field(
        default="auto",
        metadata={
            "help": "What computes core attention: 'auto' is the fastest kernel that is installed and can do what the "
            "model needs ('cpu' on the CPU; on CUDA 'flash_attn_3' or 'flash_attn_4' where they are made for the GPU, "
            "else 'torch_varlen' or 'flash_attn').",
            "choices": KERNEL_NAMES,
        },
    )
    ping_pong: Switch = field(
        default=cast(Any, AUTO),
        metadata={
            "help": "Divide every micro-batch into two nano-batches whose exchanges hide behind each other's "
            "computation, where more than one rank or dedicated servers take part. 'auto' lets the planner choose for "
            "every micro-batch."
        },
    )
    exchange_buffer_bytes: Bytes = field(
        default=cast(Any, 128 * 2**20),
        metadata={
            "help": "The most bytes of K and V rows that a rank sends, and receives, at a time, such as 128MiB. Where "
            "the end of a long document needs more, they travel in stages, each while the one before is computed "
            "with. Memory for K, V and their gradients is at most six times this, or ten times where rows are passed "
            "on inside nodes, and twice as much with ping-pong."
        },
    )
    keep_core_attention: bool = field(
        default=True,
        metadata={
            "help": "Under gradient checkpointing, keep the output and log-sum-exp of core attention for the backward "
            "instead of exchanging and computing again. Per token and layer it keeps one row of O and 4 bytes a query "
            "head."
        },
    )
    keep_received: bool = field(
        default=False,
        metadata={
            "help": "Keep the Q, K and V rows received in the forward for the backward, instead of receiving them "
            "again: fewer bytes on the wire, more memory."
        },
    )
    loss_chunk_bytes: Bytes = field(
        default=cast(Any, 256 * 2**20),
        metadata={
            "help": "Bytes, such as 256MiB. The loss is computed over chunks of rows whose logits take at most so "
            "much in float32; no tensor of tokens × vocabulary is made. 0 computes all logits at once, as the model "
            "does by itself."
        },
    )
    mlp_chunk_rows: int = field(
        default=0,
        metadata={
            "help": "Rows. Compute decoder MLPs over so many rows at a time, and again in the backward, so that what "
            "lies between their projections does not grow with tokens_per_rank: for one more forward of the MLPs. "
            "0 computes all rows at once. Blocks of experts are left as they are."
        },
    )
    ranks_per_node: str = field(
        default=AS_LAUNCHED,
        metadata={
            "help": "How many of the ranks that train share a node, inside which links (NVLink) are faster than "
            "between nodes: a number, or one for each node with commas between them, such as '8,8,4', in the order of "
            "the ranks. Plans then keep on a node what they can. 'auto' is as the processes were launched; 1 takes "
            "all links to be alike."
        },
    )
    trace_steps: int = field(
        default=0,
        metadata={
            "help": "Write a trace of so many steps, after the first three of a training, as trace_rank_N.json into "
            "the output folder: what each rank computed, waited for and exchanged when, for ui.perfetto.dev or "
            "`hf-distca timeline`. On GPUs the host waits at the end of these steps. 0 measures and writes nothing."
        },
    )
    device_profile: str | None = field(
        default=None,
        metadata={
            "help": "Costs of the device and its links, by which 'auto' settings are chosen: h100, cpu, or a file of "
            "`hf-distca profile`. None: they are measured when training begins, which takes some seconds, and are "
            "written to device_profile.json in the output folder, from where the same run takes them again."
        },
    )
    exchange_timeout: float = field(
        default=1800.0, metadata={"help": "Seconds after which an exchange with a silent rank fails."}
    )
    attention_servers: Servers = field(
        default=cast(Any, 0),
        metadata={
            "help": "Experimental: dedicated attention servers. A number N makes the last N processes of this launch "
            "servers, and the others train; 'external' lets servers started with `hf-distca serve` join and leave at "
            "any time."
        },
    )
    ranks_serve: bool = field(
        default=True,
        metadata={"help": "Ranks compute core attention too while there are dedicated servers."},
    )
    attention_server_address: str = field(
        default="127.0.0.1:0",
        metadata={
            "help": "HOST:PORT on which rank 0 takes attention servers in; port 0 is any that is free, and is logged. "
            "Only servers that know the run's token are let in, but nothing is encrypted."
        },
    )
    attention_server_token_file: str | None = field(
        default=None,
        metadata={
            "help": "File with the token that external servers need, made if there is none; by default "
            "attention_server_token in output_dir."
        },
    )
    attention_server_timeout: float = field(
        default=60.0, metadata={"help": "Seconds after which an attention server that does not answer is lost."}
    )

    attention_server_transport: str = field(
        default="auto",
        metadata={
            "help": "Experimental: what carries rows to attention servers and back: tcp; nixl, which both must "
            "have; or auto, which is nixl where both ends have it and an RDMA device, and tcp elsewhere."
        },
    )

    def __post_init__(self) -> None:
        read_values(self)
        if self.attention_server_transport not in TRANSPORTS:
            raise ValueError(
                f"attention_server_transport must be one of {', '.join(TRANSPORTS)}, "
                f"got {self.attention_server_transport!r}"
            )
        self.ranks_per_node = _ranks_per_node(self.ranks_per_node)
        for name in (
            "tokens_per_rank",
            "balance_block_size",
            "exchange_buffer_bytes",
            "exchange_timeout",
            "attention_server_timeout",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.loss_chunk_bytes < 0:
            raise ValueError(f"loss_chunk_bytes must be 0 (all logits at once) or more, got {self.loss_chunk_bytes}")
        if self.mlp_chunk_rows < 0:
            raise ValueError(f"mlp_chunk_rows must be 0 or more, got {self.mlp_chunk_rows}")
        if self.trace_steps < 0:
            raise ValueError(f"trace_steps must be 0 (no trace) or more, got {self.trace_steps}")
        choices = {
            "long_documents": get_args(LongDocuments),
            "document_layout": DOCUMENT_LAYOUTS,
            "attention_kernel": KERNEL_NAMES,
        }
        for name, valid in choices.items():
            if getattr(self, name) not in valid:
                raise ValueError(f"{name} must be one of {list(valid)}, got {getattr(self, name)!r}")

    @property
    def planned_layout(self) -> str:
        """How documents are laid out for a model with nothing but attention between its rows."""
        return "joint" if self.document_layout == AUTO else self.document_layout

    @property
    def chooses(self) -> bool:
        """Whether the planner may choose anything for every micro-batch."""
        return AUTO in (self.document_layout, self.balance_tolerance, self.ping_pong)

    def planning(self, ranks: int, ranks_per_node: int | tuple[int, ...] = 1) -> dict[str, Any]:
        """What plans depend on of these settings, by the names that PlanSettings has for it.

        Args:
            ranks: that train together; one rank alone has nobody to exchange with while the other nano-batch runs,
                unless there are dedicated servers.
            ranks_per_node: what "auto" stands for, see `hf_distca.dispatch.nodes.ranks_per_node`; 1 without a launch.
        """
        if self.ranks_per_node != AS_LAUNCHED:
            numbers = tuple(map(int, self.ranks_per_node.split(",")))
            ranks_per_node = numbers[0] if len(numbers) == 1 else numbers
        planning = {
            "ranks": ranks,
            "tokens_per_rank": self.tokens_per_rank,
            "document_layout": self.planned_layout,
            "balance_block_size": self.balance_block_size,
            "exchange_buffer_bytes": self.exchange_buffer_bytes,
            "ping_pong": self.ping_pong is not False and (ranks > 1 or self.attention_servers != 0),
            "ranks_per_node": ranks_per_node,
        }
        if self.balance_tolerance != AUTO:
            planning["balance_tolerance"] = self.balance_tolerance
        return planning


def _ranks_per_node(given: Any) -> str:
    """The setting as a string, of whatever stands for it in Python or YAML: 8, [8, 8, 4], "8, 8, 4"."""
    parts = given if isinstance(given, (list, tuple)) else str(given).split(",")
    parts = [str(part).strip() for part in parts]
    if parts == [AS_LAUNCHED]:
        return AS_LAUNCHED
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(
            "ranks_per_node must be a number of ranks, one number for each node such as '8,8,4', or 'auto', got "
            f"{given!r}"
        )
    return ",".join(str(int(part)) for part in parts)
