"""The command `purestep`: look at checkpoints, check them, compare them, convert them; plan a run.

Nothing here imports torch before a command needs it: `--help`, `inspect` and `verify` never do.
"""

from purestep.cli.program import main

__all__ = ["main"]
