"""One line where a traceback on every rank says no more: a refusal, a full disk, Ctrl-C."""

import argparse
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from hf_distca.checks.refusal import RefusedError, SentenceError
from hf_distca.progress import is_first_rank

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
INTERRUPTED = 128 + signal.SIGINT
"""Exit code of a process that Ctrl-C ends, as shells have it."""


def record(main: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let the launcher report why a script's main function failed.

    Torch's `record` does so, too; here the report is one line if possible.

    ```python
    @hf_distca.record
    def main() -> None: ...
    ```

    The launcher shows the error in its last lines. Where hf_distca refuses what it is given, or
    argparse refuses an option, rank 0 prints the sentence and other ranks print nothing. Where a
    disk is full, the rank that found it so prints that. Where Ctrl-C interrupts the function, rank
    0 prints that. Any other error keeps its traceback on its rank; of the ranks that stop because
    of it, rank 0 alone prints why.
    """

    @wraps(main)
    def recorded(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        handler = get_error_handler()
        handler.initialize()
        try:
            with _options_refused():
                return main(*args, **kwargs)
        except SentenceError as error:
            # The launcher's report would begin with the traceback, if there were one.
            error.__traceback__ = error.__cause__ = error.__context__ = None
            handler.record_exception(error)
            _end(str(error), 1, prints=is_first_rank() or not error.is_of_every_rank)
        except KeyboardInterrupt as error:
            # The launcher interrupts its processes a second time.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            _end(str(error) or "interrupted", INTERRUPTED, prints=is_first_rank())
        except Exception as error:
            handler.record_exception(error)
            raise

    return recorded


@contextmanager
def _options_refused() -> Iterator[None]:
    """Let parsers of options raise RefusedError, instead of an exit on which every rank prints."""

    def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
        raise RefusedError(f"{parser.prog}: error: {message}")

    # Parsers of transformers and TRL are made in the main function, so their base class is changed.
    before = argparse.ArgumentParser.error
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign, assignment]  # see above
    try:
        yield
    finally:
        argparse.ArgumentParser.error = before  # type: ignore[method-assign]  # see above


def _end(sentence: str, code: int, *, prints: bool) -> NoReturn:
    """End the process, and print why on some ranks."""
    if prints:
        print(sentence, file=sys.stderr, flush=True)
    sys.exit(code)
