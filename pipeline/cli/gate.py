"""gate: whether a running deployment answers the same however it is asked."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline.cli import options, output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pipeline.measure.gate import Outcome
    from pipeline.measure.served import Answer, Ask
    from pipeline.triton.client import Client

PROMPTS = 16
PROMPT_CHARACTERS = 200


@click.command()
@click.argument("url", metavar="HOST:PORT")
@click.option(
    "--against", metavar="HOST:PORT", help="Baseline deployment; answers must be as long as its, within 10 %."
)
@click.option(
    "--prompts",
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="JSONL (text or prompt) or plain text, one prompt a paragraph; default: the start of the shipped held text.",
)
@click.option("--max-tokens", type=click.IntRange(1), default=48, show_default=True, help="Output tokens at most.")
@click.option("--concurrency", type=click.IntRange(2), default=8, show_default=True, help="Requests in flight.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    default=0.9,
    show_default=True,
    help="Share of equal answers wanted of warm = cold and batch N = batch 1.",
)
@options.json_option
def gate(
    url: str,
    against: str | None,
    file: Path | None,
    max_tokens: int,
    concurrency: int,
    min_agreement: float,
    as_json: bool,
) -> None:
    """Ask the deployment at HOST:PORT (gRPC) the same questions in every way and compare its answers.

    Exit code 10 when a rule is broken, 9 when the length cannot be told from so few prompts.

    \b
    trtpipe gate 127.0.0.1:8001
    trtpipe gate candidate:8001 --against production:8001 --prompts traffic.jsonl
    """
    from pipeline.errors import Problem
    from pipeline.measure.gate import refusal
    from pipeline.measure.served import compare_length, conformance
    from pipeline.triton.client import Client

    prompts = _prompts(file)
    with Client(url) as client:
        rules, answers = conformance(
            _asking(client, max_tokens),
            prompts,
            concurrency=concurrency,
            min_agreement=min_agreement,
            nonce=uuid.uuid4().hex,
        )
    if against is not None:
        with Client(against) as client:
            baseline: Sequence[Answer] = [_asking(client, max_tokens)(prompt, False) for prompt in prompts]
        rules = (*rules, compare_length(answers, baseline, 0.95))
    outcomes = {rule.outcome for rule in rules}
    verdict: Outcome = "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"
    if as_json:
        output.emit_json({"url": url, "verdict": verdict, "rules": [rule.document() for rule in rules]})
    else:
        rows = [(rule.rule, rule.seen, rule.wanted, rule.outcome) for rule in rules]
        click.echo(output.table(("rule", "seen", "wanted", "verdict"), rows))
    if verdict != "pass":
        problems = [
            Problem(where=rule.rule, message=f"{rule.seen}. {rule.example}".strip())
            for rule in rules
            if rule.outcome != "pass"
        ]
        hint = {"fail": "Compare the first answers that part.", "inconclusive": "Give more --prompts."}[verdict]
        raise refusal(verdict, f"{url} does not pass its gate", problems, hint=hint)


def _prompts(file: Path | None) -> list[str]:
    from pipeline.errors import ConfigError
    from pipeline.quantize.documents import SHIPPED_HELD, read_documents

    texts = [document.text for document in read_documents(file or SHIPPED_HELD, key="--prompts") if document.text]
    if not texts:
        raise ConfigError(f"{file} holds no prompt", hint="Rows with messages are not asked; give text or prompt.")
    return texts if file else [text[:PROMPT_CHARACTERS] for text in texts[:PROMPTS]]


def _asking(client: Client, max_tokens: int) -> Ask:
    """Return how a client is asked: greedily, to the end."""
    from pipeline.measure.served import Answer
    from pipeline.triton.generation import GenerationRequest

    def ask(prompt: str, stream: bool) -> Answer:
        request = GenerationRequest(prompt=prompt, max_tokens=max_tokens, top_k=1, stream=stream)
        text, summary = client.generate_text(request)
        return Answer(text=text, tokens=summary.output_tokens)

    return ask
