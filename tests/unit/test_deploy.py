"""The files in configs/deploy name existing files and flags. No container is built."""

import configparser
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deadlines import scaled
from vllm_lite.server.config import ServeConfig
from vllm_lite.server.openai import openapi
from vllm_lite.server.router.config import RouterConfig
from vllm_lite.tools.doctor.checks import MODULES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "deploy"
DOCKERFILES = sorted(FOLDER.glob("*.Dockerfile"))
PATHS = openapi.document()["paths"]
NEEDS_NO_SERVER = {"torch", "numpy", "safetensors", "starlette", "uvicorn", "uvloop", "httptools", "prometheus-client"}
NEEDS_NO_SERVER |= {"xxhash", "pillow"}
"""Packages that pyproject.toml names and a client does not need."""


def settings(words: list[str]) -> RouterConfig:
    """Parse these words as `vllm-lite serve` does."""
    done = subprocess.run(
        [sys.executable, "-m", "vllm_lite", "serve", *words, "--print-config"],
        capture_output=True,
        text=True,
        timeout=scaled(60),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return RouterConfig.check(yaml.safe_load(done.stdout))


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("file", sorted(FOLDER.iterdir()), ids=lambda file: file.name)
def test_files_that_are_named_are_there(file: Path) -> None:
    text = file.read_text()
    assert text.startswith("# "), "a file says what it is for"
    for name in re.findall(r"configs/[\w./-]*\w", text):
        assert (ROOT / name).exists(), name
    for name in re.findall(r"^COPY (?!--from)(\S+)", text, flags=re.MULTILINE):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_images(file: Path) -> None:
    text = file.read_text()
    stages = text.split("\nFROM ")[1:]
    last = stages[-1]
    assert len(stages) == 2, "what builds is not in the image"
    assert "\nUSER 10001\n" in last
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", last, flags=re.MULTILINE)[0])
    assert entry[0] == "vllm-lite"
    for name in re.findall(r"VLLM_LITE_(\w+)=", last):
        assert name.lower() in ServeConfig.__struct_fields__
    for path in re.findall(r"127\.0\.0\.1:8000(/\w+)", re.sub("#.*", "", last)):
        assert path in PATHS
    assert ("HEALTHCHECK" in last) == (entry[1:] == ["serve"])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_images_are_linted(file: Path) -> None:
    hadolint = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:/usr/bin:/usr/local/bin")
    if hadolint is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([hadolint, str(file)], capture_output=True, text=True, timeout=scaled(60), check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_client_imports_only_packages_of_its_image() -> None:
    """The client's image has pyproject.toml's packages without those of servers and workers, and a client imports none
    of the latter."""
    project = (ROOT / "pyproject.toml").read_text()
    listed = project.split("\ndependencies = [", 1)[1].split("\n]", 1)[0]
    names = set(re.findall(r'^\s*"([\w-]+)', listed, flags=re.MULTILINE))
    assert names >= NEEDS_NO_SERVER
    text = (FOLDER / "client.Dockerfile").read_text()
    installed = text.split("--prefix /packages \\\n", 1)[1].split("\n", 1)[0].split()
    assert set(installed) == names - NEEDS_NO_SERVER
    code = f"""
import sys
for name in {sorted(MODULES.get(name, name.replace("-", "_")) for name in NEEDS_NO_SERVER)}:
    sys.modules[name] = None
from vllm_lite import AsyncClient
from vllm_lite.tools.cli import main
import vllm_lite.tools.chat.chat
main(["chat", "--url", "http://127.0.0.1:9"])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], input="", capture_output=True, text=True, timeout=scaled(60), check=False
    )
    assert "halted" not in done.stderr, done.stderr
    assert "127.0.0.1:9" in done.stdout + done.stderr


def test_compose() -> None:
    compose = load("compose.yaml")
    services = compose["services"]
    server = services["server"]
    assert (FOLDER / server["build"]["context"]).resolve() == ROOT
    assert (ROOT / server["build"]["dockerfile"]).exists()
    model, *words = server["command"]
    config = settings([re.sub(r"\$\{\w+:-(.*)\}", r"\1", model), *words])
    assert config.model == "demo"
    assert int(server["stop_grace_period"].removesuffix("s")) > config.shutdown_timeout
    for service in services.values():
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nobody else reaches it"
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith(("./", "../")):
                assert (FOLDER / source).exists()
            elif not source.startswith("${"):
                assert source in compose["volumes"]
    (scrape,) = load("prometheus.yaml")["scrape_configs"]
    assert scrape["metrics_path"] in PATHS
    assert scrape["static_configs"] == [{"targets": ["server:8000"]}]
    (provider,) = load("grafana-dashboards.yaml")["providers"]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert Path(home).parent == Path(provider["options"]["path"])
    assert any(volume.split(":")[1] == home for volume in services["grafana"]["volumes"])


def test_kubernetes() -> None:
    parts = {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())}
    pod = parts["Deployment"]["spec"]["template"]
    (server,) = pod["spec"]["containers"]
    model, *words = server["args"]
    assert model.startswith("/models/")
    key_file = next(word for word in words if word.startswith("--api-key-file="))
    mounts = {mount["mountPath"]: mount["name"] for mount in server["volumeMounts"]}
    assert str(Path(key_file.split("=")[1]).parent) in mounts
    assert set(mounts.values()) == {volume["name"] for volume in pod["spec"]["volumes"]}
    config = settings([word for word in words if word != key_file])
    assert pod["spec"]["terminationGracePeriodSeconds"] > config.shutdown_timeout
    assert config.public_metrics, "Prometheus has no key"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert server[probe]["httpGet"]["path"] in PATHS
    assert server["livenessProbe"]["httpGet"]["path"] == "/health/live", "workers that are replaced are no reason"
    labels = pod["metadata"]["labels"]
    assert parts["Service"]["spec"]["selector"] == labels
    for kind in ("Deployment", "PodDisruptionBudget", "PodMonitor"):
        assert parts[kind]["spec"]["selector"]["matchLabels"] == labels
    (endpoint,) = parts["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] in PATHS


def test_systemd() -> None:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(FOLDER / "vllm-lite.service")
    service = parser["Service"]
    assert service["ExecStart"].split()[1:3] == ["serve", "${MODEL}"]
    server = ServeConfig.load(file=ROOT / "configs" / "server.yaml", env={})
    assert int(service["TimeoutStopSec"]) > server.shutdown_timeout
