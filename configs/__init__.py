"""Run configurations for ml-collections flags; a config imports only `ml_collections` and `configs`."""
