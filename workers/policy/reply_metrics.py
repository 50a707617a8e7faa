"""Metrics of the replies that engines sample, by OpenTelemetry's conventions for clients of generative AI."""

from pipeline.metrics import SECONDS, meter

_WHAT = {"gen_ai.operation.name": "text_completion", "gen_ai.provider.name": "sglang"}

_durations = meter().create_histogram(
    "gen_ai.client.operation.duration",
    unit="s",
    description="How long a reply took, its waits and repeated requests included",
    explicit_bucket_boundaries_advisory=[0.01 * 2**power for power in range(14)],
)
_waits = meter().create_histogram(
    "swerve.reply.wait.duration",
    unit="s",
    description="How long a reply waited until an engine worked on it, all its requests together",
    explicit_bucket_boundaries_advisory=SECONDS,
)
_tokens = meter().create_histogram(
    "gen_ai.client.token.usage",
    unit="{token}",
    description="Tokens of a reply: of its whole prompt, and sampled",
    explicit_bucket_boundaries_advisory=[4**power for power in range(14)],
)


def record_reply(duration_s: float, wait_s: float, *, prompt_tokens: int, sampled_tokens: int) -> None:
    _durations.record(duration_s, _WHAT)
    _waits.record(wait_s)
    _tokens.record(prompt_tokens, _WHAT | {"gen_ai.token.type": "input"})
    _tokens.record(sampled_tokens, _WHAT | {"gen_ai.token.type": "output"})
