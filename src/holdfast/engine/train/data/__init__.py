"""Makes batches for tasks: which samples, which random numbers, loaded ahead."""
