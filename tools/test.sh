#!/usr/bin/env bash
# Sets up what is missing, checks the style and runs the tests.
#
#   tools/test.sh [pytest arguments]      tools/test.sh -m slow    the long ones
set -euo pipefail
EXTRAS="[test]"
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"
cd "$root"
if [ $# -eq 0 ]; then
  "$python" -m ruff check .
  "$python" -m ruff format --check .
  set -- -m "not slow" -n 2
fi
exec "$python" -m pytest "$@"
