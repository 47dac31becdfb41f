"""Data set to rows of a rank: document lengths, global micro-batches, planned batches without padding."""
