"""The hf-distca command: one subcommand per tool."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn

from hf_distca.cli import InputError
from hf_distca.version import __version__

TOOLS = {
    "plan": "plan one micro-batch and show its balance, bytes and memory",
    "simulate": "predict the time of a step by each strategy",
    "profile": "measure the costs of this device, for simulate",
    "timeline": "join the traces of all ranks, and show and draw one step",
    "doctor": "check versions, devices, launch and network, and list what to change",
    "serve": "be an attention server of a training run (experimental)",
}
"""Modules of this package, each imported only for its subcommand: most of them need torch."""


class _Parser(argparse.ArgumentParser):
    """Parser that reports errors in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line without the program's name.

    Return the tool's exit status, or 2 for unusable input.
    """
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print("\ninterrupted", file=sys.stderr)
        return 128 + signal.SIGINT  # as shells have it


def _run(arguments: Sequence[str] | None) -> int:
    texts = list(sys.argv[1:] if arguments is None else arguments)
    parser = _Parser(prog="hf-distca", description="Core attention disaggregation: tools.")
    parser.add_argument("--version", action="version", version=f"hf-distca {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="TOOL", parser_class=_Parser)
    tool_name = next((name for name in texts if not name.startswith("-")), None)
    for name, what_for in TOOLS.items():
        tool_parser = commands.add_parser(
            name, help=what_for, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        if name == tool_name:
            tool = import_module(f"hf_distca.cli.{name}")
            tool_parser.description = tool.DESCRIPTION
            tool.add_options(tool_parser)
    options = parser.parse_args(texts)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status: int | None = tool.run(options)  # None if a tool has only one
    except InputError as error:
        print(f"hf-distca {options.command}: error: {error}", file=sys.stderr)
        return 2
    return status or 0


if __name__ == "__main__":
    sys.exit(main())
