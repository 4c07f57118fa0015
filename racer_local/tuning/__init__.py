"""Finds the settings with which a model answers fastest on this machine, and what smaller copies of it would do.

Each module imports only those before it: budget, search, texts, work, trial, quants, table.
"""
