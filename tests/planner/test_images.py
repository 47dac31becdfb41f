"""Which rank encodes an image, and where its features go."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hf_distca.plan import FEATURES, PlannedImages
from hf_distca.plan.images import feature_route, travelling_rows
from hf_distca.planner.images import IMAGE, PLACEHOLDERS, choose_encoders, plan_images
from hf_distca.planner.sequences import TOKENS


def features_of(*entries: tuple[int, int, int, int, int]) -> np.ndarray:
    """Entries (image, start, stop, rank, offset)."""
    return np.array(list(entries), FEATURES)


def test_an_image_stays_where_its_placeholders_are_if_work_is_even():
    features = features_of((0, 0, 4, 0, 0), (1, 0, 4, 1, 0))
    assert choose_encoders(np.array([1.0, 1.0]), features, range(2)).tolist() == [0, 1]


def test_images_of_one_rank_are_divided():
    features = features_of((0, 0, 4, 0, 0), (1, 0, 2, 0, 4), (2, 0, 2, 0, 6))
    assert choose_encoders(np.array([4.0, 2.0, 2.0]), features, range(2)).tolist() == [1, 0, 0]


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=20), st.integers(1, 5))
def test_no_rank_has_more_than_the_mean_and_the_costliest_image(costs, ranks):
    features = features_of(*((image, 0, 1, 0, image) for image in range(len(costs))))
    encoders = choose_encoders(np.array(costs), features, range(ranks))
    loads = np.bincount(encoders, costs, ranks)
    assert loads.max() <= sum(costs) / ranks + max(costs) + 1e-9


def test_a_document_that_is_cut_inside_an_image():
    """Rank 0 holds rows 0 to 3, rank 1 rows 3 to 9. The image has rows 2 to 6, and a row between
    its second and third placeholder.
    """
    images = np.array([(0, 0, 0, 3, 12, 144, 1.0)], IMAGE)
    placeholders = np.array([(0, 2, 4, 0), (0, 5, 6, 2)], PLACEHOLDERS)
    held = np.zeros(2, TOKENS)
    held["rank"] = [0, 1]
    held["start"], held["stop"] = [0, 3], [3, 9]
    planned = plan_images(images, placeholders, held, range(2), ["image"])["image"]
    assert planned.features.tolist() == [(0, 0, 1, 0, 0), (0, 1, 2, 1, 0), (0, 2, 3, 1, 1)]
    assert planned.encoders.tolist() == [1]
    assert travelling_rows(planned) == 1


@given(st.data())
def test_every_placeholder_gets_its_row(data):
    ranks = data.draw(st.integers(1, 4))
    rows = np.array(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=6)))
    encoders = np.array([data.draw(st.integers(0, ranks - 1)) for _ in rows])
    entries = []
    for image, count in enumerate(rows.tolist()):
        cut = data.draw(st.integers(0, count))
        for start, stop in ((0, cut), (cut, count)):
            if start < stop:
                entries.append((image, start, stop, data.draw(st.integers(0, ranks - 1))))
    entries.sort(key=lambda entry: entry[3])
    offsets = [
        sum(stop - start for _, start, stop, other in entries[:number] if other == rank)
        for number, (*_, rank) in enumerate(entries)
    ]
    features = features_of(*((*entry, at) for entry, at in zip(entries, offsets, strict=True)))
    planned = PlannedImages(rows, encoders, features)
    routes = [feature_route(planned, rank, range(ranks)) for rank in range(ranks)]
    # 1. Each rank names its rows (image, row), and sends them.
    encoded = [
        [(image, row) for image in planned.encoded_by(rank) for row in range(rows[image])]
        for rank in range(ranks)
    ]
    sent = [
        np.split(routes[rank].sent, np.cumsum(routes[rank].sent_counts)[:-1])
        for rank in range(ranks)
    ]
    for rank, route in enumerate(routes):
        assert route.received_counts.tolist() == [len(sent[other][rank]) for other in range(ranks)]
        arrived = [
            encoded[other][row] for other in range(ranks) for row in sent[other][rank].tolist()
        ]
        placed = dict(zip(route.placed.tolist(), arrived, strict=True))
        # 2. They arrive in the order of placeholders.
        expected = [
            (image, row)
            for image, start, stop, holder, _ in features.tolist()
            if holder == rank
            for row in range(start, stop)
        ]
        assert [placed[number] for number in range(len(placed))] == expected
