"""Activation checkpoints around a place in a forward."""

import torch
from torch.utils.checkpoint import checkpoint

from hf_distca.dispatch.kept_results import checkpoints_around


def test_both_kinds_of_checkpoints_are_seen_and_other_hooks_are_none():
    seen = []

    def place(x):
        seen.append(checkpoints_around())
        return 2 * x

    x = torch.ones(1, requires_grad=True)
    place(x)
    for use_reentrant in (False, True):
        checkpoint(place, x, use_reentrant=use_reentrant)
    checkpoint(lambda x: checkpoint(place, x, use_reentrant=False), x, use_reentrant=False)
    with torch.autograd.graph.save_on_cpu():
        place(x)
    # A reentrant one shows only in that gradients are off.
    assert seen == [(0, True), (1, True), (0, False), (2, True), (0, True)]
