"""What a batch may hold: documents in packed rows, and values in a model's tables."""
