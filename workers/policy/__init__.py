"""The policy: chat text to token ids, token ids to sampled ids, and nothing is ever tokenised twice.

`Renderer` turns messages into ids, a sampler (`sglang`, `scripted`) continues them, and `Conversation` keeps the one token
sequence of an episode.
"""
