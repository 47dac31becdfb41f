"""What deferred logits give beside the tensor that they stand for, and what they have computed for
it.
"""

import pytest
import torch
from accelerate.utils import convert_to_fp32
from torch.nn import functional

from hf_distca.patches.head import DeferredLogits
from hf_distca.patches.loss import apply_steps

WEIGHT_VD = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
HIDDEN_1TD = torch.tensor([[[1.0, 2.0], [3.0, -1.0], [0.0, 1.0], [2.0, 2.0]]])
LOGITS_1TV = torch.tensor([[[1.0, 2.0, -1.0], [3.0, -1.0, 4.0], [0.0, 1.0, -1.0], [2.0, 2.0, 0.0]]])
TARGET_T = torch.tensor([0, 2, -100, 1])


class SmallHead:
    """Three words of two hidden features; notes what is computed, and of how many rows."""

    out_features, chunk_rows = 3, 100

    def __init__(self, divides: bool) -> None:
        self.divides = divides
        self.computed: list[tuple[str, int]] = []

    def logits(self, hidden, steps, name="logits"):
        self.computed.append((name, hidden.shape[:-1].numel()))
        return apply_steps(hidden @ WEIGHT_VD.T.to(hidden.dtype), steps)

    def argmax(self, hidden, steps):
        return self.logits(hidden, steps, "argmax").argmax(-1)

    def cross_entropy(self, hidden, target, steps, ignore_index):
        logits = self.logits(hidden, steps, "cross entropy")
        return functional.cross_entropy(logits, target, ignore_index=ignore_index, reduction="sum")


def deferred(divides: bool = True) -> tuple[DeferredLogits, list[tuple[str, int]]]:
    head = SmallHead(divides)
    return DeferredLogits(head, HIDDEN_1TD), head.computed


def model_loss(logits, scale: float = 1.0, **kwargs):
    """As transformers computes it."""
    logits = (logits / scale).tanh() * scale if scale != 1.0 else logits
    return functional.cross_entropy(logits.float().view(-1, 3), TARGET_T, **kwargs)


LOSSES = {
    "sum": lambda logits: model_loss(logits, reduction="sum"),
    "mean": lambda logits: model_loss(logits),
    "other index ignored": lambda logits: functional.cross_entropy(
        logits[0], torch.tensor([0, 2, 2, 1]), ignore_index=2
    ),
    "softcap": lambda logits: model_loss(logits, 2.0, reduction="sum"),
    "a module": lambda logits: torch.nn.CrossEntropyLoss()(logits.reshape([4, 3]), TARGET_T),
    "shifted": lambda logits: functional.cross_entropy(
        logits[..., :-1, :].contiguous().view(-1, 3), TARGET_T[1:], reduction="sum"
    ),
    "in float64": lambda logits: functional.cross_entropy(
        -logits.to(torch.float64)[0] + 1, TARGET_T
    ),
}


def test_the_mean_of_no_losses_is_nan():
    logits_TV = deferred()[0][0]
    assert functional.cross_entropy(logits_TV, torch.full((4,), -100)).isnan()


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_losses_need_no_logits(loss):
    logits, computed = deferred()
    torch.testing.assert_close(loss(logits), loss(LOGITS_1TV))
    assert [kind for kind, _ in computed] == ["cross entropy"]


PARTS = {
    "rows": (lambda x: x[0, 1:3], 2),
    "a row": (lambda x: x[0, -1], 1),
    "rows, whole": (lambda x: x[:, ::2, :], 2),
    "behind an ellipsis": (lambda x: x[..., 1:, :], 3),
    "before an ellipsis": (lambda x: x[:, :1, ...], 1),
    "split": (lambda x: x.view(4, 3).split(3, dim=0)[1], 1),
    "reshaped": (lambda x: torch.reshape(x, (2, 2, 3))[0], 2),
}


@pytest.mark.parametrize(("take", "rows"), PARTS.values(), ids=PARTS.keys())
def test_parts_are_computed_alone_where_ranks_may_differ(take, rows):
    logits, computed = deferred()
    part = take(logits)
    assert isinstance(part, DeferredLogits)
    assert part.shape == take(LOGITS_1TV).shape
    torch.testing.assert_close(torch.log_softmax(part, -1), torch.log_softmax(take(LOGITS_1TV), -1))
    assert computed == [("logits", rows)]


def test_parts_of_logits_that_are_computed_at_once():
    logits, computed = deferred(divides=False)
    torch.testing.assert_close(logits.view(4, 3).split(3), LOGITS_1TV[0].split(3))
    torch.testing.assert_close(logits[0, 1:3], LOGITS_1TV[0, 1:3])
    assert computed == [("logits", 4)] * 2


WHOLE = {
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "a column": lambda x: x[..., 1],
    "by a mask": lambda x: x[0][TARGET_T != -100],
    "times a tensor": lambda x: x * torch.arange(3.0),
    "other shape": lambda x: x.view(3, 4),
    "property": lambda x: x.mT,
    "argmax of all": lambda x: x.argmax(),
    "words split": lambda x: x.split(2, dim=-1),
    "iteration": lambda x: list(x),
    "cat": lambda x: torch.cat([x, x]),
    "indicator": lambda x: x.to(torch.int64),
    "losses": lambda x: functional.cross_entropy(x[0], TARGET_T, reduction="none"),
    "smoothed": lambda x: functional.cross_entropy(x[0], TARGET_T, label_smoothing=0.5),
    "weighted": lambda x: functional.cross_entropy(x[0], TARGET_T, weight=torch.arange(3.0)),
    "probabilities": lambda x: functional.cross_entropy(x[0], LOGITS_1TV[0].softmax(-1)),
    "of no rows": lambda x: functional.cross_entropy(x[0, :0], TARGET_T[:0], reduction="sum"),
}


@pytest.mark.parametrize("function", WHOLE.values(), ids=WHOLE.keys())
def test_anything_else_gets_the_tensor(function):
    logits, computed = deferred()
    torch.testing.assert_close(function(logits), function(LOGITS_1TV))
    assert {kind for kind, _ in computed} == {"logits"}


def test_most_probable_words():
    logits, computed = deferred()
    assert (-logits).argmax(dim=-1).tolist() == [[2, 1, 2, 2]]
    assert torch.argmax(logits, -1).tolist() == [[1, 2, 1, 0]]
    assert computed == [("argmax", 4)] * 2


@pytest.mark.parametrize("gradients", [True, False])
def test_changing_in_place_changes_what_is_read_later(gradients):
    logits, _ = deferred()
    copy = logits.clone()
    with torch.set_grad_enabled(gradients):
        logits[0, 0] = 7.0
        logits.mul_(2)
    assert logits[0, :2].tolist() == [[14.0] * 3, [6.0, -2.0, 8.0]]
    assert functional.cross_entropy(logits[0], TARGET_T) != functional.cross_entropy(
        LOGITS_1TV[0], TARGET_T
    )
    torch.testing.assert_close(copy.tensor(), LOGITS_1TV)


@pytest.mark.parametrize(
    ("gradients", "times"), [(True, 1), (False, 2)], ids=["gradients", "no gradients"]
)
def test_computed_once_where_gradients_are_wanted(gradients, times):
    logits, computed = deferred()
    with torch.set_grad_enabled(gradients):
        assert logits.exp().sum() == logits.exp().sum()
    assert len(computed) == times


def test_looks_like_a_tensor():
    logits, computed = deferred()
    assert logits.shape == (1, 4, 3)
    assert logits.size() == (1, 4, 3)
    assert logits.size(-1) == 3
    assert len(logits) == 1
    assert logits.dim() == 3
    assert logits.ndim == 3
    assert logits.numel() == 12
    assert logits.is_cuda is False
    assert logits.dtype == torch.float32
    assert logits.device == torch.device("cpu")
    assert repr(logits) == "DeferredLogits(shape=[1, 4, 3], dtype=torch.float32)"
    assert not hasattr(logits, "nonsense")
    with torch.autocast("cpu", torch.bfloat16):
        rough, of_rough = deferred()
        dtypes = [x.dtype for x in (rough, rough / 3.0, rough.float())]
    assert dtypes == [torch.bfloat16, torch.bfloat16, torch.float32]
    (converted,) = convert_to_fp32([rough])  # what accelerate does to a model's outputs
    assert isinstance(converted, DeferredLogits)
    assert converted.dtype == torch.float32
    assert computed == of_rough == []
