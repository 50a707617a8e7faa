"""The policy: converts chat text to token ids and samples further ids. Nothing is ever tokenised twice.

`Renderer` converts messages to ids, a sampler (`sglang`, `scripted`) continues them, and `Conversation` holds the token sequence of an
episode.
"""
