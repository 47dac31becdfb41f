"""Encoders of images in simulated steps, of so few images that they can be counted by hand."""

from dataclasses import replace

import numpy as np
import pytest

from hf_distca.batches.encoder_shape import EncoderShape
from hf_distca.planner.images import IMAGE, PLACEHOLDERS
from hf_distca.planner.settings import PlanSettings
from hf_distca.predict.encoders import encoder_costs
from hf_distca.predict.seconds import LinkCost, Links
from hf_distca.predict.shapes import ModelShape
from hf_distca.run import RunSpec
from hf_distca.sim.context_parallel import Group
from hf_distca.sim.encoders import SimulatedImages, with_encoders
from hf_distca.sim.strategies import plain, planned, whole_documents
from tests.sim.unit_costs import KIND, PROFILE

MODEL = ModelShape(
    {KIND: 1}, hidden=8, before_attention=5, after_attention=6, head=7, parameters=100
)
BYTE_A_SECOND = Links(LinkCost(0, 1.0), LinkCost(0, 1.0))
RUN = RunSpec(
    PlanSettings(2, 8, kinds=(KIND,), balance_block_size=1, document_layout="fixed"),
    MODEL,
    PROFILE,
    checkpointing={},
)
LENGTHS = np.array([6, 4])
"""Packing gives each rank one of the documents."""


def images(*seconds: float, of: int = 0) -> SimulatedImages:
    """Images of a document with one placeholder each from row 1 on, which take these seconds."""
    table = np.zeros(len(seconds), IMAGE)
    table["document"], table["rows"], table["patches"] = of, 1, 4
    table["cost"] = seconds
    runs = np.zeros(len(seconds), PLACEHOLDERS)
    runs["image"] = np.arange(len(seconds))
    runs["start"] = 1 + np.arange(len(seconds))
    runs["stop"] = runs["start"] + 1
    return SimulatedImages(table, runs, row_bytes=3)


def test_without_a_plan_a_rank_encodes_the_images_of_its_documents():
    step = plain(LENGTHS, RUN)
    seen = with_encoders(step, [], images(30.0, 20.0), LENGTHS, RUN)
    assert seen.encoder is not None
    assert seen.encoder.tolist() == [50, 0]
    assert (seen.seconds, seen.encoder_patches) == (step.seconds + 50, 8)
    # The rank with less attention encodes meanwhile.
    other = with_encoders(step, [], images(30.0, of=1), LENGTHS, RUN)
    assert other.seconds == max(step.attention[0], step.attention[1] + 30)


def test_ranks_that_share_documents_share_their_images():
    step = whole_documents(LENGTHS, RUN, Group(2))
    seen = with_encoders(step, [], images(30.0, 20.0), LENGTHS, RUN)
    assert seen.encoder is not None
    assert seen.encoder.tolist() == [25, 25]


def test_images_of_a_cut_document_are_cut():
    run = replace(RUN, plans=replace(RUN.plans, rows_per_rank=4))
    lengths = np.array([6])
    seen = with_encoders(plain(lengths, run), [], images(30.0), lengths, run)
    assert seen.encoder is not None
    assert sorted(seen.encoder.tolist()) == [10, 20]


def test_a_plan_divides_images_and_all_ranks_wait_for_them():
    step, (plan,) = planned(LENGTHS, RUN)
    seen = with_encoders(step, [plan], images(30.0, 20.0), LENGTHS, RUN)
    assert seen.encoder is not None
    assert sorted(seen.encoder.tolist()) == [20, 30]
    assert seen.seconds == step.seconds + 30
    # One row of features of 3 bytes travels there, and its gradient back.
    slow = replace(RUN, profile=replace(PROFILE, exchange=BYTE_A_SECOND))
    assert with_encoders(step, [plan], images(30.0, 20.0), LENGTHS, slow).seconds == (
        step.seconds + 30 + 2 * 3
    )


def test_a_pod_encodes_the_images_of_its_documents():
    _, (first,) = planned(LENGTHS, RUN)
    moved = [replace(nano, documents=nano.documents + 2) for nano in first.nano_batches]
    second = replace(first, first_rank=2, nano_batches=tuple(moved))
    both = images(30.0, 20.0)
    both.images["document"] = [0, 2]
    encoders, features = both.encoders([first, second])
    assert (encoders // 2).tolist() == [0, 1]
    assert features["image"].tolist() == [0, 1]
    assert (features["rank"] // 2).tolist() == [0, 1]


def test_images_of_documents_that_are_not_drawn():
    both = images(30.0, 20.0)
    both.images["document"] = [0, 1]
    assert both.of_first(1).images["cost"].tolist() == [30]
    assert both.of_first(1).placeholders["image"].tolist() == [0]


@pytest.mark.parametrize(("checkpointing", "forwards"), [(False, 1), (True, 2)])
def test_seconds_of_an_encoder(checkpointing, forwards):
    """Two layers, one of them with windows of 3 patches; heads are those of the kernel."""
    shape = EncoderShape(2, 8, 2, layer_parameters=50, full_layers=1, window=3)
    costs = encoder_costs(shape, PROFILE, checkpointing=checkpointing)
    pair = forwards * 1 + 2
    assert (costs.patch, costs.pair) == (3 * pair, pair)
    matrices = replace(PROFILE, flops_per_second=1.0, forward=PROFILE.backward.scaled(0))
    matrices = replace(matrices, backward=matrices.forward)
    costs = encoder_costs(shape, matrices, checkpointing=checkpointing)
    assert costs.patch == 2 * 2 * 50 * (forwards + 2)
    assert shape.operations == (2 * 50 + 2 * 8 * 3, 2 * 8)
    assert costs.seconds(np.array([2]), np.array([4])).tolist() == [2 * costs.patch]
