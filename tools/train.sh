#!/usr/bin/env bash
# Sets up what is missing and trains lm.byte_lm.Tiny on four stages.
#
#   tools/train.sh --logdir=/tmp/tiny [any flag of lingvo_gpipe.trainer]
set -euo pipefail
EXTRAS=""
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
exec "$python" -m lingvo_gpipe.trainer --model=lm.byte_lm.Tiny --num_stages=4 "$@"
