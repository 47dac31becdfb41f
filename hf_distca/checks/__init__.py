"""All that is refused: what was found, why it cannot work, and what to set."""
