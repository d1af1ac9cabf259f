"""The one exception for mistakes that a user can mend, and how it is told."""

import sys
from collections.abc import Callable, Sequence

# Exit status after a user's mistake: the same start would fail again.
EXIT_USER_ERROR = 2
# Exit status of a chief that has lost a worker: EX_TEMPFAIL, start anew.
EXIT_LOST_WORKER = 75


class UserError(ValueError):
  """A wrong Params field, flag or file, told with the fix.

  Commands print the message without a stack trace and exit with status 2.
  """


def run_command(argv: Sequence[str], command: Callable[[], int | None]) -> int:
  """Runs a command that takes flags alone; returns its exit status.

  Args:
    argv: the program and what absl took for no flag.
    command: returns an exit status, None for 0; may raise a UserError.
  """
  try:
    if len(argv) > 1:
      raise UserError(f'Unknown argument "{argv[1]}"; flags begin with "--".')
    return command() or 0
  except UserError as error:
    print(f'error: {error}', file=sys.stderr)
    return EXIT_USER_ERROR
