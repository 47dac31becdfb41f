"""Lines on how a training goes on: resumed from a checkpoint, or ended before its last step."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tqdm import tqdm
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

STDERR = 2
"""File descriptor, which may be written to while `sys.stderr` writes."""


class Continuation(TrainerCallback):
    """Print on the first process where a training resumes, and how it continues after its end."""

    def __init__(self) -> None:
        self._state: TrainerState | None = None
        self._checkpoint: str | None = None  # the last one that can be resumed

    @contextmanager
    def of(self, checkpoint: str | None, args: TrainingArguments) -> Iterator[None]:
        """Explain SIGTERM and Ctrl-C to a training inside of the block.

        SIGTERM then does what it did before. With `enable_jit_checkpoint` it is transformers' own.

        Args:
            checkpoint: folder from which the training resumes.
        """
        self._state = None
        self._checkpoint = checkpoint
        explains = args.process_index == 0 and not args.enable_jit_checkpoint
        with _explained_sigterm(self._sentence, active=explains):
            try:
                yield
            except KeyboardInterrupt as error:
                error.args = (self._sentence(),)
                raise
            except BaseException as error:
                if checkpoint is not None:  # errors about a damaged file do not name it
                    error.add_note(f"The training resumes from {checkpoint}.")
                raise

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Print where a training resumes."""
        self._state = state
        if self._checkpoint is not None and args.process_index == 0:
            # print would write into a progress bar.
            tqdm.write(
                f"resumed from {self._checkpoint}, step {state.global_step} of {state.max_steps}"
            )

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note a checkpoint that is complete."""
        if not args.save_only_model:
            self._checkpoint = f"{args.output_dir}/{PREFIX_CHECKPOINT_DIR}-{state.global_step}"

    def _sentence(self) -> str:
        """Return after which step training is interrupted, and how it goes on."""
        state = self._state
        place = "before the first step"
        if state is not None and state.global_step > 0:
            place = f"after step {state.global_step} of {state.max_steps}"
        remedy = "there is no checkpoint to continue from"
        if self._checkpoint is not None:
            remedy = f"continue with resume_from_checkpoint={self._checkpoint!r}"
        return f"interrupted {place}; {remedy}"


@contextmanager
def _explained_sigterm(sentence: Callable[[], str], *, active: bool) -> Iterator[None]:
    """Print a sentence when SIGTERM comes, which then does what it did before.

    Python handles signals in its main thread alone.
    """
    before = signal.getsignal(signal.SIGTERM)
    in_main_thread = threading.current_thread() is threading.main_thread()
    # None: not a handler of Python, so that it could not be restored.
    if not active or not in_main_thread or before in (None, signal.SIG_IGN):
        yield
        return
    process = os.getpid()

    def explain(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:  # not one that was forked from it
            # Behind a progress bar.
            os.write(STDERR, f"\n{sentence()}\n".encode())
        signal.signal(number, before)
        if callable(before):
            before(number, frame)
        else:
            signal.raise_signal(number)

    signal.signal(signal.SIGTERM, explain)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is explain:
            signal.signal(signal.SIGTERM, before)
