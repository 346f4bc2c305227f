#!/usr/bin/env bash
# From the Gemma-3-270M base model to one that calculates with a tool: quickstart.sh PYTHON RUNDIR SEED
set -euo pipefail
python=$1 rundir=$2 seed=$3
cd "$(dirname "$0")/.."

model=$rundir/gemma3-270m.gguf
bash launch/model.sh "$python" "$model"

set -x
"$python" -m launch.prepare_data --domain=arithmetic/python --levels=1,2 --count=600 --output="$rundir/demonstrations.jsonl"
"$python" -m launch.evaluate --model="$model" --config=configs/quickstart_grpo.py --output="$rundir/base.json"
"$python" -m launch.train --config=configs/quickstart.py --config.model.path="$model" --config.seed="$seed" \
  --config.data.tasks.train.paths="('$rundir/demonstrations.jsonl',)" --workdir="$rundir/supervised"
"$python" -m launch.convert --source="$rundir/supervised" --target="$rundir/taught"
"$python" -m launch.train --config=configs/quickstart_grpo.py --config.model.path="$rundir/taught" --config.seed="$seed" --workdir="$rundir/grpo"
"$python" -m launch.report --workdir="$rundir/grpo" --baseline="$rundir/base.json"
