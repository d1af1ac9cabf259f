"""The one exception for mistakes that a user can mend."""


class UserError(ValueError):
  """A wrong Params field, flag or file, told in one line with the fix.

  The trainer prints the message without a stack trace and exits with status 2.
  """
