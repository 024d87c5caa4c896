"""One step in a worker: buckets, reduction, and the driver of the pure step."""
