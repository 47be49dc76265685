"""``python -m incofl`` is the command ``incofl``."""

from incofl.cli import main

main()
