"""`python -m outpace` is the `outpace` command."""

import sys

from outpace.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
