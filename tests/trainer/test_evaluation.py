"""Predictions by document: a user's function makes of logits on two ranks what it makes of them in
one process.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EvalPrediction, Trainer, TrainingArguments

from hf_distca.checks.run_rules import Run
from hf_distca.trainer.evaluation import TokenFigures, entropies
from tests.models_and_batches import random_documents, small_model
from tests.refused import refused
from tests.trainer.comparison import IGNORED, pad
from tests.trainer.small_trainers import LENGTHS, make_trainer

LABELS = [
    [IGNORED] * (length // 3) + [at * 7 % 64 for at in range(length - length // 3)]
    for length in LENGTHS
]
"""Of each document: not the first third, then numbers by which they are recognised."""


def of_rows(logits: Tensor, labels: Tensor) -> dict[str, Any]:
    """The chosen token, the two greatest logits, and the label of each row."""
    return {"chosen": logits.argmax(-1), "others": [logits.topk(2).values, labels]}


def share_chosen(evaluated: EvalPrediction) -> dict[str, Any]:
    """The share of targets that the model chose, under two names."""
    targets = evaluated.label_ids[:, 1:]
    right = (evaluated.predictions["chosen"][:, :-1] == targets)[targets != IGNORED].mean()
    return {"right": right, "eval_prefixed": np.float64(right)}


def with_labels(documents: list[Tensor], labels: list[list[int]]) -> list[dict[str, Any]]:
    return [
        {"input_ids": ids.tolist(), "labels": given}
        for ids, given in zip(documents, labels, strict=True)
    ]


def _predicted(folder: str, arguments: dict[str, Any]) -> tuple[Any, ...]:
    """What predict and evaluate return, and the parts of documents that this rank has."""
    dataset = with_labels(random_documents(LENGTHS), LABELS)
    given = {"train_dataset": dataset, "eval_dataset": dataset, "compute_metrics": share_chosen}
    trainer = make_trainer(
        folder, given={**given, "preprocess_logits_for_metrics": of_rows}, **arguments
    )
    parts = []
    predicted = trainer.predict(dataset)
    parts += [
        (part.document, part.start, len(part.targets))
        for part in trainer._evaluated.predictions._document_rows
    ]
    return predicted.predictions, predicted.label_ids, predicted.metrics, trainer.evaluate(), parts


@pytest.fixture(scope="module")
def stock(tmp_path_factory) -> Any:
    """What Trainer predicts in one process."""
    quiet = {
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
        "per_device_eval_batch_size": 100,
    }
    model = small_model(implementation="sdpa")
    model.config.use_cache = False
    trainer = Trainer(
        model=model,
        args=TrainingArguments(output_dir=str(tmp_path_factory.mktemp("stock")), **quiet),
        data_collator=pad,
        compute_metrics=share_chosen,
        preprocess_logits_for_metrics=of_rows,
    )
    return trainer.predict(with_labels(random_documents(LENGTHS), LABELS))


@pytest.mark.parametrize(
    "arguments",
    [
        {"loss_chunk_bytes": 4 * 64 * 7},  # seven rows at a time
        {"loss_chunk_bytes": 0, "document_layout": "fixed"},
    ],
    ids=["chunks", "all logits at once"],
)
def test_predictions_and_metrics_are_those_of_one_process(
    rank_pools, tmp_path, stock, subtests, arguments
):
    results = rank_pools[2].run(_predicted, str(tmp_path), arguments)
    first, second = ({document for document, *_ in parts} for *_, parts in results)
    assert first & second  # documents whose rows lie on both ranks
    for rank, (predictions, label_ids, metrics, evaluation, _) in enumerate(results):
        expected = stock.predictions
        logits = predictions["others"][0]
        chosen = predictions["others"][1]
        with subtests.test("predictions", rank=rank):
            assert_equal_rows(predictions["chosen"], expected["chosen"])
        with subtests.test("predictions of pairs", rank=rank):
            assert_equal_rows(chosen[:, 1:], expected["others"][1][:, 1:])
        with subtests.test("labels", rank=rank):
            assert_equal_rows(label_ids[:, 1:], stock.label_ids[:, 1:])
            assert (label_ids[:, 0] == IGNORED).all()
        with subtests.test("logits", rank=rank):
            assert logits.shape == expected["others"][0].shape
            for row, length in enumerate(LENGTHS):
                expected_row = expected["others"][0][row, :length]
                np.testing.assert_allclose(logits[row, :length], expected_row, atol=1e-5)
        with subtests.test("metrics", rank=rank):
            # A figure whose name begins with the prefix has it once.
            assert metrics["test_right"] == stock.metrics["test_right"]
            assert metrics["test_eval_prefixed"] == stock.metrics["test_right"]
            assert evaluation["eval_right"] == stock.metrics["test_right"]
            assert evaluation["eval_prefixed"] == stock.metrics["test_right"]
            assert metrics["test_loss"] == pytest.approx(evaluation["eval_loss"])
            right = pytest.approx(stock.metrics["test_right"])
            assert metrics["test_mean_token_accuracy"] == right
            assert "test_samples_per_second" in metrics


def assert_equal_rows(rows, expected):
    """Rows of documents are equal, and what follows a document is ignored."""
    assert rows.shape == expected.shape
    for row, length in enumerate(LENGTHS):
        np.testing.assert_array_equal(rows[row, :length], expected[row, :length])
        assert (rows[row, length:] == IGNORED).all()


@pytest.mark.parametrize(("policy", "longest"), [("split", 40), ("truncate", 16)])
def test_parts_of_long_documents_are_put_together(tmp_path, policy, longest):
    """One rank of 16 tokens, documents of 40, 3 and 9."""
    documents = random_documents([40, 3, 9])
    dataset = [{"input_ids": document.tolist()} for document in documents]
    given = {"train_dataset": dataset, "preprocess_logits_for_metrics": of_rows}
    trainer = make_trainer(
        str(tmp_path), given=given, tokens_per_rank=16, long_documents=policy, ping_pong=False
    )
    predicted = trainer.predict(dataset)
    expected = np.full((3, longest), IGNORED)
    for row, document in enumerate(documents):
        targets = document[1:longest].tolist()
        expected[row, 1 : 1 + len(targets)] = targets
    assert predicted.label_ids.tolist() == expected.tolist()
    assert (predicted.predictions["chosen"][0] >= 0).all()
    assert (predicted.predictions["chosen"][1, 3:] == IGNORED).all()


def sum_of_rows(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.amax(-1) - logits.sum()


def shifted(logits: Tensor, labels: Tensor) -> Tensor:
    return logits[:, :-1].argmax(-1)


def fails_on_second(rank: int, logits: Tensor, labels: Tensor) -> Tensor:
    if rank == 1:
        raise KeyError("a mistake of the user")
    return logits.argmax(-1)


def _errors(folder: str) -> list[str]:
    """What predictions with unusable functions raise on this rank, and then the number of a usable
    one's rows.
    """
    rank = torch.distributed.get_rank()
    dataset = [{"input_ids": document.tolist()} for document in random_documents(LENGTHS)]
    trainer = make_trainer(
        folder,
        given={"train_dataset": dataset, "preprocess_logits_for_metrics": of_rows},
        document_layout="fixed",  # cuts documents
    )
    messages = []
    for function in (
        sum_of_rows,
        shifted,
        partial(fails_on_second, rank),
        lambda logits, labels: logits.shape,
    ):
        trainer.preprocess_logits_for_metrics = function
        with pytest.raises(ValueError, match=r"\w") as error:
            trainer.predict(dataset)
        messages.append(str(error.value))
    trainer.preprocess_logits_for_metrics = of_rows
    return [*messages, str(trainer.predict(dataset).predictions["chosen"].shape)]


def test_functions_that_cannot_be_given_parts_of_documents_are_refused_on_every_rank(
    rank_pools, tmp_path
):
    for mean, fewer, failed, shape, usable in rank_pools[2].run(_errors, str(tmp_path)):
        assert (
            "preprocess_logits_for_metrics returns other values for a token when it gets fewer "
            "tokens" in mean
        )
        assert "preprocess_logits_for_metrics returned the shape [1, " in fewer
        assert "rank 1: KeyError: 'a mistake of the user'" in failed
        assert "rank 0" not in failed
        assert "preprocess_logits_for_metrics returned int for logits of the shape [1, " in shape
        assert usable == str((len(LENGTHS), max(LENGTHS)))


def test_what_cannot_be_predicted(tmp_path):
    trainer = make_trainer(str(tmp_path))
    with refused(Run.ALL_LOGITS):
        trainer.predict(trainer.eval_dataset)
    for source in ("stream", "flattened"):
        trainer = make_trainer(str(tmp_path), source, max_steps=1)
        trainer.preprocess_logits_for_metrics = of_rows
        with refused(Run.NO_ORDER):
            trainer.predict(trainer.eval_dataset)
    # A model that computes its loss otherwise.
    trainer = make_trainer(str(tmp_path))
    trainer.preprocess_logits_for_metrics = of_rows
    trainer.model.loss_function = lambda logits, **_: logits[:, ::2].float().mean()
    with refused(Run.NO_LOGITS, function="preprocess_logits_for_metrics", seen=0, rows=154):
        trainer.predict(trainer.eval_dataset)


def test_entropy_of_rows_with_a_target():
    """In blocks of a few rows, with tokens that are impossible, and in bfloat16."""
    logits = torch.tensor(
        [
            [0.0, 0.0, -torch.inf, 0.0],
            [5.0, -torch.inf, -torch.inf, -torch.inf],
            [1.0, 2.0, 3.0, 4.0],
        ]
    )
    expected = [np.log(3), 0.0, float(torch.distributions.Categorical(logits=logits[2]).entropy())]
    assert entropies(logits.log_softmax(-1)).tolist() == pytest.approx(expected, abs=1e-6)
    assert entropies(logits.bfloat16().log_softmax(-1)).tolist() == pytest.approx(
        expected, abs=1e-2
    )
    many = torch.randn(300, 1000).log_softmax(-1)  # blocks of 65 rows
    torch.testing.assert_close(entropies(many), -(many.exp() * many).sum(-1))
    figures = TokenFigures()
    assert figures.sums() == [0, 0, 0]
    for target in ([3, IGNORED, 3], [0, 0, 0]):  # of equal logits the first is chosen
        figures.see(logits, logits.log_softmax(-1), torch.tensor(target))
    assert figures.sums() == pytest.approx([5, 3, 2 * expected[0] + 2 * expected[2]], abs=1e-6)


def test_logits_of_training_are_not_watched(tmp_path):
    trainer = make_trainer(str(tmp_path), max_steps=1, save_strategy="no")
    trainer._evaluated = SimpleNamespace(seen=0)  # which cannot see anything
    trainer.train()
