"""A chat in the terminal, or through a pipe.

What is said and done stands apart from where it is shown. Each module imports only those before it: texts,
conversation, blocks, front (what a place to chat in must do), plain (one through a pipe), render and terminal (one on a
screen), chat (the loop). The commands are called by the loop and change it.
"""
