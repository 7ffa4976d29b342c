"""Write the golden plans again: `python -m tests.golden.refresh`, then read the difference before it is committed."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.support.deployment_plans import CONFIGS, PLANS, name_of, plan


def render(document: dict[str, Any]) -> str:
    """The text of a golden file."""
    return json.dumps(document, indent=2) + "\n"


def main() -> None:
    """Replace every file in plans/ and remove those of configs that are gone."""
    PLANS.mkdir(exist_ok=True)
    kept = {PLANS / f"{name_of(path)}.json": render(plan(path)) for path in CONFIGS}
    for gone in set(PLANS.glob("*.json")) - set(kept):
        gone.unlink()
    for file, text in kept.items():
        file.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(kept)} plans written to {PLANS}\n")


if __name__ == "__main__":
    main()
