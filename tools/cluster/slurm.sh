#!/usr/bin/env bash
# A run on Slurm: a worker on every node, the trainer beside the first of them.
#
#   sbatch --nodes=4 tools/cluster/slurm.sh --model=lm.byte_lm.Small \
#     --logdir=/shared/run --num_stages=4
#
# Interrupted before its time is over, it saves and ends; submitted again with
# the same --logdir, it goes on.
#SBATCH --job-name=lingvo_gpipe
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:TERM@60
set -euo pipefail
port=${PORT:-2222}
python=${PYTHON:-python3}
workers=$(scontrol show hostnames "$SLURM_JOB_NODELIST" \
  | sed "s/\$/:$port/" | paste -sd,)

srun bash -c "$python -m lingvo_gpipe.trainer --job=worker --public_worker \
  --workers=$workers --task=\$SLURM_PROCID" &

"$python" -m lingvo_gpipe.trainer --workers="$workers" --worker_wait=300 "$@" &
trainer=$!
trap 'kill -TERM "$trainer"' TERM
status=0
wait "$trainer" || status=$?
# A signal ends the first wait before the trainer has saved.
if kill -0 "$trainer" 2>/dev/null; then
  status=0
  wait "$trainer" || status=$?
fi
exit "$status"
