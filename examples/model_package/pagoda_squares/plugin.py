"""What runs in every process of Pagoda at its start. Here it says so; a real one would register or configure things."""

import logging


def say_hello() -> None:
    """One line in the log."""
    logging.getLogger(__name__).info("squares are installed")
