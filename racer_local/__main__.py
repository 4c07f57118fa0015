"""`python -m racer_local` is the `racer-local` command."""

import sys

from racer_local.cli import main

sys.exit(main())
