"""Environments, tools and verifiers in the Gymnasium interface. Pure Python and numpy: this package never imports JAX."""
