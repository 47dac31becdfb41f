"""Settings of dedicated attention servers: the members of `DistCAConfig.attention_servers`."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from hf_distca.units import (
    AUTO,
    UnitError,
    changed_members,
    group_of,
    members_given,
    raise_first,
    read_whole_number,
    setting,
    unusable_values,
)

EXTERNAL: Final = "external"
"""Value of `count` for servers that are started separately."""
TRANSPORTS = (AUTO, "tcp", "nixl")
A_COUNT = f"a number of processes or {EXTERNAL!r}"


def _read_count(value: Any) -> int | Literal["external"]:
    if value == EXTERNAL:
        return EXTERNAL
    count = read_whole_number(value, f"{A_COUNT}, or a dictionary with the member 'count'")
    if count < 0:
        raise UnitError(f"must be 0 (all processes train) or more, got {value!r}")
    return count


@dataclass(frozen=True)
class AttentionServers:
    """Settings of dedicated attention servers.

    Raises:
        ValueError: A value is out of range.
    """

    count: int | Literal["external"] = setting(
        0,
        "A number N makes the last N processes of this launch servers, and the others train. "
        "'external' lets servers started with `hf-distca serve` join and leave at any time.",
    )
    ranks_serve: bool = setting(
        True, "Let ranks compute core attention too while there are attention servers."
    )
    address: str = setting(
        "127.0.0.1:0",
        "HOST:PORT on which rank 0 accepts attention servers. Port 0 takes a free port and logs "
        "it. Only servers that know the run's token are accepted, but nothing is encrypted.",
    )
    token_file: str | None = setting(
        None,
        "File with the token that external servers need. It is made if it does not exist. None is "
        "attention_server_token in output_dir.",
    )
    timeout: float = setting(
        60.0, "Seconds until an attention server that does not answer counts as lost."
    )
    transport: str = setting(
        "auto",
        "Transport of rows to attention servers and back: tcp, nixl or auto. nixl must be "
        "installed on both ends. auto is nixl where both ends have it and an RDMA device, and tcp "
        "elsewhere.",
        choices=TRANSPORTS,
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", _read_count(self.count))
        if isinstance(self.token_file, os.PathLike):
            object.__setattr__(self, "token_file", os.fspath(self.token_file))
        raise_first(unusable_values(self, AttentionServers, {"count": "all processes train"}))

    @property
    def in_launch(self) -> int:
        """Number of processes of the launch that are servers."""
        return 0 if self.count == EXTERNAL else self.count

    def of_all_ranks(self) -> "AttentionServers":
        """Return what every rank needs alike: all but what rank 0 alone uses."""
        return replace(self, address=DEFAULT.address, token_file=DEFAULT.token_file)

    def plain(self) -> int | str | dict[str, Any]:
        """Return the shortest value that is read as these settings, for JSON and YAML."""
        changed = changed_members(self)
        return {"count": self.count, **changed} if changed.keys() - {"count"} else self.count


DEFAULT = AttentionServers()


def read_servers(value: Any) -> AttentionServers:
    """Return the settings from a count, or from members in a dictionary or JSON.

    Raises:
        UnitError: the value is none of these.
    """
    if isinstance(value, AttentionServers):
        return value
    members = members_given(value)
    if members is None:
        return AttentionServers(value)
    servers = group_of(members, AttentionServers)
    if "count" not in members:
        raise UnitError(f"lacks the member 'count', {A_COUNT}; got {value!r}")
    return servers


if TYPE_CHECKING:
    from collections.abc import Mapping

    from hf_distca.units import Read

    Servers = Read[AttentionServers, AttentionServers | int | str | Mapping[str, Any]]
else:  # HfArgumentParser calls the type of a field with what is on the command line
    Servers = read_servers
