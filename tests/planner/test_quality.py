"""What plans of some corpora cost, bounded closely: a step of the planner that is left out costs more somewhere."""

import pytest

from hf_distca.planner.balance import balance
from hf_distca.planner.layout import fixed_layout, joint_layout
from hf_distca.planner.metrics import measure

MIXED = [9000, 5200, 3100, 2500, 1700, 1200, 900, 700, 500, 400, 300, 250, 200, 150, 100]
LONG = [24000, 15000, 4100, 2300, 1100, 800, 450, 300]

# name: (rows of documents, ranks, window), (bytes of all workers and of the busiest one, both in MB; tasks)
FIXED = {
    "one long document": (([[16384], [2048] * 8], 2, None), (137.8, 101.0, 12)),
    "eight mixtures": (
        (
            [
                [9000, 7000],
                [16000],
                [4000] * 4,
                [1000] * 16,
                [5000, 5000, 6000],
                [8000, 8000],
                [2000] * 8,
                [12000, 4000],
            ],
            8,
            None,
        ),
        (444.7, 158.7, 49),
    ),
    "rows over four ranks": (
        ([[40000, 15000, 9000], [16000, 16000, 8000, 8000, 4000, 12000]], 8, None),
        (1129.1, 344.8, 20),
    ),
    "window": (([[16384], [8192] * 2, [1024] * 16, [512] * 32], 4, 2048), (273.7, 93.4, 58)),
    "many ranks": (([LONG] * 4 + [MIXED] * 12, 64, None), (5538.7, 557.7, 340)),
}
JOINT = {
    "one long document": (([40000] + [1000] * 25, 2, None), (122.7, 118.8, 29)),
    "long documents": (([42800, 34800, 27500, 23500, 13300, 8300, 2800], 4, None), (609.7, 204.0, 13)),
    "longer than a rank": (
        ([58300, 36700, 28700, 26600, 21700, 10500, 9500, 2800, 1800], 4, None),
        (541.0, 200.2, 17),
    ),
    "twice the same": (([7900, 5800, 5400, 4600, 2000, 1000, 600, 400, 100] * 2, 8, None), (296.2, 61.1, 38)),
    "short documents": ((MIXED * 4, 4, None), (0.0, 0.0, 62)),
    "window": (
        ([35400, 27900, 15600, 13400, 7600, 6000, 5300, 4300, 2700, 400, 100] * 2, 4, 2048),
        (23.7, 9.1, 25),
    ),
    "many ranks": ((LONG * 10 + MIXED * 10 + [90000, 60000], 64, None), (13845.0, 1701.5, 414)),
    "many ranks, window": ((LONG * 10 + MIXED * 10 + [90000, 60000], 64, 4096), (1817.9, 77.6, 405)),
}


def check(plan, bounds):
    metrics = measure(plan)
    most_total, most_busiest, most_tasks = bounds
    assert metrics.max_over_mean <= 1.01
    assert metrics.bytes_total <= most_total * 1e6
    assert metrics.bytes_bottleneck <= most_busiest * 1e6
    assert metrics.tasks <= most_tasks


@pytest.mark.parametrize("corpus", FIXED)
def test_fixed(corpus):
    (rows, ranks, window), bounds = FIXED[corpus]
    check(balance(fixed_layout(rows, ranks), window=window), bounds)


@pytest.mark.parametrize("corpus", JOINT)
def test_joint(corpus):
    (lengths, ranks, window), bounds = JOINT[corpus]
    layout = joint_layout(lengths, ranks, -(-sum(lengths) // ranks), window=window)
    assert layout.tokens.max() - layout.tokens.min() <= 1
    check(balance(layout, window=window), bounds)
