"""Left padding without position_ids: rows that are computed, and what rounding changes.

TRL's GRPO pads prompts on the left and completions on the right, and calls the model without
position_ids. There are two ways to count positions:

  columns      a position is the number of the token's column, as models count
  first token  positions begin at 0 with the first token of each sequence

Rows: there are eight prompts. Each has the same system prompt of 1,024 tokens, 64 to 512 tokens of
its own, and eight completions of 64 to 256 tokens. All rows that ranks compute with prefix sharing
are counted.

Rounding: a LLaMA with random weights computes one sequence of 256 tokens, behind some columns of
padding. The last hidden states are compared with the same model's in float64. The error is the norm
of their difference, divided by the norm of the float64 states.

Run: python benchmarks/left_padding.py
"""

import argparse

import torch
from harness import print_json
from harness.models import QUARTER_OF_600M, llama
from torch import Tensor, nn

from hf_distca.batches.limits import NO_LIMITS
from hf_distca.dispatch.padded_rows import PaddedBatch, read_sequences
from hf_distca.planner.padding import plan_padded
from hf_distca.planner.settings import PlanSettings

SYSTEM = 1024
PROMPTS = 8
COMPLETIONS = 8
OWN = (64, 512)
"""Tokens of a prompt after the system prompt."""
COMPLETION = (64, 256)
VOCABULARY = 512
TOKENS = 256
"""Tokens of the sequence whose rounding is measured."""
PADDING = (100, 1000, 8000)
WAYS = ("columns", "first token")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def rollouts(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return `input_ids` and `attention_mask` of the rollouts of all prompts, [B, L]."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(shortest: int, longest: int) -> Tensor:
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        return torch.randint(3, VOCABULARY, (length,), generator=generator)

    system = drawn(SYSTEM, SYSTEM)
    width = SYSTEM + OWN[1]
    input_ids_BL = torch.zeros(PROMPTS * COMPLETIONS, width + COMPLETION[1], dtype=torch.long)
    mask_BL = torch.zeros_like(input_ids_BL)
    for prompt in range(PROMPTS):
        tokens = torch.cat([system, drawn(*OWN)])
        for row in range(prompt * COMPLETIONS, (prompt + 1) * COMPLETIONS):
            completion = drawn(*COMPLETION)
            columns = slice(width - len(tokens), width + len(completion))
            input_ids_BL[row, columns] = torch.cat([tokens, completion])
            mask_BL[row, columns] = 1
    return input_ids_BL, mask_BL


def counted_rows(way: str) -> dict[str, int]:
    """Return the tokens of rollouts, and the rows that are computed."""
    input_ids_BL, mask_BL = rollouts()
    positions_BL = torch.arange(mask_BL.shape[1]).expand(mask_BL.shape)
    if way == "first token":
        positions_BL = mask_BL.cumsum(1) - 1
    batch = PaddedBatch({"input_ids": input_ids_BL, "position_ids": positions_BL}, mask_BL)
    sequences = read_sequences(batch, NO_LIMITS, share_prefixes=True)
    assert sequences.hashes is not None
    tokens = int(mask_BL.sum())
    lengths = tuple(sequences.lengths.tolist())
    planned = plan_padded([lengths], PlanSettings(1, tokens), [sequences.hashes])
    return {"tokens": tokens, "rows": planned.sequences.computed_rows}


def last_hidden_states(model: nn.Module, input_ids: Tensor, first: int) -> Tensor:
    """Return the last hidden states in float64, if positions begin at `first`."""
    positions = torch.arange(first, first + TOKENS)[None]
    with torch.no_grad():
        output = model.base_model(input_ids, position_ids=positions)
    states: Tensor = output.last_hidden_state.double()
    return states


def rounding(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Return the error of each way to count, and the difference between both, by padding."""
    model = llama(TOKENS + max(PADDING), **QUARTER_OF_600M).eval()
    generator = torch.Generator().manual_seed(0)
    input_ids = torch.randint(3, VOCABULARY, (1, TOKENS), generator=generator)
    exact = last_hidden_states(model.double(), input_ids, 0)
    model.to(dtype)

    def distance(states: Tensor, others: Tensor) -> float:
        return float((states - others).norm() / exact.norm())

    counted = last_hidden_states(model, input_ids, 0)
    found = {}
    for padding in PADDING:
        by_column = last_hidden_states(model, input_ids, padding)
        found[str(padding)] = {
            "columns": distance(by_column, exact),
            "first token": distance(counted, exact),
            "between both": distance(by_column, counted),
        }
    return found


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    rows = {way: counted_rows(way) for way in WAYS}
    errors = {name: rounding(dtype) for name, dtype in DTYPES.items()}
    print_json(rows=rows, errors=errors)


if __name__ == "__main__":
    main()
