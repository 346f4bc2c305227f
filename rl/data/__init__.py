"""Data: records and their validation, SeqIO sources, tasks and mixtures, and the loader. TensorFlow is imported only here, lazily."""
