"""A group of GRPO with a long prompt, forward and backward with gradient checkpointing: the prompt
computed for each completion, and once.

A model of the sizes of Qwen3-0.6B with random weights, in the dtype of core attention, on one rank.
"""

from benchmarks.gpu.findings import Findings
from benchmarks.gpu.padded import BOUNDS, free, make_model, measured
from benchmarks.gpu.setting import Setting
from benchmarks.harness.prefixes import batch_of_examples, groups, rows_of, targets_of
from hf_distca import DistCAConfig, pack_padded

STRATEGIES = {"unshared": False, "shared": True}
"""By name: `share_prefixes`."""
LEAST_SPEED_UP = 2.5
"""Of shared over unshared, on a GPU; an H200 had 4.4 with a prototype."""
LEAST_ROWS = 3.0
"""Rows without prefix sharing over rows with it."""


def check_prefixes(setting: Setting) -> Findings:
    """Steps of the same group by both strategies; rows, losses, gradients, times and memory."""
    findings = Findings()
    shortest, longest = setting.completion_tokens
    examples = groups(
        1,
        setting.rollout_model["vocab_size"],
        0,
        prompt_tokens=setting.prompt_tokens,
        shortest=shortest,
        longest=longest,
    )
    batch = batch_of_examples(examples, setting.device)
    tokens = int(batch.attention_mask.sum())
    found: dict[str, dict[str, float]] = {}
    findings.figures |= {"sequences": len(examples), "tokens": tokens, "strategies": found}
    for name, shares in STRATEGIES.items():
        free()
        with findings.trying(name):
            model = make_model(setting, "distca")
            config = DistCAConfig(tokens_per_rank=tokens, share_prefixes=shares)
            pack_padded(model, config, setting.device, dtype=setting.dtype)
            found[name] = {
                "rows": rows_of(model, batch),
                **measured(setting, model, [batch], targets_of(examples)),
            }
            del model
    compare_strategies(findings, found, on_cuda=setting.on_cuda)
    return findings


def compare_strategies(
    findings: Findings, found: dict[str, dict[str, float]], *, on_cuda: bool
) -> None:
    """Compare shared with unshared; times on a GPU only."""
    if found.keys() != STRATEGIES.keys():
        return
    unshared, shared = found["unshared"], found["shared"]
    for what, bound in BOUNDS.items():
        difference = abs(shared[what] - unshared[what]) / abs(unshared[what])
        findings.at_most(difference, bound, f"difference of the {what}")
    findings.at_most(
        shared["rows"] / unshared["rows"], 1 / LEAST_ROWS, "rows, shared over unshared"
    )
    if on_cuda:
        findings.at_most(
            shared["step_s"] / unshared["step_s"],
            1 / LEAST_SPEED_UP,
            "time, shared over unshared",
        )
