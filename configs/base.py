"""Every field of a supervised run with its default and meaning; other configs change a few.

python -m launch.train --config=configs/base.py --config.model.path=... --workdir=...
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
  return ml_collections.ConfigDict({
      'stage': 'supervised',
      'num_steps': 100,  # optimizer steps; the learning rate schedule ends there
      'phases': (),  # of longer rows and another RoPE (see configs/long_context.py); () is one, as `data` says
      'seed': 0,
      'model': {
          'path': '',  # Hugging Face directory or .gguf file
          'chat_template': 'plain',  # plain (base models), chatml, llama3, gemma, mistral
          'frozen_dtype': 'bfloat16',  # of LoRA's base: float32, bfloat16, int8 or nf4; trained weights are float32
      },
      'lora': {
          'rank': 0,  # 0 trains all parameters
          'alpha': 16.0,
          'targets': ('q', 'k', 'v', 'o', 'gate', 'up', 'down'),
          'rank_stabilized': True,  # scale alpha / sqrt(rank) instead of alpha / rank
      },
      'data': {
          'tasks': {
              'train': {
                  'paths': (),  # files or globs
                  'source': 'jsonl',  # jsonl, parquet, tfds, npy
                  'schema': 'qa',  # qa {"question", "answer"}, chat {"messages": [{"role", "content"}]}, text {"text"}, tokens (npy)
                  'fields': {},  # {'question': 'prompt'} where a column has another name
                  'tfds_split': 'train',
                  'heldout_fraction': 0.05,  # kept out of training, chosen by content
                  'limit': config_dict.placeholder(int),  # examples of each split
                  'shuffle_window': 100_000,  # rows held in memory to shuffle
              },
          },
          'rates': {},  # task -> relative number of examples; {} is in proportion to size
          'rows': 8,  # of a micro-batch, over all hosts
          'length': 256,  # tokens of a row
          'micro_batches': 1,  # of an optimizer step
          'overlong': 'drop',  # a document longer than a row: drop, truncate, error
          'aggregation': 'token_mean',  # token_mean, sequence_mean, token_sum
      },
      'optimizer': {
          'learning_rate': 1e-5,
          'schedule': 'cosine',  # constant, linear, cosine
          'warmup_steps': 0,
          'final_fraction': 0.1,  # last learning rate over the peak
          'beta1': 0.9,
          'beta2': 0.999,
          'epsilon': 1e-8,
          'weight_decay': 0.0,  # decoupled; matrices of the blocks only
          'clip_norm': 1.0,
          'first_moment_dtype': 'float32',  # bfloat16 saves 2 bytes a trained parameter
      },
      'mesh': {'data': 1, 'fsdp': -1, 'seq': 1, 'ulysses': 1, 'tensor': 1},  # devices along each axis; -1 is the rest
      'layout': {
          'attention': 'auto',  # dense, blockwise, cudnn, pallas_tpu
          'remat': 'full',  # none, full, offload, or names to keep: query,key,value,attention,attention_lse,gate,up,offload
          'scan': True,  # layers under lax.scan; False unrolls them (faster on CPU, slower to compile)
          'compute_dtype': 'bfloat16',
          'order': 'auto',  # of tokens where a row is split over seq: contiguous, zigzag, striped
          'mlp_chunk': config_dict.placeholder(int),  # most tokens of a device that the MLP handles at once; None is no limit
          'fsdp_splits': 'rows',  # of a batch: rows, or the length of rows where they are few and long; parameters always
      },
      'checkpoint_every_steps': 100,
      'checkpoints_kept': 2,
      'eval_every_steps': 0,  # on the held-out split; 0 never
      'eval_documents': 256,  # of the held-out split; 0 is all
      'cpu_devices': 1,  # simulated devices, when running on CPU
  })
