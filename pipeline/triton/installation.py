"""Where a tritonserver lives on this machine and what it needs around it to start.

Two kinds are known: the nvidia-pytriton wheel, which carries server, bundled libraries and one Python
stub per interpreter version (its Python API is not used), and a system installation such as the one
in NVIDIA's containers, whose Python is the image's own.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from pipeline.errors import HostError

DISTRIBUTION = "nvidia-pytriton"
SYSTEM_ROOT = Path("/opt/tritonserver")
STUB = "triton_python_backend_stub"
INSTALL_HINT = "Install it with: pip install 'trtpipe[serve]'"


@dataclass(frozen=True, kw_only=True)
class TritonInstallation:
    """One tritonserver.

    `libraries` go in front of LD_LIBRARY_PATH. `stub` is the Python backend's helper program for the
    running interpreter when the backend folder does not hold one itself; the server is then given a
    backend folder of links, and the models run in this interpreter's environment.
    """

    origin: str
    binary: Path
    backends: Path
    libraries: tuple[Path, ...] = ()
    stub: Path | None = None


def find_tritonserver(root: Path | None = None) -> TritonInstallation:
    """Find a tritonserver: under `root` when given, else in the wheel, else in /opt/tritonserver.

    Raises:
        HostError: there is none, or this Python cannot host the wheel's Python models.
    """
    if root is not None:
        return _system(root)
    try:
        wheel = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        if (SYSTEM_ROOT / "bin" / "tritonserver").exists():
            return _system(SYSTEM_ROOT)
        raise HostError(
            f"no tritonserver on this machine: neither the {DISTRIBUTION} wheel nor {SYSTEM_ROOT}.", hint=INSTALL_HINT
        ) from None
    return _from_wheel(wheel)


def environment(installation: TritonInstallation) -> dict[str, str]:
    """Return the environment of the server process.

    With the wheel, `python3` on PATH decides which site-packages the stubs use (the embedded interpreter
    finds its virtual environment that way), so this interpreter's folder comes first. PYTHONPATH and
    PYTHONHOME would replace or shadow that choice, and the user's site would add to it, so none is passed on.
    """
    env = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "PYTHONHOME"}}
    if installation.stub is not None:
        env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", os.defpath)])
        env["PYTHONNOUSERSITE"] = "1"
    libraries = [str(folder) for folder in installation.libraries]
    if inherited := env.get("LD_LIBRARY_PATH"):
        libraries.append(inherited)
    if libraries:
        env["LD_LIBRARY_PATH"] = os.pathsep.join(libraries)
    # Models write progress to the log; without this it would arrive when the stub's buffer is full.
    env["PYTHONUNBUFFERED"] = "1"
    return env


def link_backends(installation: TritonInstallation, folder: Path) -> Path:
    """Return the backend folder to start with, made of links in `folder` when the stub lies elsewhere."""
    if installation.stub is None:
        return installation.backends
    for backend in sorted(installation.backends.iterdir()):
        (folder / backend.name).mkdir(parents=True)
        for file in sorted(backend.iterdir()):
            (folder / backend.name / file.name).symlink_to(file)
    (folder / "python" / STUB).symlink_to(installation.stub)
    return folder


def _system(root: Path) -> TritonInstallation:
    binary = root / "bin" / "tritonserver"
    if not binary.is_file():
        raise HostError(f"{binary} does not exist.", hint=INSTALL_HINT)
    return TritonInstallation(origin=str(root), binary=binary, backends=root / "backends")


def _from_wheel(wheel: metadata.Distribution) -> TritonInstallation:
    site = Path(str(wheel.locate_file("")))
    server = site / "pytriton" / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = TritonInstallation(
        origin=f"{DISTRIBUTION} {wheel.version}",
        binary=server / "bin" / "tritonserver",
        backends=server / "backends",
        libraries=(site / "nvidia_pytriton.libs", _libpython_folder(version)),
        stub=server / "python_backend_stubs" / version / STUB,
    )
    for part in (found.binary, found.stub, found.backends / "python" / "libtriton_python.so", found.libraries[0]):
        if part is None or not part.exists():
            raise HostError(f"{found.origin} lacks {part}.", hint=f"Reinstall it on x86-64 Linux. {INSTALL_HINT}")
    return found


def _libpython_folder(version: str) -> Path:
    """Find the folder of this interpreter's shared library, which the stubs link against."""
    library = f"libpython{version}.so.1.0"
    folder, multiarch = (str(sysconfig.get_config_var(name) or "") for name in ("LIBDIR", "MULTIARCH"))
    candidates = [Path(sys.base_prefix) / "lib", Path(folder), Path(folder) / multiarch]
    for candidate in candidates:
        if (candidate / library).exists():
            return candidate
    raise HostError(
        f"this Python ({sys.executable}) has no {library}, which Triton's Python models need; looked in "
        f"{', '.join(sorted({str(each) for each in candidates}))}.",
        hint=f"Install a Python built with --enable-shared (Debian: apt install libpython{version}).",
    )
