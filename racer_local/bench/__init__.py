"""Measurements. What they showed, failures included, stands in NOTES.md."""
