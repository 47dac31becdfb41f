"""What a layer's core attention computes apart from its tensors."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionParams:
    """What a layer's core attention computes apart from its tensors.

    Attributes:
        scale: factor on the scores q·k, usually 1/√D.
        window: a row attends to this many keys up to and including its own (sliding window); None: to all.
        softcap: scores become softcap·tanh(scores/softcap); None: they stay as they are.
        causal: True: row i of a task attends to its keys j <= i + k_len - q_len (aligned bottom right), and
            with a window to j > i + k_len - q_len - window. False: every row attends to every key of its
            task, for the part of a task whose keys all come before its rows; no window then.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be at least 1 (a row sees itself) or None, got {self.window}")
        if self.window is not None and not self.causal:
            raise ValueError(f"a window needs causal=True, got window={self.window} with causal=False")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"softcap must be positive or None, got {self.softcap}")
