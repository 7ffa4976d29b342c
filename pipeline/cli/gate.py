"""gate: whether a running deployment answers the same however it is asked, and as well as a baseline."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pipeline.cli import options, output
from pipeline.cli.progress import for_this_terminal

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from pipeline.core.progress import Progress
    from pipeline.measure.gate import Outcome
    from pipeline.measure.served import Answer, Ask, Finding
    from pipeline.quantize.tasks import Question
    from pipeline.triton.client import Client

PROMPTS = 16
PROMPT_CHARACTERS = 200
NEXT_WORDS = "next words"
FILE = click.Path(path_type=Path, dir_okay=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options, as they are named."""

    against: str | None
    report: Path | None
    tasks: tuple[Path, ...]
    next_words: int
    text: Path | None
    min_score: float | None
    max_drop: float
    confidence: float
    prompts: Path | None
    max_tokens: int
    concurrency: int
    min_agreement: float


@click.command()
@click.argument("url", metavar="HOST:PORT")
@click.option("--against", metavar="HOST:PORT", help="Baseline deployment: answers as long, and as many right.")
@click.option(
    "--report",
    type=click.Path(path_type=Path, exists=True),
    help="report.json of 'trtpipe verify': the source's answers to the same tasks are the baseline.",
)
@click.option("--tasks", type=FILE, multiple=True, help="JSONL of your questions, as in quality.tasks.")
@click.option(
    "--next-words",
    type=click.IntRange(0),
    default=200,
    show_default=True,
    help="With --against: so many words of running text to be continued by the right one; 0: none.",
)
@click.option("--text", type=FILE, help="The text of --next-words; default: the shipped held text.")
@click.option("--min-score", type=click.FloatRange(0, 1), help="Share of each task's questions to be right.")
@click.option(
    "--max-drop",
    type=click.FloatRange(0, 1),
    default=0.05,
    show_default=True,
    help="Share of each task's questions that may be lost against the baseline.",
)
@click.option(
    "--confidence",
    type=click.FloatRange(0.5, 1, max_open=True),
    default=0.95,
    show_default=True,
    help="Of the intervals; each rule is judged by itself.",
)
@click.option(
    "--prompts",
    type=FILE,
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
def gate(url: str, as_json: bool, **chosen: Any) -> None:
    """Ask the deployment at HOST:PORT (gRPC) the same questions in every way and compare its answers.

    A baseline (--against, --report) adds how many questions are answered right and how many fewer than there, with
    the uncertainty of that difference. Exit code 10 when a rule is broken, 9 when so few questions cannot tell.

    \b
    trtpipe gate 127.0.0.1:8001
    trtpipe gate candidate:8001 --against production:8001 --tasks questions.jsonl
    """
    settings = Settings(**chosen)
    findings = _findings(url, settings, for_this_terminal())
    outcomes = {finding.outcome for finding in findings}
    verdict: Outcome = "fail" if "fail" in outcomes else "inconclusive" if "inconclusive" in outcomes else "pass"
    if as_json:
        baseline = {"against": settings.against, "report": settings.report}
        rules = [finding.document() for finding in findings]
        output.emit_json({"url": url, "verdict": verdict, **baseline, "rules": rules})
    else:
        rows = [(finding.rule, finding.seen, finding.wanted, finding.outcome) for finding in findings]
        click.echo(output.table(("rule", "seen", "wanted", "verdict"), rows))
        click.echo(f"\n{url}: {verdict}")
        for method in dict.fromkeys(finding.figures["method"] for finding in findings if "method" in finding.figures):
            click.echo(f"interval at {settings.confidence:.0%}: {method}")
    _require_passed(url, verdict, findings)


def _require_passed(url: str, verdict: Outcome, findings: Sequence[Finding]) -> None:
    from pipeline.errors import Problem
    from pipeline.measure.gate import refusal

    if verdict == "pass":
        return
    problems = [
        Problem(where=finding.rule, message=f"{finding.seen}. {finding.example}".strip())
        for finding in findings
        if finding.outcome != "pass"
    ]
    hint = {"fail": "Compare the first answers that part.", "inconclusive": "Give more --prompts, --tasks or --text."}
    raise refusal(verdict, f"{url} does not pass its gate", problems, hint=hint[verdict])


def _findings(url: str, settings: Settings, progress: Progress) -> tuple[Finding, ...]:
    from pipeline.measure.served import compare_length, conformance
    from pipeline.triton.client import Client

    prompts, tasks = _prompts(settings.prompts), _tasks(settings)
    with Client(url) as client:
        rules, answers = conformance(
            _asking(client, settings.max_tokens),
            prompts,
            concurrency=settings.concurrency,
            min_agreement=settings.min_agreement,
            nonce=uuid.uuid4().hex,
        )
        marks = _mark(client, tasks, settings.concurrency, progress)
    if settings.against is None:
        return (*rules, *_scores(marks, _reported(settings), settings))
    with Client(settings.against) as client:
        baseline: Sequence[Answer] = [_asking(client, settings.max_tokens)(prompt, False) for prompt in prompts]
        before = _mark(client, tasks, settings.concurrency, progress)
    length = compare_length(answers, baseline, settings.confidence)
    return (*rules, length, *_scores(marks, before, settings))


def _scores(
    marks: Mapping[str, Sequence[int]], before: Mapping[str, Sequence[int]], settings: Settings
) -> Iterator[Finding]:
    from pipeline.measure.served import drop, score

    for task, after in marks.items():
        yield score(task, after, settings.confidence, settings.min_score if task != NEXT_WORDS else None)
        if task in before:
            yield drop(task, before[task], after, settings.confidence, settings.max_drop)


def _tasks(settings: Settings) -> dict[str, Sequence[Question]]:
    """Return the questions with known answers, by the name of their task."""
    from pipeline.quantize.documents import SHIPPED_HELD, read_documents
    from pipeline.quantize.tasks import next_words, read_task

    if settings.against is not None and settings.report is not None:
        raise click.UsageError("--against and --report are two baselines; give one.")
    tasks: dict[str, Sequence[Question]] = {path.name: read_task(path) for path in settings.tasks}
    if settings.against is not None and settings.next_words:
        texts = [document.text for document in read_documents(settings.text or SHIPPED_HELD, key="--text")]
        words = next_words(texts, settings.next_words)
        tasks |= {NEXT_WORDS: words} if words else {}
    return tasks


def _reported(settings: Settings) -> dict[str, Sequence[int]]:
    """Return the source's marks of each task from a verification report; empty without one.

    Raises:
        ConfigError: the file is no verification report.
        MeasurementError: the report has no answers to these questions.
    """
    from pipeline.errors import ConfigError, MeasurementError
    from pipeline.quantize.tasks import task_digest

    if settings.report is None:
        return {}
    file = settings.report / "report.json" if settings.report.is_dir() else settings.report
    try:
        answered = {task["sha256"]: task["source"] for task in json.loads(file.read_text("utf-8"))["tasks"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Give what 'trtpipe verify CONFIG' names, of a config with quality.tasks."
        raise ConfigError(f"{file} is no verification report: {error!r}", hint=hint) from error
    for path in settings.tasks:
        if task_digest(path) not in answered:
            hint = "Name the same file under quality.tasks and run 'trtpipe verify'."
            raise MeasurementError(f"{settings.report} holds no answers to the questions of {path}", hint=hint)
    return {path.name: answered[task_digest(path)] for path in settings.tasks}


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


def _mark(
    client: Client, tasks: Mapping[str, Sequence[Question]], concurrency: int, progress: Progress
) -> dict[str, list[int]]:
    """Ask every question greedily, `concurrency` at a time: 1 for right, 0 for wrong, by task."""
    from pipeline.triton.generation import GenerationRequest

    def mark(question: Question) -> int:
        document = question.document
        asked: dict[str, Any] = {"messages": document.messages} if document.messages else {"prompt": document.text}
        request = GenerationRequest(**asked, max_tokens=question.max_tokens, top_k=1, stream=False)
        return int(question.is_right(client.generate_text(request)[0]))

    marks: dict[str, list[int]] = {}
    for name, questions in tasks.items():
        marks[name] = []
        with (
            progress.track(f"{client.url}: {name}", len(questions), "questions") as advance,
            ThreadPoolExecutor(concurrency) as pool,
        ):
            for right in pool.map(mark, questions):
                marks[name].append(right)
                advance(1)
    return marks
