"""Which kernel computes a hop of the ring here.

TPUs have a kernel of our own, NVIDIA GPUs use cuDNN where a probe on the device finds it right, and XLA's blockwise form runs everywhere. The
choice is made once for a model and logged with its reason. Kernels of other platforms are not imported.
"""

from __future__ import annotations

import functools
import logging
from typing import NamedTuple

from models.config import ModelConfig
from models.kernels import xla
from models.kernels.xla import Kernel

_LOG = logging.getLogger(__name__)
NAMES = ('blockwise', 'pallas_tpu', 'cudnn')
_PLATFORMS = {'pallas_tpu': 'tpu', 'cudnn': 'gpu'}


class Choice(NamedTuple):
  name: str
  kernel: Kernel
  reason: str


@functools.cache
def choose_inner(platform: str, config: ModelConfig, dtype: str, asked: str = 'auto') -> Choice:
  """Return the kernel for the hops of this model, and log it the first time; on a GPU that takes a probe of some seconds.

  Args:
    platform: of the devices, as jax names it.
    dtype: of queries, keys and values.
    asked: 'auto', or one of `NAMES`.

  Raises:
    ValueError: the kernel asked for is unknown or cannot compute this here.
  """
  if asked not in ('auto', *NAMES):
    raise ValueError(f"layout.attention={asked!r} is no kernel of a ring; use 'auto' or one of {NAMES}.")
  choice = _choose(platform, config, dtype, asked)
  if asked not in ('auto', choice.name):
    raise ValueError(f"layout.attention={asked!r} cannot compute this model here: {choice.reason}; use 'auto' or 'blockwise'.")
  slow = platform in _PLATFORMS.values() and choice.name == 'blockwise' and asked != 'blockwise'
  _LOG.log(logging.WARNING if slow else logging.INFO, 'Attention runs as %s: %s.', choice.name, choice.reason)
  return choice


def _choose(platform, config, dtype, asked):
  def blockwise(reason):
    return Choice('blockwise', xla.KERNEL, reason)

  if asked == 'blockwise':
    return blockwise('asked for')
  if asked != 'auto' and _PLATFORMS[asked] != platform:
    return blockwise(f'it needs a {_PLATFORMS[asked].upper()}, and the devices are {platform}')
  if platform == 'tpu':
    from models.kernels import splash_tpu
    return Choice('pallas_tpu', splash_tpu.KERNEL, 'the kernel for TPUs')
  if platform == 'gpu':
    return _choose_gpu(config, dtype, blockwise)
  return blockwise(f'there is no kernel for {platform}')


def _choose_gpu(config, dtype, blockwise):
  from models.kernels import cudnn
  if config.attention_softcap is not None:
    return blockwise(f'cuDNN has no soft cap, and model.attention_softcap={config.attention_softcap}')
  if dtype not in cudnn.DTYPES:
    return blockwise(f'cuDNN takes {" or ".join(cudnn.DTYPES)}, and layout.compute_dtype={dtype!r}')
  problem = cudnn.problem(config.head_dim, config.num_kv_heads, config.num_heads // config.num_kv_heads, dtype)
  if problem is not None:
    return blockwise(f'cuDNN failed its probe: {problem}')
  return Choice('cudnn', cudnn.KERNEL, 'cuDNN agrees with XLA in both directions on this device')
