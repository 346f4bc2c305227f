"""Kernels that compute one hop of ring attention: what a device's queries see of one shard of keys, forward and backward.

All have the interface of `xla.Kernel`: `xla` runs everywhere and is the reference, `splash_tpu` is for TPUs, `cudnn` for NVIDIA GPUs, and
`choice` says which one runs. None is differentiated through: the ring has its own backward.
"""
