"""Travel of encoders' features from the ranks that encode images to those that hold placeholders.

Shape suffixes: E rows of features that this rank encodes, P placeholders that this rank holds, D
dimension of features.
"""

from typing import Any

import torch
from torch import Tensor

from hf_distca.checks.step_rules import PlannedStep
from hf_distca.dispatch.process_groups import Groups
from hf_distca.plan import PlannedImages
from hf_distca.plan.images import feature_route, travelling_rows


class BoundImages:
    """Planned images of one modality, bound to a rank of a pod.

    Attributes:
        encoded_rows: Rows of features that the rank encodes.
        placeholders: Placeholders that the rank holds.
    """

    def __init__(
        self, planned: PlannedImages, groups: Groups, pod: range, device: torch.device
    ) -> None:
        self._groups = groups
        route = feature_route(planned, groups.rank, pod)
        self._crosses = travelling_rows(planned) > 0  # the same on every rank of the pod
        self._sent = torch.from_numpy(route.sent).to(device, non_blocking=True)
        self._placed = torch.from_numpy(route.placed).to(device, non_blocking=True)
        self._sent_counts: list[int] = route.sent_counts.tolist()
        self._received_counts: list[int] = route.received_counts.tolist()
        self.encoded_rows = int(planned.rows[planned.encoded_by(groups.rank)].sum())
        self.placeholders = len(route.placed)

    def to_placeholders(self, encoded_ED: Tensor) -> Tensor:
        """Return [P, D] features of this rank's placeholders; gradients travel back.

        A collective, and so is its backward.

        Args:
            encoded_ED: features that this rank encodes, and those of a filler after them.
        """
        if self.encoded_rows not in (0, len(encoded_ED)):
            raise PlannedStep.OTHER_FEATURES.error_here(
                rows=len(encoded_ED), placeholders=self.encoded_rows
            )
        travel: Any = _Travel.apply
        placed_PD: Tensor = travel(self, encoded_ED)
        return placed_PD

    def forward(self, encoded_ED: Tensor) -> Tensor:
        """Return [P, D] features without a gradient."""
        arrived = self._exchanged(
            encoded_ED.index_select(0, self._sent), self._sent_counts, self._received_counts
        )
        placed_PD = arrived.new_empty((self.placeholders, *arrived.shape[1:]))
        return placed_PD.index_copy_(0, self._placed, arrived)

    def backward(self, gradient_PD: Tensor, rows: int) -> Tensor:
        """Return the gradient of `rows` encoded rows; it is 0 for a filler's."""
        arrived = self._exchanged(
            gradient_PD.index_select(0, self._placed), self._received_counts, self._sent_counts
        )
        # Each row of features has one placeholder.
        gradient_ED = arrived.new_zeros((rows, *arrived.shape[1:]))
        return gradient_ED.index_copy_(0, self._sent, arrived)

    def _exchanged(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        if not self._crosses:
            return rows
        name = "features of images that other ranks encode"
        return self._groups.exchange_rows(rows, sent, received, name)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: BoundImages, encoded_ED: Tensor) -> Tensor:
        ctx.images = images
        ctx.rows = len(encoded_ED)
        return images.forward(encoded_ED)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (gradient_PD,) = gradients
        return None, ctx.images.backward(gradient_PD, ctx.rows)
