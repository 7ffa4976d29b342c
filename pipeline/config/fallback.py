"""The `fallback` list of a config: what to try, in order, when the config itself does not pass its gate.

Each step is a part of a config that is laid over the config it stands in, and is validated as the whole
that this gives. It is read beside the schema, as `extends` is, because a step may hold almost any key.
"""

from __future__ import annotations

import yaml

from pipeline.config.document import Branch, Origin, section
from pipeline.config.keys import ROOT
from pipeline.errors import Problem

KEY = "fallback"
FIXED = ("name", "source", "quality")
"""What a step cannot change: it is another way to build the same thing, judged by the same gate."""
_HINT = "Write fallback: followed by a line '- quantization: {format: fp8}' for each step."


def take(node: yaml.Node, origin: Origin, problems: list[Problem]) -> list[Branch] | None:
    """Take `fallback` out of a document; None when it is not written."""
    if not isinstance(node, yaml.MappingNode):
        return None
    named = [pair for pair in node.value if pair[0].value == KEY]
    if not named:
        return None
    node.value = [pair for pair in node.value if pair not in named]
    key_node, value = named[0]
    where = f"{origin.mark(key_node)} {KEY}"
    for again, _ in named[1:]:
        message = f"'{KEY}' is written twice; first at {origin.mark(key_node)}."
        problems.append(Problem(where=f"{origin.mark(again)} {KEY}", message=message, hint="Write one list."))
    if isinstance(value, yaml.ScalarNode) and value.tag.endswith(":null"):
        return []
    if not isinstance(value, yaml.SequenceNode):
        problems.append(Problem(where=where, message=f"'{KEY}' takes a list of steps.", hint=_HINT))
        return []
    return [_step(item, origin, problems) for item in value.value]


def _step(item: yaml.Node, origin: Origin, problems: list[Problem]) -> Branch:
    mark = origin.mark(item)
    step = section(item, ROOT, origin, problems, mark=mark)
    for name in FIXED:
        if name in step.children:
            message = f"a step cannot change '{name}'."
            hint = f"A step changes how the same source is built; remove '{name}'."
            problems.append(Problem(where=f"{step.children[name].mark} {KEY}", message=message, hint=hint))
    return step
