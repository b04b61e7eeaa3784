"""mergefs: ingest checkpoints once, merge them under a read budget, serve the result as files and arrays."""

__version__ = "0.1.0"
