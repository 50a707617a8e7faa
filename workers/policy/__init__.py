"""The policy: chat text to token ids, token ids to sampled ids, with nothing ever tokenised twice.

`Renderer` turns messages into ids, a sampler (`sglang`, `scripted`) draws, and `Conversation` keeps the one
sequence of an episode.
"""
