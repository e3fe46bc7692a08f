"""`python -m megalite COMMAND`, the same as `megalite COMMAND`; torchrun starts ranks with `-m megalite train`."""

import sys

from megalite.commands.dispatch import main

if __name__ == "__main__":
    sys.exit(main())
