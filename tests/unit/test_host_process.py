"""Running external programs, with real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from pipeline.errors import HostError, ToolError
from pipeline.host.process import Tool

pytestmark = pytest.mark.fast


def shell(script: str, tmp_path: Path, **options: object) -> Tool:
    """Return a Tool that runs a shell script."""
    return Tool(argv=("sh", "-c", script), log_path=tmp_path / "logs" / "tool.log", **options)  # type: ignore[arg-type]


def gone(pid: int) -> bool:
    """Wait for a process to be dead (a zombie counts: its parent need not have looked yet)."""
    for _ in range(500):
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.01)
    return False


def test_output_goes_to_the_log_and_line_by_line_to_the_listener(tmp_path: Path) -> None:
    """Both streams are logged; a carriage return ends a line; the last line needs no end."""
    lines: list[str] = []
    tool = shell(r"printf 'one\n10%%\r20%%\r\n'; echo two >&2; printf 'caf\303\251'", tmp_path)
    tool.run(lines.append)
    assert lines == ["one", "10%", "20%", "two", "café"]
    assert tool.log_path.read_bytes() == "one\n10%\r20%\r\ntwo\ncafé".encode()


def test_lines_come_while_the_program_runs(tmp_path: Path) -> None:
    """The program waits for a file that the listener makes on its first line."""
    flag = tmp_path / "flag"
    script = f'echo ready; while ! [ -e "{flag}" ]; do sleep 0.05; done; echo done'
    lines: list[str] = []

    def listen(line: str) -> None:
        lines.append(line)
        flag.touch()

    shell(script, tmp_path, timeout_s=60).run(listen)
    assert lines == ["ready", "done"]


def test_a_failure_shows_the_last_lines_and_how_to_rerun(tmp_path: Path) -> None:
    """Exit code, the last 20 lines, the log and the script are all in the error."""
    tool = shell("seq 1 30; exit 4", tmp_path)
    with pytest.raises(ToolError, match=r"sh exited 4 after \d+ s") as caught:
        tool.run()
    text = str(caught.value)
    assert "| 11\n" in text
    assert "| 10\n" not in text
    assert "| 30\n" in text
    assert str(tool.log_path) in text
    assert str(tool.reproduce_path) in text


def test_a_killed_program_is_told_by_signal(tmp_path: Path) -> None:
    """Death by signal is not shown as a number."""
    with pytest.raises(ToolError, match=r"was killed by SIGKILL.*printed nothing"):
        shell("kill -9 $$", tmp_path).run()


def test_the_reproduce_script_repeats_directory_environment_and_arguments(tmp_path: Path) -> None:
    """Run from elsewhere, it prints what the tool printed, quotes and spaces included."""
    work = tmp_path / "a dir"
    work.mkdir()
    code = "import os, sys; print(os.getcwd(), sys.argv[1], os.environ['KEY'], os.environ.get('DROPPED'))"
    tool = Tool(
        argv=(sys.executable, "-c", code, "it's $HOME"),
        log_path=tmp_path / "tool.log",
        cwd=work,
        env={"KEY": 'a "b"', "DROPPED": None},
    )
    os.environ["DROPPED"] = "x"
    try:
        tool.run()
        again = subprocess.run([tool.reproduce_path], cwd="/", capture_output=True, text=True, check=True)
    finally:
        del os.environ["DROPPED"]
    assert tool.log_path.read_text() == f'{work} it\'s $HOME a "b" None\n'
    assert again.stdout == tool.log_path.read_text()


def test_a_program_that_does_not_exist_is_a_host_error(tmp_path: Path) -> None:
    """The missing tool is named."""
    with pytest.raises(HostError, match="'no-such-tool' cannot be started"):
        Tool(argv=("no-such-tool",), log_path=tmp_path / "tool.log").run()


def test_a_program_that_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    """After the time limit the whole process group is dead."""
    pids: list[int] = []
    with pytest.raises(ToolError, match="did not end within 1 s"):
        shell("sleep 600 & echo $!; echo $$; wait", tmp_path, timeout_s=1).run(lambda line: pids.append(int(line)))
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)


def test_an_exception_in_the_listener_stops_the_program(tmp_path: Path) -> None:
    """Ctrl-C while a tool runs leaves no tool behind."""
    pids: list[int] = []

    def interrupt(line: str) -> None:
        pids.append(int(line))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shell("echo $$; sleep 600", tmp_path).run(interrupt)
    assert gone(pids[0])


def test_children_left_in_the_background_are_ended(tmp_path: Path) -> None:
    """A program that exits well but leaves a child holding its output does not block, and the child goes."""
    pids: list[int] = []
    shell("sleep 600 & echo $!", tmp_path).run(lambda line: pids.append(int(line)))
    assert gone(pids[0])


def test_a_program_that_closes_its_output_is_waited_for(tmp_path: Path) -> None:
    """The end of the output is not the end of the program."""
    with pytest.raises(ToolError, match="exited 7"):
        shell("exec >&- 2>&-; sleep 0.3; exit 7", tmp_path).run()
