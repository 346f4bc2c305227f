"""Shared test set-up: simulated devices and strict switches before the first JAX import."""

import os

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TF_CPP_MIN_LOG_LEVEL', '3')

from models import startup  # noqa: E402, I001  (sets XLA's flags; must precede jax)
import jax  # noqa: E402

startup.use_cpu_devices(8)
jax.config.update('jax_numpy_rank_promotion', 'raise')
