"""`python -m latte` is the command `latte`."""

import sys

from latte.cli import main

sys.exit(main())
