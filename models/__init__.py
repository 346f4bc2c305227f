"""The model as pure functions over pytrees: declaration, forward pass, decoding, weights, tokenizers.

Shape letters, at the end of every array's name and in every einsum:
B rows, T query tokens, S key tokens, D embed, N query heads, K kv heads, G = N/K, H head_dim, F mlp, V vocab, L layers, R LoRA rank,
M segments in a row, P pairs in a row, C scores of a scalar head, J top-k logits, Q problems, U samples of a problem.
"""

from models import startup

startup.prepare()
