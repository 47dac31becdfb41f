"""From a data set to a rank's rows: lengths, global micro-batches, planned batches without padding."""
