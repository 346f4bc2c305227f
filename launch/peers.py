"""Other systems doing the same work as ours, for `launch.bench`; needs `pip install -e .[peers]`.

Each function runs alone in a fresh process, so that its peak memory is its own.
"""

from __future__ import annotations

import time

import numpy as np


def torch_train(config: dict, *, mode: str, dtype: str, rows: int, length: int, num_steps: int) -> list[dict]:
  """Time supervised steps of transformers' model with torch's AdamW; all state in `dtype`, as its users run it on CPU.

  Args:
    config: Hugging Face config.json of the model; its weights are random.
    mode: 'full', or 'lora' (peft, rank 16 on the seven projections).

  Returns:
    One {'wall_s', 'cpu_s', 'loss_nats'} per step, the first of which warms up.
  """
  import torch
  import transformers

  torch.manual_seed(0)
  kind = getattr(torch, dtype)
  model = transformers.AutoModelForCausalLM.from_config(
      transformers.AutoConfig.for_model(**config), dtype=kind, attn_implementation='sdpa')
  if mode == 'lora':
    import peft

    model = peft.get_peft_model(model, peft.LoraConfig(
        r=16, lora_alpha=16, target_modules=['q_proj', 'k_proj', 'v_proj', 'o_proj', 'gate_proj', 'up_proj', 'down_proj'],
        task_type='CAUSAL_LM'), autocast_adapter_dtype=False)
  model.train()
  optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.0)
  tokens = torch.from_numpy(np.random.default_rng(0).integers(1000, config['vocab_size'], (rows, length)))
  steps = []
  for _ in range(num_steps + 1):
    wall, cpu = time.perf_counter(), time.process_time()
    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    value = float(loss)
    steps.append({'wall_s': time.perf_counter() - wall, 'cpu_s': time.process_time() - cpu, 'loss_nats': value})
  return steps


def transformers_load(path: str) -> None:
  """Load a GGUF file's model and tokenizer with transformers."""
  import os

  import transformers

  directory, name = os.path.split(path)
  transformers.AutoTokenizer.from_pretrained(directory, gguf_file=name)
  transformers.AutoModelForCausalLM.from_pretrained(directory, gguf_file=name)
