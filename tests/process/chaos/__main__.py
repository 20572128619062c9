"""`python -m tests.process.chaos`."""

from tests.process.chaos.chaos import main

main()
