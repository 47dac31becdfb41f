"""What a training step takes of a device's memory, known before it runs."""
