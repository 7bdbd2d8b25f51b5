"""From files of text to samples, and from samples to batches."""
