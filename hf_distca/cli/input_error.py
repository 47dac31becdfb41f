"""Error of unusable input to the command."""


class InputError(ValueError):
    """Unusable input; the message says in one line what was found and how to fix it."""
