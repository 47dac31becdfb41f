"""The hf-distca command: one subcommand per tool."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from hf_distca.cli import doctor, plan, profile, serve, simulate, timeline
from hf_distca.cli.lengths_file import InputError


class _Parser(argparse.ArgumentParser):
    """Errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: that of the tool, or 2 where something that the user gave cannot be used.

    Args:
        arguments: the command line without the program's name; None for the process's own.
    """
    parser = _Parser(prog="hf-distca", description="Core attention disaggregation: tools.")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=_Parser)
    tools: dict[str, Any] = {
        **{"plan": plan, "simulate": simulate, "profile": profile},
        **{"timeline": timeline, "doctor": doctor, "serve": serve},
    }
    for tool in tools.values():
        tool.add_parser(commands)
    options = parser.parse_args(arguments)
    try:
        status: int | None = tools[options.command].run(options)  # none where a tool has but one
    except InputError as error:
        print(f"hf-distca {options.command}: error: {error}", file=sys.stderr)
        return 2
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
