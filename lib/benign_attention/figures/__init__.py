"""Figures of the book: `style` is shared, then one module a chapter."""
