"""Llama: the form that most other families vary."""

from typing import ClassVar

from trainer.learner.families.family import Family


class Llama(Family, frozen=True, kw_only=True):
    models: ClassVar = "Llama 2 and 3 to 3.3, SmolLM2"
    engines_read_scales: ClassVar = False
