"""Hub ids: the local cache first, then a download without pickle, and a clear error without network."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from pipeline.checkpoints.hub import locate_data_file, locate_snapshot
from pipeline.checkpoints.resolve import resolve
from pipeline.config.schema import SourceConfig
from pipeline.core.digest import FileHasher
from pipeline.errors import SourceNotFound, UnsafeCheckpoint
from tests.support.checkpoint_files import write_checkpoint

pytestmark = pytest.mark.fast

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHAPES = {"model.embed_tokens.weight": [512, 16]}
NOBODY = "http://127.0.0.1:9"  # the discard port: connections are refused at once


def cached(cache: Path) -> Path:
    """Put a complete snapshot of owner/model into a cache directory, as the hub's client lays it out."""
    repository = cache / "models--owner--model"
    snapshot = write_checkpoint(repository / "snapshots" / COMMIT, SHAPES)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    return snapshot


@pytest.mark.parametrize(
    ("variable", "below"), [("HF_HUB_CACHE", ""), ("HF_HOME", "hub"), ("XDG_CACHE_HOME", "huggingface/hub")]
)
def test_the_cache_is_where_the_environment_says(tmp_path: Path, variable: str, below: str) -> None:
    """A cached id is found without network, by the client's own variables."""
    snapshot = cached(tmp_path / below)
    environment = {variable: str(tmp_path), "HF_ENDPOINT": NOBODY}
    found = locate_snapshot("owner/model", None, environment=environment)
    assert (found.directory, found.commit) == (snapshot, COMMIT)


def test_a_cached_commit_is_found_by_its_name(tmp_path: Path) -> None:
    """A pinned revision needs no branch."""
    snapshot = cached(tmp_path)
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOBODY}
    assert locate_snapshot("owner/model", COMMIT, environment=environment).directory == snapshot


def test_an_unreachable_hub_says_what_was_tried_and_what_to_do(tmp_path: Path) -> None:
    """The message names the id, the cache, the endpoint, and two ways on."""
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOBODY}
    with pytest.raises(SourceNotFound) as failure:
        locate_snapshot("owner/model", COMMIT, environment=environment)
    text = str(failure.value)
    for part in ("owner/model", str(tmp_path), NOBODY, "huggingface-cli download owner/model", "source.path"):
        assert part in text


def test_half_a_download_in_the_cache_is_not_used(tmp_path: Path) -> None:
    """A snapshot without its weights counts as absent."""
    (cached(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(SourceNotFound, match="is not in the cache"):
        locate_snapshot("owner/model", None, environment={"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOBODY})


@pytest.mark.parametrize("name", ["/etc", "a/b/c", "../x", "own er/model"])
def test_what_is_no_hub_id_is_refused_before_any_look(tmp_path: Path, name: str) -> None:
    """A path is not sent to the hub."""
    with pytest.raises(SourceNotFound, match="is not a hub id"):
        locate_snapshot(name, None, environment={"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOBODY})


@pytest.mark.parametrize(("revision", "warnings"), [(None, 1), ("main", 1), (COMMIT, 0)])
def test_an_unpinned_revision_is_a_warning_and_its_commit_identifies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, revision: str | None, warnings: int
) -> None:
    """The commit enters the identity either way; only a full commit is pinned."""
    cached(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    source = resolve(SourceConfig.model_validate({"hub": "owner/model", "revision": revision}), FileHasher(None))
    assert (source.kind, source.identity["commit"]) == ("hub", COMMIT)
    assert [problem.severity for problem in source.problems] == ["warning"] * warnings
    assert all(COMMIT in problem.hint for problem in source.problems)


class _Hub(BaseHTTPRequestHandler):
    """The three requests of the hub's protocol that a snapshot download makes."""

    files: Path

    def do_HEAD(self) -> None:
        """Answer metadata of a file."""
        self._answer(with_body=False)

    def do_GET(self) -> None:
        """Answer the listing or a file."""
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = urlsplit(self.path).path
        path = path.removeprefix("/datasets")
        prefix = f"/owner/model/resolve/{COMMIT}/"
        if path in {"/api/models/owner/model", "/api/models/owner/model/revision/main"}:
            names = ",".join(f'{{"rfilename":"{file.name}"}}' for file in sorted(self.files.iterdir()))
            body = f'{{"id":"owner/model","sha":"{COMMIT}","siblings":[{names}]}}'.encode()
        elif path.startswith(prefix) and (self.files / path.removeprefix(prefix)).exists():
            body = (self.files / path.removeprefix(prefix)).read_bytes()
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Keep the test's output clean."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """Serve owner/model, which also has pickle weights and code, on loopback."""
    files = write_checkpoint(tmp_path / "served", SHAPES)
    (files / "pytorch_model.bin").write_bytes(b"pickle")
    (files / "modeling.py").write_text("raise SystemExit")
    handler = type("Handler", (_Hub,), {"files": files})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_download_takes_safetensors_and_json_and_never_pickle_or_code(hub: str, tmp_path: Path) -> None:
    """What is not needed is not fetched, and what is fetched is found in the cache afterwards."""
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub}
    found = locate_snapshot("owner/model", "main", environment=environment)
    names = {file.name for file in found.directory.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert found.commit == COMMIT
    again = locate_snapshot("owner/model", "main", environment=environment | {"HF_ENDPOINT": NOBODY})
    assert again == found


def test_an_unknown_id_is_told_apart_from_a_missing_network(hub: str, tmp_path: Path) -> None:
    """A hub that answers 'not found' is not called unreachable."""
    with pytest.raises(SourceNotFound, match="does not exist at"):
        locate_snapshot("owner/other", None, environment={"HF_HUB_CACHE": str(tmp_path / "c"), "HF_ENDPOINT": hub})


def test_pickle_weights_on_the_hub_are_refused_before_a_download(hub: str, tmp_path: Path) -> None:
    """A repository without safetensors is named unsafe, and nothing is fetched."""
    (tmp_path / "served" / "model.safetensors").unlink()
    with pytest.raises(UnsafeCheckpoint, match=r"pickle weights only \(pytorch_model\.bin\)"):
        locate_snapshot("owner/model", None, environment={"HF_HUB_CACHE": str(tmp_path / "c"), "HF_ENDPOINT": hub})
    assert not list((tmp_path / "c").glob("**/*.json"))


def test_a_data_file_is_downloaded_once_and_then_found_in_the_cache(hub: str, tmp_path: Path) -> None:
    """The second look needs no network, nor does one that is told to stay offline."""
    (tmp_path / "served" / "text.jsonl").write_text('{"text": "one"}')
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub}
    found = locate_data_file("owner/model", "text.jsonl", COMMIT, environment=environment)
    assert found.read_text() == '{"text": "one"}'
    for offline in ({"HF_ENDPOINT": NOBODY}, {"HF_HUB_OFFLINE": "1"}):
        assert locate_data_file("owner/model", "text.jsonl", COMMIT, environment=environment | offline) == found


@pytest.mark.parametrize("offline", [{"HF_ENDPOINT": NOBODY}, {"HF_HUB_OFFLINE": "1"}])
def test_a_data_file_that_cannot_be_had_says_what_to_run(tmp_path: Path, offline: dict[str, str]) -> None:
    """The message names file, data set, cache and the command for a machine with network."""
    environment = {"HF_HUB_CACHE": str(tmp_path), "HF_ENDPOINT": NOBODY} | offline
    with pytest.raises(SourceNotFound, match="cannot be reached") as failure:
        locate_data_file("owner/data", "text.jsonl", COMMIT, environment=environment)
    for part in ("owner/data", "text.jsonl", str(tmp_path), "huggingface-cli download --repo-type dataset owner/data"):
        assert part in str(failure.value)


def test_a_data_file_that_the_hub_does_not_have_is_told_apart(hub: str, tmp_path: Path) -> None:
    """A misspelt id is no missing network."""
    environment = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_ENDPOINT": hub}
    with pytest.raises(SourceNotFound, match="does not exist at"):
        locate_data_file("owner/other", "text.jsonl", COMMIT, environment=environment)
