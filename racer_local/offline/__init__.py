"""Answers to a file of requests, without a server: what a line asks, what is kept of the answers, the work itself.

Each module imports only those before it: lines, journal, work.
"""
