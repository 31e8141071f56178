"""Data sets, partitions across clients, and the tasks made of them."""
