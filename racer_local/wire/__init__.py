"""OpenAI's objects: what a request may hold, what it asks of a session, and the answers as that API shapes them.

Where they come from and go to, HTTP or a file, is others' business. Each module imports only those before it: errors,
requests, asking, answers.
"""
