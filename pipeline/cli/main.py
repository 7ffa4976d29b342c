"""The `trtpipe` command: a lazy group, and the one place where an error becomes an exit code.

Subcommands are imported when they run, so that `trtpipe --help` stays instant.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from pipeline import __version__
from pipeline.errors import HostError, Interrupted, TrtpipeError

DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}

COMMANDS = {
    "build": ("pipeline.cli.build:build", "Run every stage and write the Triton model repository."),
    "plan": ("pipeline.cli.plan:plan", "Show what a build would run, reuse and need; runs nothing."),
    "quantize": ("pipeline.cli.build:quantize", "Build up to the quantized checkpoint."),
    "verify": ("pipeline.cli.build:verify", "Build up to the proof that the checkpoint computes the same."),
    "compile": ("pipeline.cli.build:compile_", "Build up to the engine."),
    "emit": ("pipeline.cli.build:emit", "Build up to the model repository, without publishing a copy."),
    "ladder": (
        "pipeline.cli.ladder:ladder",
        "Build every step of the fallback until verify; compare size and quality.",
    ),
    "calibration": ("pipeline.cli.calibration:calibration", "What the calibration text is: counts, lengths, warnings."),
    "probe": (
        "pipeline.cli.probe:probe",
        "How good a format would be (nf4, int2, ...): rounds, scores, writes nothing.",
    ),
    "sensitivity": (
        "pipeline.cli.sensitivity:sensitivity",
        "Score what each format costs each layer; show what a budget of bits buys.",
    ),
    "serve": ("pipeline.cli.serve:serve", "Serve a model repository on a real Triton server, on loopback."),
    "generate": ("pipeline.cli.serve:generate", "Send one prompt to a running server and stream the answer."),
    "chat": ("pipeline.cli.serve:chat", "Talk to a running server; the chat template is applied there."),
    "gate": ("pipeline.cli.gate:gate", "Ask a running deployment the same in every way; streamed, warm, batched."),
    "check": ("pipeline.cli.repository:check", "Validate any LLM model repository, offline; prints every problem."),
    "migrate": ("pipeline.cli.repository:migrate", "Replace an engine repository by its LLM API successor."),
    "explain": ("pipeline.cli.explain:explain", "Turn the log of a failed stage into cause and next step."),
    "matrix": ("pipeline.cli.explain:matrix", "What goes together: model, precision, GPU, toolchain, driver."),
    "config": ("pipeline.cli.config:config", "Check, show, start or describe a config file."),
    "cache": ("pipeline.cli.cache:cache", "Look at, verify and clean the artifact store."),
    "doctor": ("pipeline.cli.doctor:doctor", "What this machine can do, and what brings the rest."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported on use and corrected when misspelt."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which a user meets them."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module that defines the command."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = vars(importlib.import_module(module))[attribute]
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for a misspelt one."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            import difflib

            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            if not near:
                raise
            raise click.UsageError(f"{error.message} Did you mean '{near[0]}'?", ctx) from None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", prog_name="trtpipe")
def root() -> None:
    """From a Hugging Face checkpoint to a production Triton deployment.

    \b
    trtpipe config init my.yaml    write a first config
    trtpipe plan my.yaml           what would run, and what it needs
    trtpipe build my.yaml          quantize, verify, compile, emit
    trtpipe serve build/my         serve the repository
    trtpipe generate "Hello"       ask it
    """


def _raise_interrupt(signum: int, frame: FrameType | None) -> NoReturn:
    del signum, frame
    raise KeyboardInterrupt


def _bug_report() -> Path:
    with tempfile.NamedTemporaryFile("w", prefix="trtpipe-", suffix=".log", delete=False) as report:
        traceback.print_exc(file=report)
    return Path(report.name)


def main() -> NoReturn:
    """Run the command and turn every outcome into an exit code."""
    # SIGTERM takes the same clean way out as Ctrl-C: staging directories removed, servers stopped.
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        result = root.main(standalone_mode=False)
        sys.exit(result if isinstance(result, int) else 0)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted; a rerun goes on behind what was finished", err=True)
        sys.stdout.flush()
        sys.stderr.flush()
        # Guard: sys.exit would end in "killed by SIGINT" when the interrupt came inside exec() (CPython
        # remembers it there as unhandled). Everything that had to be undone was undone on the way here.
        os._exit(Interrupted.exit_code)
    except TrtpipeError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except Exception as error:  # noqa: BLE001 - the boundary: a bug of ours becomes a report, not a wall of text
        if isinstance(error, OSError) and error.errno in DENIED:
            click.echo(f"error: {error.filename}: {error.strerror}\n  Choose a place that you may write to.", err=True)
            sys.exit(HostError.exit_code)
        click.echo(f"internal error: {type(error).__name__}: {error}\n  traceback: {_bug_report()}", err=True)
        sys.exit(1)
