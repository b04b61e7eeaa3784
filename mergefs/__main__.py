"""`python -m mergefs`."""

from mergefs.cli import main

main()
