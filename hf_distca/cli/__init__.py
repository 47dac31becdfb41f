"""Command line of hf_distca."""


class InputError(ValueError):
    """Unusable input to the command.

    The message names in one line what was found and how to fix it.
    """
