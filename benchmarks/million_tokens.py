"""A million tokens on four CPU ranks: a step of a narrow Qwen3, exact on sampled rows.

A micro-batch has one document, or a document of 600,000 of 1,048,576 tokens beside short ones.
DistCATrainer takes one step. Layers are checkpointed, their checkpoints go to other memory and back
(`offload_activations`), MLPs and norms run in chunks, K/V rows travel in stages. Two layers attend
to all rows before a row. Two layers between them have a window: the checkpoints of the last two
layers never move, so that two layers alone would move nothing.

Only sampled rows have a target, and each of them has a token that no other row has. One process
runs the same model document by document by PyTorch's own attention. The reference costs one forward
of core attention: the last layer computes sampled rows only, and the first layer's backward is
computed for sampled rows only, by dense formulas. The loss of the reference is exact. So are its
gradients of the embeddings of sampled rows, and of all weights behind the first core attention.
The benchmark compares the loss and these gradients of the step with the reference.

Memory is the most that a rank's process held, above what it held before the step; on a CPU the
checkpoints that left are part of it. Times are of this machine, on which ranks share cores.

Run: python benchmarks/million_tokens.py [--tokens 1048576] [--short 400]

Shape suffixes: T rows of a document, S sampled rows of them, B blocks of W rows, H heads, D head
dim.
"""

import tempfile
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from harness import begin_peak, follow_tensors, options_parser, peak, print_json, run_ranks, table
from harness.models import documents_of
from harness.padded import lengths_that_add_up
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from hf_distca import DistCATrainer, DistCATrainingArguments
from hf_distca.checks.setting_names import CHECKPOINTING

RANKS = 4
LONG_SHARE = 600_000 / 1_048_576
SAMPLES = 64
COMMON_TOKENS = 512
"""Token ids that several rows may have. Each sampled row has a token id that no other row has."""
WINDOW = 128
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": COMMON_TOKENS + SAMPLES,
    "use_sliding_window": True,
    "sliding_window": WINDOW,
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
}
BEFORE_ATTENTION = tuple(
    f"model.layers.0.{name}.weight"
    for name in (
        "input_layernorm",
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")),
    )
)
"""Weights whose gradients need the first layer's backward of all rows."""
EMBEDDINGS = "model.embed_tokens.weight"
TIMEOUT_S = 12 * 60 * 60
"""Seconds that a rank may wait for another, which may compute a stage for long."""
REFERENCE = "million_tokens_reference"
IGNORED = -100


class Step(NamedTuple):
    """Loss and gradients of a step, and what the step took."""

    loss: float
    gradients: dict[str, Tensor]
    seconds: float
    peak_bytes: int
    offloaded_bytes: int = 0  # memory for activation checkpoints of layers


def qwen3(positions: int, implementation: str) -> nn.Module:
    """A narrow Qwen3 with random weights, the same every time."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **SIZES,
        max_position_embeddings=positions,
        attn_implementation=implementation,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


def lengths_of(tokens: int, short: int) -> list[int]:
    """Lengths of a long document and of `short` short ones."""
    if short == 0:
        return [tokens]
    long = round(tokens * LONG_SHARE)
    return [long, *lengths_that_add_up(short, tokens - long, seed=0)]


def sampled_documents(lengths: list[int]) -> list[Tensor]:
    """Documents with a unique token in each sampled row; a last row is never sampled."""
    documents = documents_of(lengths, COMMON_TOKENS)
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor(lengths).cumsum(0) - 1
    shuffled = torch.randperm(sum(lengths), generator=generator)
    sampled = shuffled[~torch.isin(shuffled, ends)][:SAMPLES]
    tokens = torch.cat(documents)
    tokens[sampled] = COMMON_TOKENS + torch.arange(SAMPLES)
    return list(tokens.split(lengths))


def targets_of(document: Tensor) -> Tensor:
    """Next tokens of sampled rows; all other rows have no target."""
    following = pad(document[1:], (0, 1), value=IGNORED)
    return torch.where(document >= COMMON_TOKENS, following, IGNORED)


class Measured(TrainerCallback):
    """Gradients of a trainer's only step, and what its passes took."""

    def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
        """Begin to measure."""
        self._before = begin_peak()
        self._began = time.perf_counter()

    def on_pre_optimizer_step(self, *_args: Any, model: Any, **_kwargs: Any) -> None:
        """Note the gradients of all ranks."""
        self.seconds = time.perf_counter() - self._began
        self.peak_bytes = peak() - self._before
        named = model.named_parameters()
        self.gradients = {name: weight.grad.clone() for name, weight in named}


def planned_step(lengths: list[int], folder: str) -> Step:
    """Train one step on this rank; return the loss and the gradients of all ranks."""
    follow_tensors()
    tokens = -(-sum(lengths) // RANKS)
    arguments = DistCATrainingArguments(
        output_dir=folder,
        tokens_per_rank=tokens,
        planning={"exchange_buffer_bytes": tokens * 16},
        mlp_chunk_rows=1024,
        offload_activations=True,
        max_steps=1,
        max_grad_norm=0.0,
        train_sampling_strategy="sequential",
        use_cpu=True,
        exchange_timeout=TIMEOUT_S,
        ddp_timeout=TIMEOUT_S,
        dataloader_pin_memory=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        **{CHECKPOINTING: True},
    )
    measured = Measured()
    model: Any = qwen3(max(lengths), "distca")
    # Labels of a data set are not shifted.
    data: Any = [
        {"input_ids": document, "labels": pad(targets_of(document)[:-1], (1, 0), value=IGNORED)}
        for document in sampled_documents(lengths)
    ]
    trainer = DistCATrainer(model, arguments, train_dataset=data, callbacks=[measured])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    (loss,) = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.dispatcher.offload is not None
    host_bytes = trainer.dispatcher.offload.host.reserved
    trainer.close()
    return Step(loss, measured.gradients, measured.seconds, measured.peak_bytes, host_bytes)


def reference_attention(
    module: Any,
    q_1HTD: Tensor,
    k_1HTD: Tensor,
    v_1HTD: Tensor,
    _mask: None,
    *,
    sampled_S: Tensor,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attention of one document and one head, as far as the comparison needs it."""
    q_TD, k_TD, v_TD = q_1HTD[0, 0], k_1HTD[0, 0], v_1HTD[0, 0]
    if module.sliding_window is not None:
        o_TD = windowed(q_TD, k_TD, v_TD)
    elif module.layer_idx == 0:
        backward_of_samples: Any = BackwardOfSamples.apply
        o_TD = backward_of_samples(q_TD, k_TD, v_TD, sampled_S)
    else:
        visible_ST = torch.arange(len(k_TD)) <= sampled_S[:, None]
        o_SD = scaled_dot_product_attention(q_TD[sampled_S], k_TD, v_TD, attn_mask=visible_ST)
        o_TD = torch.zeros_like(q_TD).index_copy(0, sampled_S, o_SD)
    return o_TD[None, :, None], None


def windowed(q_TD: Tensor, k_TD: Tensor, v_TD: Tensor) -> Tensor:
    """Causal attention to WINDOW rows; a block of so many rows reads its own and the one before."""
    rows = len(q_TD)
    q_BWD, k_BWD, v_BWD = (
        pad(x, (0, 0, 0, -rows % WINDOW)).unflatten(0, (-1, WINDOW)) for x in (q_TD, k_TD, v_TD)
    )
    first_1WD = scaled_dot_product_attention(q_BWD[:1], k_BWD[:1], v_BWD[:1], is_causal=True)
    query, key = torch.arange(WINDOW)[:, None], torch.arange(2 * WINDOW)
    band = (key > query) & (key <= query + WINDOW)
    further_BWD = scaled_dot_product_attention(
        q_BWD[1:],
        torch.cat([k_BWD[:-1], k_BWD[1:]], dim=1),
        torch.cat([v_BWD[:-1], v_BWD[1:]], dim=1),
        attn_mask=band,
    )
    return torch.cat([first_1WD, further_BWD]).flatten(0, 1)[:rows]


class BackwardOfSamples(torch.autograd.Function):
    """Causal attention whose gradients are computed for sampled rows, and zero for others."""

    @staticmethod
    def forward(ctx: Any, q_TD: Tensor, k_TD: Tensor, v_TD: Tensor, sampled_S: Tensor) -> Tensor:
        o_11TD, lse_11T = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_TD[None, None], k_TD[None, None], v_TD[None, None], is_causal=True
        )
        ctx.save_for_backward(q_TD, k_TD, v_TD, o_11TD[0, 0], lse_11T[0, 0], sampled_S)
        return o_11TD[0, 0]

    @staticmethod
    def backward(ctx: Any, do_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_TD, k_TD, v_TD, o_TD, lse_T, sampled_S = ctx.saved_tensors
        scale = q_TD.shape[1] ** -0.5
        delta_T = (do_TD * o_TD).sum(1)
        row_T = torch.arange(len(q_TD))
        # 1. dQ of sampled rows, from all rows before them.
        p_ST = (scale * q_TD[sampled_S] @ k_TD.T - lse_T[sampled_S, None]).exp()
        p_ST *= row_T <= sampled_S[:, None]
        ds_ST = p_ST * (do_TD[sampled_S] @ v_TD.T - delta_T[sampled_S, None])
        dq_SD = scale * ds_ST @ k_TD
        # 2. dK and dV of sampled rows, from all rows after them.
        p_TS = (scale * q_TD @ k_TD[sampled_S].T - lse_T[:, None]).exp()
        p_TS *= row_T[:, None] >= sampled_S
        ds_TS = p_TS * (do_TD @ v_TD[sampled_S].T - delta_T[:, None])
        dk_SD, dv_SD = scale * ds_TS.T @ q_TD, p_TS.T @ do_TD
        dq_TD, dk_TD, dv_TD = (
            torch.zeros_like(q_TD).index_copy(0, sampled_S, gradient_SD)
            for gradient_SD in (dq_SD, dk_SD, dv_SD)
        )
        return dq_TD, dk_TD, dv_TD, None


def reference_step(lengths: list[int]) -> Step:
    """Run the documents one after another in this process."""
    AttentionInterface.register(REFERENCE, reference_attention)
    model = qwen3(max(lengths), REFERENCE)
    before = begin_peak()
    began = time.perf_counter()
    loss_of_all = 0.0
    for document in sampled_documents(lengths):
        (sampled_S,) = torch.where(document >= COMMON_TOKENS)
        if len(sampled_S) > 0:
            targets = targets_of(document)[sampled_S][None]
            loss = model(
                input_ids=document[None],
                position_ids=torch.arange(len(document))[None],
                labels=targets,
                shift_labels=targets,
                num_items_in_batch=SAMPLES,
                logits_to_keep=sampled_S,
                sampled_S=sampled_S,
            ).loss
            loss.backward()
            loss_of_all += loss.item()
    seconds = time.perf_counter() - began
    gradients: dict[str, Any] = {name: weight.grad for name, weight in model.named_parameters()}
    return Step(loss_of_all, compared(gradients), seconds, peak() - before)


def compared(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients that the reference has: embeddings of sampled rows, and weights that come later."""
    later = {name: value for name, value in gradients.items() if name not in BEFORE_ATTENTION}
    return {**later, EMBEDDINGS: gradients[EMBEDDINGS][COMMON_TOKENS:]}


def compare(lengths: list[int]) -> dict[str, float]:
    """Return how far a step of the ranks is from the reference, and what both took."""
    with tempfile.TemporaryDirectory() as folder:
        by_rank: list[Step] = run_ranks(RANKS, partial(planned_step, folder=folder), lengths)
    expected = reference_step(lengths)
    gradients = compared(by_rank[0].gradients)
    errors = {
        name: ((gradients[name] - wanted).norm() / wanted.norm()).item()
        for name, wanted in expected.gradients.items()
    }
    return {
        "loss": by_rank[0].loss,
        "loss error": abs(by_rank[0].loss / expected.loss - 1),
        "largest gradient error": max(errors.values()),
        "gradient error of embeddings": errors[EMBEDDINGS],
        "step, s": max(step.seconds for step in by_rank),
        "reference, s": expected.seconds,
        "peak of a rank, MiB": max(step.peak_bytes for step in by_rank) / 2**20,
        "checkpoints of a rank in other memory, MiB": by_rank[0].offloaded_bytes / 2**20,
        "peak of the reference, MiB": expected.peak_bytes / 2**20,
    }


def main() -> None:
    options = options_parser(
        __doc__,
        tokens=(1 << 20, "of a micro-batch"),
        short=(400, "documents beside the long one; 0 for one document of all tokens"),
    ).parse_args()
    lengths = lengths_of(options.tokens, options.short)
    found = compare(lengths)
    table(["", ""], [[name, f"{value:.3g}"] for name, value in found.items()])
    print_json(
        tokens=options.tokens,
        longest_document=lengths[0],
        documents=len(lengths),
        sampled_rows=SAMPLES,
        **found,
    )


if __name__ == "__main__":
    main()
