"""Federations whose data stay where they are: sites that train, a coordinator that has no data, messages between them.

Read `messages.py` for what travels, `site.py` for what a data owner runs, `engine.py` for how the one round loop
reaches sites, and `files.py` for rounds that are exchanged as files. What carries the messages is a `Transport`: files,
a network, or calls in one process.
"""
