"""Sites on a network, over Flower's fleet interface. Nothing else in Atoll imports Flower.

The server offers the paths by which nodes fetch messages and bring replies, and no others: nobody can register a key
or start a run over the network, because nothing listens for it. A node is one process that stays; a message is an
envelope of bytes that Flower carries and does not read.
"""
