"""Runs one measurement of a script in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from absl import flags


def measure(
  script: str,
  arguments: Sequence[str],
  passed_on: Sequence[str],
  environment: Mapping[str, str] | None = None,
):
  """Returns what the script prints as JSON on its last line.

  Args:
    script: path of the script.
    arguments: that make it measure once and print.
    passed_on: names of flags of this process that it gets too.
    environment: variables to set.
  """
  same = [f'--{name}={flags.FLAGS[name].value}' for name in passed_on]
  output = subprocess.run(
    [sys.executable, script, *arguments, *same],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, **(environment or {})},
  ).stdout
  return json.loads(output.splitlines()[-1])
