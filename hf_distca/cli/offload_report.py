"""Host memory, copies and the predicted step where activation checkpoints are offloaded."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from hf_distca.cli.options import GB
from hf_distca.models.checkpointing import offloaded_layers
from hf_distca.models.decoder import decoder_layers
from hf_distca.plan import MicroBatchPlan
from hf_distca.predict.walk import predict_plan
from hf_distca.run import RunSpec
from hf_distca.units import counted

HOST_BANDWIDTH = 55e9
"""Bytes a second between pinned host memory and a GPU, each way (measured on an H200)."""


def offload_of(
    model: PreTrainedModel,
    plan: MicroBatchPlan,
    run: RunSpec,
    memory: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the memory and seconds of a step with offloaded activation checkpoints.

    The figures are those of the strategy that takes the least memory of a device. A layer waits for
    its copy as far as the copy takes longer than the computation of a layer.

    Args:
        memory: what `hf_distca.cli.model.memory_of` returns.
    """
    settings = run.plans
    costs = replace(run, checkpointing={}).costs
    strategy = min(memory, key=lambda name: memory[name]["with_offload"]["total"])
    host: int = memory[strategy]["with_offload"]["host"]
    nodes = settings.node_of_ranks
    depth = len(decoder_layers(model))
    forward, step = (
        predict_plan(plan, passes, nodes, settings.bytes_per_value)
        for passes in (costs.forward_only(), costs)
    )
    forward_s, step_s = float(forward.seconds), float(step.seconds)
    layers = offloaded_layers(depth)
    layer_bytes = host // layers if layers else 0
    copy_s = layer_bytes / HOST_BANDWIDTH
    layer_s = {"forward": forward_s / depth, "backward": (step_s - forward_s) / depth}
    waits_s = layers * sum(max(copy_s - seconds, 0.0) for seconds in layer_s.values())
    return {
        "strategy": strategy,
        "profile": run.device.name,
        "layers": layers,
        "host_bytes": host,
        "host_bytes_of_node": host * max(nodes.count(node) for node in nodes),
        "layer_bytes": layer_bytes,
        "layer_copy_seconds": copy_s,
        "layer_forward_seconds": layer_s["forward"],
        "layer_backward_seconds": layer_s["backward"],
        "copy_seconds": layers * copy_s,
        "attention_seconds": float(step.attention.max()),
        "wait_seconds": waits_s,
        "step_seconds": step_s + waits_s,
    }


def offload_lines(figures: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the table of offloaded activation checkpoints, from `offload_of`."""
    rows = {
        f"offloaded under {figures['strategy']}": (
            f"{counted(figures['layers'], 'layer')}, {figures['host_bytes'] / GB:.1f} GB of host "
            f"memory a rank, {figures['host_bytes_of_node'] / GB:.1f} GB a node"
        ),
        "copy of a layer, each way": (
            f"{figures['layer_bytes'] / GB:.3f} GB, {figures['layer_copy_seconds'] * 1e3:.1f} ms; "
            f"a layer computes {figures['layer_forward_seconds'] * 1e3:.1f} ms forward and "
            f"{figures['layer_backward_seconds'] * 1e3:.1f} ms backward"
        ),
        "copies of a step, each way": f"{figures['copy_seconds']:.2f} s",
        "predicted step": (
            f"{figures['step_seconds']:.1f} s on {figures['profile']}: core attention "
            f"{figures['attention_seconds']:.1f} s, waits for copies "
            f"{figures['wait_seconds']:.1f} s"
        ),
    }
    for name, value in rows.items():
        yield f"{name:<30} {value}"
