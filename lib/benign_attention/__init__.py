"""Benign overfitting in attention: exact reduced dynamics, exact test error, computed verdicts."""

__version__ = "0.1.0"
