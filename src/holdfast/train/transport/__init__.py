"""How tensors travel between the members of a view."""
