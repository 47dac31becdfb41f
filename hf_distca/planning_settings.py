"""Settings of plans for benchmarks and tests: the members of `DistCAConfig.planning`."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from hf_distca.units import (
    AUTO,
    Bytes,
    NumberOrAuto,
    Switch,
    Tolerance,
    UnitError,
    changed_members,
    group_of,
    members_given,
    raise_first,
    read_values,
    setting,
    unusable_values,
)

ZERO: Final = {"balance_tolerance": "whole rows"}
"""Meaning of 0 for the member that may be 0; all other numbers must be positive."""


@dataclass(frozen=True)
class Planning:
    """Expert settings of plans, for benchmarks and tests; the defaults suit every training.

    A dictionary sets them, as JSON on a command line: `planning={"ping_pong": False}`. `None` takes
    the defaults. Members are named as in `PlanSettings`.

    Raises:
        ValueError: A value is out of range.
    """

    balance_tolerance: Tolerance = setting(
        AUTO,
        "How far the core attention of a rank may exceed the mean, as a fraction of the mean. A "
        "larger value moves fewer bytes; a smaller value balances better and takes longer to "
        "plan. 0 balances to whole rows. 'auto' lets the planner choose for every micro-batch by "
        "the predicted time.",
    )
    balance_block_size: int = setting(
        128,
        "Documents are cut at multiples of this many rows, the block size of attention kernels.",
    )
    exchange_buffer_bytes: Bytes = setting(
        256 * 2**20,
        "Size of an exchange buffer for K and V rows, such as 128MiB. A larger exchange is divided "
        "into stages of one buffer; each stage travels while the stage before it is computed. "
        "Chosen plans may have fewer stages if all rows fit into the buffers that a rank has. K, "
        "V and their gradients take at most six times this memory, ten times where rows are "
        "forwarded inside nodes, and twice as much with ping-pong.",
    )
    ping_pong: Switch = setting(
        AUTO,
        "Divide every micro-batch into two nano-batches, so that one computes while the rows of "
        "the other travel. It applies where rows travel. 'auto' lets the planner choose for "
        "every micro-batch.",
    )

    pod_ranks: NumberOrAuto = setting(
        AUTO,
        "Least ranks that plan together where the planner chooses plans. Twice as many ranks or "
        "more are divided into pods of whole nodes, and no core attention travels between pods. A "
        "long document gets a larger pod. Smaller pods are planned faster, and larger ones compute "
        "more evenly. 'auto' is 64, or 512 for padded batches, whose sequences stay in the pod of "
        "their rank.",
    )

    def __post_init__(self) -> None:
        unread = read_values(self)
        raise_first([*unread.values(), *unusable_values(self, Planning, ZERO, unread)])

    def plain(self) -> dict[str, Any] | None:
        """Return the shortest value that is read as these settings, for JSON and YAML."""
        return changed_members(self) or None


def read_planning(value: Any) -> Planning:
    """Return the settings from members in a dictionary or JSON, or from None.

    Raises:
        UnitError: the value is none of these.
    """
    if value is None:
        return Planning()
    if isinstance(value, Planning):
        return value
    members = members_given(value)
    if members is None:
        raise UnitError(
            "must be a dictionary, as JSON on a command line, such as "
            f'{{"ping_pong": false}}, got {value!r}'
        )
    return group_of(members, Planning)


if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_distca.units import Read

    PlanningOrNone = Read[Planning, Planning | str | Mapping[str, Any] | None]
else:  # HfArgumentParser calls the type of a field with what is on the command line
    PlanningOrNone = read_planning
