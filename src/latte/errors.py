"""The exceptions that a user is meant to read; the command line prints their sentence only."""


class UserError(Exception):
    """Bad input: one sentence that names the thing and the mend. Exit status 2."""


class RunFailedError(Exception):
    """A run that cannot go on: one sentence that names the last good checkpoint. Exit status 1."""
