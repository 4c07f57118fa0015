"""A local server of OpenAI's HTTP: it parses, puts work before the one thread that owns the models, and prints.

Each module imports only those before it: work, garage, indexes, metrics, guard, app, run.
"""
