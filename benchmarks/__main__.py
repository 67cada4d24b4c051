"""`python benchmarks COMMAND`: the benchmarks of single parts of the engine, see micro/commands.py."""

import sys

from micro.commands import main

sys.exit(main())
