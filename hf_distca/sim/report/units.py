"""Units of numbers in reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """Format of numbers."""

    scale: float = 1.0
    digits: int = 0
    suffix: str = ""

    def text(self, value: float) -> str:
        """Return the formatted value."""
        return f"{value / self.scale:,.{self.digits}f}{self.suffix}"


COUNT = Unit()
SECONDS = Unit(digits=3)
SHARE = Unit(scale=0.01, digits=1, suffix="%")
TIMES = Unit(digits=2, suffix="×")
RATIO = Unit(digits=3)
MEGABYTES = Unit(scale=1e6, digits=1)
GIGABYTES = Unit(scale=1e9, digits=2)


def short(count: float) -> str:
    """Return a count of tokens in short form: 512, 8K, 1M, in powers of 1024."""
    for size, letter in ((2**30, "G"), (2**20, "M"), (2**10, "K")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return f"{count:g}"
