"""Arguments, trainer, data loaders and what is logged."""
