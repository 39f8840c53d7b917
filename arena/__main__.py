"""``python -m arena``: the door to arena/cli, and nothing else."""

import sys

from arena.cli import main

if __name__ == "__main__":
    sys.exit(main())
