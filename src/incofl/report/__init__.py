"""One self-contained page about one or more runs: ``incofl report``."""
