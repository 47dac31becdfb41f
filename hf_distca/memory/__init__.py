"""Prediction of the device memory that a training step takes."""
