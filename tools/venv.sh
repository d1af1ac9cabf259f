# Sourced by the other scripts: makes .venv and installs the package into it.
#
# Set before sourcing: EXTRAS, such as "[test]" or "".

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="$root/.venv/bin/python"

# Installs again only when what is to be installed has changed.
wanted="$(cat "$root/setup.py" "$root/pyproject.toml")$EXTRAS"
installed="$root/.venv/installed${EXTRAS}"
if [ ! -f "$installed" ] || [ "$(cat "$installed")" != "$wanted" ]; then
  echo "Setting up $root/.venv (a few minutes the first time) ..." >&2
  [ -x "$python" ] || python3 -m venv "$root/.venv"
  "$python" -m pip install --quiet --disable-pip-version-check \
    --editable "$root$EXTRAS"
  printf '%s' "$wanted" >"$installed"
fi
