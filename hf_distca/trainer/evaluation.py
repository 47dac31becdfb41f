"""The loss of an evaluation: the mean over all targets, however they are spread over ranks and micro-batches."""

from accelerate import Accelerator
from torch import Tensor, nn

from hf_distca.dispatch.groups import Groups
from hf_distca.trainer.parallel import is_wrapped, prepares_with_optimizer


class EvaluationLoss:
    """Adds up the losses of an evaluation's micro-batches.

    Args:
        groups: the ranks that evaluate together.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sum = self._targets = 0.0

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch.

        Args:
            loss: scalar; this rank's sum over the targets of all ranks, times the ranks, so that the mean of all
                ranks' is the micro-batch's loss.
            targets: scalar; the micro-batch's targets on all ranks.
        """
        self._sum += (loss * targets / self._groups.ranks).item()
        self._targets += targets.item()

    def mean(self) -> float | None:
        """The loss per target, or None where there was no micro-batch. A collective."""
        total = sum(self._groups.all_gather(self._sum))
        return total / self._targets if self._targets else None


def check_can_evaluate(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise where a model cannot be evaluated before it has been trained.

    Args:
        model: as it is wrapped by now.
        accelerator: the trainer's.

    Raises:
        ValueError: FSDP or ZeRO-1 and -2 prepare a model together with its optimizer.
    """
    if prepares_with_optimizer(accelerator) and not is_wrapped(model, accelerator):
        raise ValueError(
            "evaluate() cannot run before train() under FSDP, ZeRO-1 and ZeRO-2, which prepare a model only together "
            "with its optimizer; set eval_on_start=True to evaluate before the first training step"
        )
