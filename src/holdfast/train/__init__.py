"""Inside the training process: the only package that imports torch."""
