"""`python -m loadplan.compiler` is the command `loadplan`."""

import sys

from loadplan.compiler.cli import main

sys.exit(main())
