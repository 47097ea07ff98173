"""The one exception that launch scripts turn into a sentence instead of a traceback."""


class UserError(Exception):
    """A mistake that the user can mend; launch scripts print it as one sentence and exit with status 2."""
