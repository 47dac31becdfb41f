"""Trainers with planned core attention: arguments, data loaders, checkpoints and logged metrics."""
