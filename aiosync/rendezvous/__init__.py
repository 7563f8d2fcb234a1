"""Setting up links: listeners, dialers, the handshake, and the replacement of a lost link.

Must not import torch, nor a sender, a receiver or a scheme.
"""
