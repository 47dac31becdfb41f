"""NEFTune's noise on packed rows: as large as in the padded batch from which each row comes.

transformers divides the noise by the square root of the values of a sequence in its batch, padding
included: columns times hidden size. A packed row has the tokens of many sequences, and of padded
batches with other numbers of columns. So each token brings the number of its columns along.

Shape suffixes: B sequences, L columns of a padded batch; T rows, H hidden size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.neftune import neftune_post_forward_hook

COLUMNS = "columns_of_batch"
SEQUENCE = "number_of_sequence"
"""Integers of each token: columns of its padded batch, and a number that no other sequence has."""
REASON = "the noise of neftune_noise_alpha is drawn for each row"
"""Why sequences with equal tokens share no prefix."""


def is_drawn(model: Any) -> bool:
    """Return whether the next forward of a model adds noise to its embeddings."""
    embeddings = model.get_input_embeddings()
    return bool(embeddings.training) and neftune_post_forward_hook in _hooks(embeddings).values()


def columns_of_noise(mask_BL: Tensor, rank: int) -> dict[str, Tensor]:
    """Return what each token of a rank's padded batch brings along, [B, L] integers by name."""
    sequences, columns = mask_BL.shape
    numbers_B = torch.arange(sequences, device=mask_BL.device) + (rank << 32)
    return {
        COLUMNS: torch.full_like(mask_BL, columns, dtype=torch.int64),
        SEQUENCE: numbers_B[:, None].expand(mask_BL.shape),
    }


@contextmanager
def noise_of_rows(model: Any, inputs: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Let a forward draw the noise of each row by the columns of its padded batch.

    Yield the inputs of the model without these columns.
    """
    columns_1T = inputs.get(COLUMNS)
    if columns_1T is None:
        yield inputs
        return
    hooks = _hooks(model.get_input_embeddings())
    numbers = [number for number, hook in hooks.items() if hook is neftune_post_forward_hook]
    hooks |= dict.fromkeys(numbers, partial(_add_noise, columns_1T))
    try:
        yield {k: value for k, value in inputs.items() if k not in (COLUMNS, SEQUENCE)}
    finally:
        hooks |= dict.fromkeys(numbers, neftune_post_forward_hook)


def _hooks(module: nn.Module) -> dict[int, Any]:
    """Return the hooks that see what a module's forward returns, in their order."""
    return module._forward_hooks


def _add_noise(columns_1T: Tensor, module: Any, _: Any, output_1TH: Tensor) -> Tensor:
    """Add noise to embeddings; a hook of the module in place of transformers' own."""
    # The row of a filler has no columns.
    values_1T = columns_1T.clamp(min=1) * output_1TH.shape[-1]
    most_1T = (module.neftune_noise_alpha / values_1T.sqrt()).to(output_1TH.dtype)
    noise_1TH = torch.zeros_like(output_1TH).uniform_(-1, 1) * most_1T.unsqueeze(-1)
    noisy_1TH: Tensor = output_1TH + noise_1TH
    return noisy_1TH
