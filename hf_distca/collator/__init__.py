"""From a data set to rows of a rank: lengths, global micro-batches, and planned batches."""
