"""Paged attention over the block table: one protocol (base), one file per backend."""
