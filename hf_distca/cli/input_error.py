"""The error of what a user gave to the command."""


class InputError(ValueError):
    """Something a user gave cannot be used; the message says what and how to fix it, in one line."""
