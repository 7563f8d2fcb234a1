"""How two sides meet: who listens, who dials, what they say first, and how a lost link is replaced.

Must not import torch, nor a sender, a receiver or a scheme.
"""
