"""Metrics that a training run logs: names, units and meanings."""

from dataclasses import dataclass

PREFIX = "distca/"
"""Prefix of all metric names, by which trackers group metrics: W&B and TensorBoard show train/distca/…"""
ALWAYS = ""
NODES = "Ranks share nodes"
CHOSEN = "The planner chooses"
SERVERS = "Dedicated attention servers"
CUDA = "CUDA"


@dataclass(frozen=True)
class Metric:
    """A logged figure.

    Attributes:
        unit: unit of the value; "ratio" for a quotient, "share" for a number from 0 to 1.
        meaning: of the value over the micro-batches since the last log.
        where: condition under which the metric is logged.
    """

    unit: str
    meaning: str
    where: str = ALWAYS


METRICS: dict[str, Metric] = {
    "tokens_per_second": Metric("tokens/s", "Tokens of all ranks per second"),
    "tokens_per_second_per_device": Metric(
        "tokens/s", "The same, divided by the number of training processes and attention servers"
    ),
    "imbalance_degree_packed": Metric(
        "ratio", "Query-key pairs of the busiest rank over the mean, if the documents were packed in order"
    ),
    "imbalance_degree": Metric("ratio", "Query-key pairs of the busiest rank over the mean, as planned"),
    "attention_ms": Metric("ms per step", "Time in kernel calls of core attention, on the slowest rank"),
    "attention_ms_predicted": Metric(
        "ms per step", "The same if all ranks were equally fast: the busiest rank's share of the time of all ranks"
    ),
    "exchange_bytes": Metric("bytes", "Bytes through the busiest rank in the forward pass of one layer"),
    "exchange_stages": Metric("stages", "Stages in which K and V rows travel in a layer"),
    "exchange_wait_seconds": Metric("s", "Time in waits for rows, on the rank that waited longest"),
    "exposed_exchange_share": Metric("share", "The same as a share of the elapsed time"),
    "ping_pong_share": Metric("share", "Share of decoder layer runs in which two nano-batches took turns"),
    "exchange_bytes_within_nodes": Metric("bytes", "Bytes of the busiest rank inside its node", NODES),
    "exchange_bytes_between_nodes": Metric("bytes", "Bytes of the busiest rank between nodes", NODES),
    "busiest_node_bytes_within": Metric("bytes", "Bytes inside the busiest node, all of its ranks together", NODES),
    "busiest_node_bytes_between": Metric(
        "bytes", "Bytes between the busiest node and others, all of its ranks together", NODES
    ),
    "step_ms": Metric("ms", "Time of an optimizer step", CHOSEN),
    "step_ms_predicted": Metric("ms", "The same as the planner's costs predict it", CHOSEN),
    "gain_predicted": Metric(
        "ratio", "Predicted time of the same documents packed in order, over that of the plans", CHOSEN
    ),
    "plans_without_exchange": Metric("share", "Share of micro-batches in which no rows travel", CHOSEN),
    "plans_within_nodes": Metric("share", "Share of micro-batches in which rows travel only inside nodes", CHOSEN),
    "attention_servers": Metric("servers", "Dedicated attention servers that take part", SERVERS),
    "mfu": Metric(
        "share",
        "Model FLOPs utilization in bfloat16, on GPUs whose peak is known (A100, H100, H200, H800, B200)",
        CUDA,
    ),
    "memory_peak_gib": Metric("GiB", "Most memory in use on this rank", CUDA),
    "memory_reserved_gib": Metric("GiB", "Memory that the CUDA allocator of this rank holds", CUDA),
}
"""All metrics by name, in the order of the documentation; `StepMeter.figures` computes them."""
