"""Mean loss of an evaluation over all targets, whatever their division into ranks and micro-batches."""

from accelerate import Accelerator
from torch import Tensor, nn

from hf_distca.dispatch.groups import Groups
from hf_distca.trainer.parallel import is_wrapped, prepares_with_optimizer


class EvaluationLoss:
    """Sum the losses of an evaluation's micro-batches."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._sum = self._targets = 0.0

    def add(self, loss: Tensor, targets: Tensor) -> None:
        """Add a micro-batch.

        Args:
            loss: scalar; this rank's loss times the number of ranks, so that the mean over ranks is the micro-batch's
                loss.
            targets: scalar; number of the micro-batch's targets on all ranks.
        """
        self._sum += (loss * targets / self._groups.ranks).item()
        self._targets += targets.item()

    def mean(self) -> float | None:
        """Return the loss per target; None if there was no micro-batch. A collective."""
        total = sum(self._groups.all_gather(self._sum))
        return total / self._targets if self._targets else None


def check_can_evaluate(model: nn.Module, accelerator: Accelerator) -> None:
    """Raise ValueError before training, if FSDP, ZeRO-1 or ZeRO-2 has not prepared the model yet.

    They prepare a model only together with its optimizer.
    """
    if prepares_with_optimizer(accelerator) and not is_wrapped(model, accelerator):
        raise ValueError(
            "evaluate() before train() is not possible under FSDP, ZeRO-1 and ZeRO-2, which prepare a model together "
            "with its optimizer; set eval_on_start=True to evaluate before the first training step"
        )
