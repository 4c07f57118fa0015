"""The text of a user's own files, for the drafter to look things up in."""
