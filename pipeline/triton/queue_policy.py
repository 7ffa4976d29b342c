"""How requests wait in front of the core model.

Triton holds nothing back in front of a decoupled model (its scheduler hands requests over at once), so time-outs and
priorities bite only while requests wait for a fuller batch (max_queue_delay_microseconds). A limit that always binds is
the core model's own: `max_queue_size`.
"""

from __future__ import annotations

from pipeline.config.deployment import ServingConfig
from pipeline.errors import ConfigError, Problem
from pipeline.triton.model_config import ModelConfig


def set_queue_policy(core: ModelConfig, serving: ServingConfig) -> None:
    """Write time-outs and priorities into the core model's configuration.

    Raises:
        ConfigError: the default priority is none of the levels; Triton does not load such a model.
    """
    policy, batching = serving.queue_policy, core.dynamic_batching
    if bool(policy.priority_levels) != (1 <= policy.default_priority_level <= policy.priority_levels):
        message = f"{policy.default_priority_level} is not one of the levels 1 to {policy.priority_levels}."
        hint = "Write a level that exists; both are 0 without priorities."
        where = "serving.queue_policy.default_priority_level"
        problem = Problem(where=where, message=message, hint=hint)
        raise ConfigError("the queue policy is none that Triton takes", problems=[problem])
    queue = batching.default_queue_policy
    queue.timeout_action = type(queue).TimeoutAction.Value(policy.timeout_action)
    queue.default_timeout_microseconds = policy.default_timeout_microseconds
    queue.allow_timeout_override = policy.allow_timeout_override
    batching.priority_levels = policy.priority_levels
    batching.default_priority_level = policy.default_priority_level
