"""`python -m jspec`: the same as the command `jspec`."""

from jspec.cli import main

main()
