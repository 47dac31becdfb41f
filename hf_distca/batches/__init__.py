"""What a batch may hold: documents in packed rows, values in a model's tables, and refusals."""
