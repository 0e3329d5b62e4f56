"""`python -m purestep` is the command `purestep`."""

import sys

from purestep.cli import main

sys.exit(main())
