"""Prefix trees in hybrids: hidden states and gradients as of each sequence by itself.

Shape suffixes: N rows of this rank, S rows of a sequence, C channels.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from hf_distca import DistCAConfig
from hf_distca.dispatch.host_copies import ActivationOffload, HostMemory
from hf_distca.models.checkpointing import enable_checkpointing
from hf_distca.patches.offload import offload_checkpoints
from hf_distca.plan import Branches
from hf_distca.trainer.assembly import make_dispatcher
from tests.late_streams import LateStreams
from tests.mixing.steps import Ranks, cut_plan, make_model
from tests.models_and_batches import gradients_of, relative_error

pytestmark = pytest.mark.usefixtures("backward_thread")

KINDS = {
    "qwen3_next": "gated delta rule",
    "kimi_linear": "gated delta rule with a decay for each row of a state",
    "nemotron_h": "Mamba-2",
    "falcon_h1": "Mamba-2 beside attention",
    "minimax": "lightning attention",
    "lfm3": "short convolution and windows of 8 rows",
}
CPU = torch.device("cpu")
EXACT = 2e-5
# Document 1 is shorter than the halo of a convolution, document 3 has a single row, and document 6
# is a tree of its own.
PARENTS = [-1, 0, 1, 1, 0, 0, -1, -1, 7, 7]
OWN_ROWS = [70, 2, 28, 1, 20, 5, 12, 20, 10, 11]
SEQUENCES = [1, 2, 3, 4, 5, 6, 8, 9]
"""The last document of each sequence: leaves, and a document that others continue."""
PLANS: dict[int, list[Ranks]] = {
    # Branches lie before their prefix.
    1: [
        [
            [
                (4, 70, 90),
                (0, 0, 70),
                (5, 70, 75),
                (3, 72, 73),
                (6, 0, 12),
                (1, 70, 72),
                (2, 72, 100),
            ]
        ],
        [[(9, 20, 31), (7, 0, 20), (8, 20, 30)]],
    ],
    # Cuts at the ends of branches and inside; prefixes, single rows, and all branches of a prefix
    # elsewhere.
    2: [
        [
            [(0, 0, 40), (1, 70, 72), (4, 70, 90), (6, 0, 12), (5, 71, 73)],
            [(2, 72, 100), (0, 40, 70), (3, 72, 73), (5, 70, 71), (5, 73, 75)],
        ],
        [[(7, 0, 20)], [(8, 20, 30), (9, 20, 31)]],
    ],
    # Branches of several ranks continue a prefix, which is itself cut; a rank has no row of the
    # prefix.
    3: [
        [
            [(0, 0, 33), (2, 80, 100)],
            [(0, 33, 70), (4, 70, 80), (3, 72, 73)],
            [(1, 70, 72), (2, 72, 80), (4, 80, 90), (5, 70, 75), (6, 0, 12)],
        ],
        [[(8, 20, 30)], [(7, 0, 20), (9, 20, 25)], [(9, 25, 31)]],
    ],
}


@dataclass(frozen=True)
class Company:
    """What a step is computed with."""

    reentrant: bool | None = None  # of activation checkpoints; None for none
    ping_pong: bool = True
    offload: bool = False
    shards: bool = False  # FSDP2
    autocast: bool = False


ALONE, AUTOCAST = Company(), Company(autocast=True)
COMPANY = {
    1: (ALONE, AUTOCAST),
    2: (ALONE, AUTOCAST, Company(ping_pong=False, reentrant=False)),
    3: (
        *(ALONE, AUTOCAST, Company(reentrant=True)),
        Company(reentrant=False, offload=True),
        Company(reentrant=False, shards=True),
    ),
}
"""By the number of ranks."""


def plans_of(company: Company) -> list[Ranks]:
    """The nano-batches of a plan for as many ranks as there are."""
    nano_batches = PLANS[dist.get_world_size()]
    if company.ping_pong:
        return nano_batches
    return [[[*first, *second] for first, second in zip(*nano_batches, strict=True)]]


def starts() -> list[int]:
    """The first row of each document along its path."""
    ends: list[int] = []
    for parent, rows in zip(PARENTS, OWN_ROWS, strict=True):
        ends.append(rows + (0 if parent < 0 else ends[parent]))
    return [end - rows for end, rows in zip(ends, OWN_ROWS, strict=True)]


def tokens_of(document: int) -> Tensor:
    """The tokens of the path that ends with a document."""
    generator = torch.Generator().manual_seed(document)
    own = torch.randint(3, 64, (OWN_ROWS[document],), generator=generator)
    parent = PARENTS[document]
    return own if parent < 0 else torch.cat([tokens_of(parent), own])


def path_of(document: int) -> list[int]:
    """The documents of a path, from its root on."""
    parent = PARENTS[document]
    return [document] if parent < 0 else [*path_of(parent), document]


def weights_of(sequence: int, channels: int) -> Tensor:
    """[S, C] gradient of the hidden states of a sequence."""
    generator = torch.Generator().manual_seed(100 + sequence)
    return torch.randn(len(tokens_of(sequence)), channels, generator=generator)


Found = tuple[list[Tensor], dict[str, Tensor]]
"""Hidden states, and gradients of all parameters of the backbone."""


@cache
def alone(model_type: str, *, autocast: bool = False) -> Found:
    """Hidden states of each sequence by itself, [S, C], and the sum of their gradients."""
    model = make_model(model_type, "eager").model
    hidden = []
    for sequence in SEQUENCES:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            states = model(input_ids=tokens_of(sequence)[None], use_cache=False)[0][0]
        (states.float() * weights_of(sequence, states.shape[1])).sum().backward()
        hidden.append(states.detach().float())
    return hidden, gradients_of(model)


def in_trees(model_type: str, company: Company) -> Found:
    """Hidden states of this rank's rows, [N, C], and the gradients of all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    whole_model = make_model(model_type)
    config = DistCAConfig(
        tokens_per_rank=256,
        document_layout="fixed",
        planning={"ping_pong": True, "balance_block_size": 8, "balance_tolerance": 0.01},
    )
    dispatcher = make_dispatcher(whole_model, config, CPU)
    model = whole_model.model
    if company.reentrant is not None:
        enable_checkpointing(whole_model, {"use_reentrant": company.reentrant})
        whole_model.enable_input_require_grads()
    if company.offload:
        host = HostMemory(2**20, pinned=False, chunk_bytes=256, block_bytes=4096)
        layers = len(model.layers)
        dispatcher.offload = ActivationOffload(CPU, layers, host, LateStreams(4096))
        offload_checkpoints(whole_model)
    if company.shards:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    first_rows = starts()
    lengths = [len(tokens_of(document)) for document in range(len(PARENTS))]
    branches = Branches(np.array(PARENTS), np.array(first_rows))
    bound = dispatcher.bind(cut_plan(lengths, plans_of(company), dispatcher.settings, branches))
    held = list(bound.plan.held_by(rank))
    with torch.autocast("cpu", torch.bfloat16, enabled=company.autocast):
        states = model(
            input_ids=torch.cat([tokens_of(d)[start:stop] for d, start, stop in held])[None],
            position_ids=torch.cat([torch.arange(start, stop) for _, start, stop in held])[None],
            use_cache=False,
            distca_plan=bound,
        )[0][0]
    (states.float() * weights_of_rows(held, states.shape[1])).sum().backward()
    assert len(bound.kept_results) == 0
    gradients = gradients_of(model)
    for name, gradient in gradients.items():
        if company.shards:
            gradients[name] = ranks * gradient.full_tensor()
        else:
            dist.all_reduce(gradient)
    return [states.detach().float()], gradients


def weights_of_rows(held: list[tuple[int, int, int]], channels: int) -> Tensor:
    """[N, C] sum of the gradients of all sequences that have each row."""
    parts = []
    for document, start, stop in held:
        readers = [sequence for sequence in SEQUENCES if document in path_of(sequence)]
        of_readers = [weights_of(sequence, channels)[start:stop] for sequence in readers]
        parts.append(torch.stack(of_readers).sum(0))
    return torch.cat(parts)


class Errors(NamedTuple):
    """The largest errors of hidden states and of a gradient, relative to the largest value."""

    hidden: float
    gradients: float
    parameter: str  # with the largest error of a gradient

    @classmethod
    def of(cls, found: Found, expected: Found) -> "Errors":
        """Return the errors; gradients below a thousandth of the largest are rounding errors."""
        gradients, expected_gradients = found[1], expected[1]
        assert gradients.keys() == expected_gradients.keys()
        largest = max(gradient.abs().max() for gradient in expected_gradients.values())
        by_name = {
            name: relative_error(gradients[name].float(), gradient)
            for name, gradient in expected_gradients.items()
            if gradient.abs().max() > 1e-3 * largest
        }
        worst = max(by_name, key=lambda name: by_name[name])
        hidden = relative_error(torch.cat(found[0]), torch.cat(expected[0]))
        return cls(hidden, by_name[worst], worst)


def rows_of_rank(hidden: list[Tensor], nano_batches: list[Ranks]) -> list[Tensor]:
    """Of the hidden states of all sequences, those of this rank's rows."""
    rows = []
    for nano_batch in nano_batches:
        for document, start, stop in nano_batch[dist.get_rank()]:
            sequence = next(s for s in SEQUENCES if document in path_of(s))
            rows.append(hidden[SEQUENCES.index(sequence)][start:stop])
    return rows


def errors_in_trees(model_type: str, exact: Found) -> dict[Company, Errors]:
    """Errors of a step in trees in each company, beside each sequence by itself."""
    found = {}
    for company in COMPANY[dist.get_world_size()]:
        hidden = rows_of_rank(exact[0], plans_of(company))
        found[company] = Errors.of(in_trees(model_type, company), (hidden, exact[1]))
    return found


@pytest.mark.parametrize("model_type", KINDS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_branches_start_from_the_state_of_their_prefix(rank_pools, model_type, ranks, subtests):
    exact = alone(model_type)
    rough = Errors.of(alone(model_type, autocast=True), exact)  # what the precision alone makes
    for found in rank_pools[ranks].run(errors_in_trees, model_type, exact):
        for company, errors in found.items():
            with subtests.test(str(company)):
                if company.autocast:
                    assert errors.hidden < 2 * rough.hidden + 5e-2
                    assert errors.gradients < 2 * rough.gradients + 5e-2, errors.parameter
                else:
                    assert errors.hidden < EXACT
                    assert errors.gradients < EXACT, errors.parameter
