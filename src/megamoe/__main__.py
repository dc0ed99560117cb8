"""`python -m megamoe`: the same as the `megamoe` command."""

import sys

from megamoe.cli import main

sys.exit(main())
