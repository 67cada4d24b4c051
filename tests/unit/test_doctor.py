"""`vllm-lite doctor`: each line when something is wrong, a report when much is, and an archive without secrets."""

import json
import os
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deadlines import scaled
from tests.fake_sys import make_sys
from tests.unit.test_import_time import loaded_by
from vllm_lite.config import demo_folder
from vllm_lite.errors import ConfigError, ModelError, VllmLiteError
from vllm_lite.runtime import cpu_binding, machine
from vllm_lite.runtime.cpu_binding import read_topology
from vllm_lite.tools import plan_checkpoint
from vllm_lite.tools.cli import main
from vllm_lite.tools.doctor import checks
from vllm_lite.tools.doctor.bundle import HIDDEN, Redactor, write_bundle
from vllm_lite.tools.doctor.checks import Line
from vllm_lite.tools.doctor.model import chats, implementation

TOKEN = "hf_planted0secret1token"
KEYS = "planted-api-key-one planted-api-key-two"


def lines_of(check: Callable[[], Iterator[Line]]) -> list[Line]:
    return list(checks.guarded("it", check))


def run(env: dict[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "vllm_lite", "doctor", *words]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=scaled(100), check=False
    )


def answering(monkeypatch: pytest.MonkeyPatch, **answer: Any) -> None:
    monkeypatch.setattr(checks, "probe", lambda *_: answer)


def test_nothing_but_the_standard_library_is_needed_to_start() -> None:
    strangers = {name for name in loaded_by("import vllm_lite.tools.cli.doctor") if name not in sys.stdlib_module_names}
    assert strangers - loaded_by("pass") == {"vllm_lite"}


def test_this_machine() -> None:
    """The installation that runs the tests passes its own checks."""
    installed = lines_of(checks.packages)
    lines = installed + lines_of(checks.python) + lines_of(checks.torch_build)
    assert {line.level for line in lines} <= {"OK", "WARN"}, lines
    names = [line.name for line in installed]
    assert {"vllm-lite", "torch", "msgspec", "transformers"} <= set(names)
    assert "pytest" not in names
    (kernels,) = checks.native_kernels()
    assert kernels.text.startswith("ABI ")


def test_much_is_broken_and_a_report_is_made_without_secrets(tmp_path: Path) -> None:
    """torch and msgspec cannot be imported, a setting is wrong, a home and four secrets are planted."""
    for name in ("torch", "msgspec"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('no {name} today, in {tmp_path}/x')")
    home = tmp_path / "home" / "somebody"
    (home / ".cache" / "huggingface").mkdir(parents=True)
    (home / ".cache" / "huggingface" / "token").write_text("planted-token-of-a-file\n")
    planted = {"HF_TOKEN": TOKEN, "VLLM_LITE_API_KEY": KEYS, "https_proxy": "http://me:planted-pw@proxy:1"}
    planted |= {
        "AWS_SECRET_ACCESS_KEY": 'planted"aws',
        "CUDA_VISIBLE_DEVICES": "0",
        "HF_HOME": f"{home}/.cache/huggingface",
    }
    bundle = tmp_path / "b.tar.gz"
    env = {**planted, "HOME": str(home), "PYTHONPATH": str(tmp_path), "TORCH_HOME": f"{home}/planted-aws"}
    done = run(env, "--json", "--bundle", str(bundle))
    assert done.returncode == 1
    report = {f"{line['name']}: {line['text']}" for line in json.loads(done.stdout)}
    assert any(line.startswith("torch: cannot be imported: ImportError: no torch today") for line in report)
    assert any(line.startswith("msgspec: cannot be imported: ImportError: no msgspec today") for line in report)
    assert any(line.startswith("settings: cannot be looked at: ImportError") for line in report)
    assert any(line.startswith("cpu: ") for line in report)
    assert bundle.stat().st_mode & 0o777 == 0o600
    with tarfile.open(bundle) as archive:
        texts = {entry.name: archive.extractfile(entry).read().decode() for entry in archive}  # type: ignore[union-attr]
    found = json.loads(texts["vllm-lite-doctor/environment.json"])
    assert found["HF_TOKEN"] == found["VLLM_LITE_API_KEY"] == HIDDEN
    assert found["https_proxy"] == f"http://{HIDDEN}@proxy:1"
    assert found["CUDA_VISIBLE_DEVICES"] == "0"
    assert found["HF_HOME"] == "~/.cache/huggingface"
    assert "AWS_SECRET_ACCESS_KEY" not in found
    assert json.loads(texts["vllm-lite-doctor/doctor.json"])
    assert "torch==" in texts["vllm-lite-doctor/packages.txt"]
    everything = "".join(texts.values()) + done.stdout
    for secret in (TOKEN, *KEYS.split(), "planted-pw", "planted-token-of-a-file", 'planted\\"aws'):
        assert secret not in everything, secret
    assert str(home) not in "".join(texts.values())


def test_secrets_anywhere_are_taken_out(tmp_path: Path) -> None:
    env = {"MY_API_KEY": "abcd-1234,efgh-5678", "USE_AUTH": "true", "PIN_TOKEN": "ab", "KEY_FILE": "/etc/key"}
    hide = Redactor(env, tmp_path)
    text = f"abcd-1234 efgh-5678 true ab /etc/key {tmp_path}/x sk-abcdefgh1 Bearer xyz https://u:p@host/ hf_abcdefgh"
    assert hide(text) == (
        f"{HIDDEN} {HIDDEN} true ab /etc/key ~/x {HIDDEN} Bearer {HIDDEN} https://{HIDDEN}@host/ {HIDDEN}"
    )
    quoted = Redactor({"KEY": 'a"quoted"key'}, tmp_path)
    assert quoted(json.dumps({"x": 'a"quoted"key'})) == json.dumps({"x": HIDDEN})
    assert hide.variables({**env, "HF_TOKEN": "x", "LD_PRELOAD": "a.so"}) == {"HF_TOKEN": HIDDEN, "LD_PRELOAD": "a.so"}


def test_an_archive_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(OSError, match="No such file"):
        write_bundle(tmp_path / "no" / "b.tar.gz", [])
    assert tmp_path.exists()


def test_the_exit_status_and_the_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fine, bad = Line("OK", "a", "b"), Line("FAIL", "c", "d", "do e")
    monkeypatch.setattr("vllm_lite.tools.cli.doctor.examine", lambda _: [fine])
    assert main(["doctor"]) == 0
    assert "1 OK, 0 to look at, 0 that do not work" in capsys.readouterr().out
    assert main(["doctor", "demo"]) == 0
    assert "LlamaForCausalLM: native, 2.8M parameters" in capsys.readouterr().out
    monkeypatch.setattr("vllm_lite.tools.cli.doctor.examine", lambda _: [fine, bad])
    assert main(["doctor", "--bundle", "/no/such/folder/b.tar.gz"]) == 2
    printed = capsys.readouterr()
    assert "FAIL  c" in printed.out
    assert "do e" in printed.out
    assert "the archive '/no/such/folder/b.tar.gz' cannot be written: No such file" in printed.err


def test_every_check_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, error="nothing works")
    report = checks.examine(0)
    names = {line.name for line in report}
    assert {"python", "torch", "native kernels", "cpu", "cores", "memory", "gpu", "port", "open files"} <= names
    assert {"shared memory", "TMPDIR", "model hub", "settings", "instances"} <= names


def test_a_check_that_fails_is_a_line() -> None:
    def check() -> Iterator[Line]:
        yield Line("OK", "a", "b")
        raise ImportError("no b")

    assert [line.level for line in lines_of(check)] == ["OK", "FAIL"]
    assert "ImportError: no b" in lines_of(check)[1].text


def test_packages_that_are_missing_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    required = ["msgspec>=0.19", "zzz>=2", "numpy>=999.1", 'transformers>=99; extra == "hf"', 'xx>=1; extra == "x"']
    monkeypatch.setattr(
        "importlib.metadata.requires", lambda _: [*required, 'xx>=1; extra == "y"', 'pytest>=1; extra == "test"']
    )
    monkeypatch.setattr(checks, "probe", lambda _, *names: {"msgspec": "ImportError: bad"} if names else {})
    lines = list(checks.packages())
    found = {(line.level, line.name): line for line in lines}
    assert len(found) == len(lines), "one line for a package of several extras"
    assert found["FAIL", "zzz"].advice == "pip install 'zzz>=2'"
    assert found["FAIL", "numpy"].text.endswith("at least 999.1 is needed")
    assert ("FAIL", "transformers") in found
    assert found["OK", "xx"].text == "not installed (optional: vllm-lite[x], vllm-lite[y])"
    assert found["FAIL", "msgspec"].text == "cannot be imported: ImportError: bad"
    assert not any(name == "pytest" for _, name in found)


def test_the_end_of_a_probe_is_reported() -> None:
    assert checks.probe("import os; os.kill(os.getpid(), 11)") == {"error": "killed by signal 11"}
    assert checks.probe("import sys; print('x'); sys.exit(3)") == {"error": "exit status 3"}
    assert checks.probe("raise OSError('gone')") == {"error": "OSError: gone"}
    assert checks.probe("import sys; print(1); print('{\"a\": 1}')") == {"a": 1}


def test_kernels_that_are_missing_or_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch, error="OSError: the library was not built")
    (line,) = checks.native_kernels()
    assert (line.level, line.text) == ("WARN", "OSError: the library was not built")
    assert "C++ compiler" in line.advice
    answering(monkeypatch, abi=5, isa="avx2")
    monkeypatch.setenv("VLLM_LITE_ISA", "avx2")
    (line,) = checks.native_kernels()
    assert line.level == "WARN"
    assert "VLLM_LITE_ISA is avx2" in line.text


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "has_driver", lambda: True)
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H200", 141 * 2**30, "580.1")])
    monkeypatch.setattr(machine, "lacks_for_cuda", lambda: "the package cupy is not installed")
    seen, lacking = checks.gpu()
    assert seen.text == "H200, 141.0 GiB, driver 580.1"
    assert (lacking.level, lacking.text) == ("WARN", "is not used: the package cupy is not installed")
    monkeypatch.setattr(machine, "lacks_for_cuda", lambda: None)
    answering(monkeypatch, error="nvrtc: no")
    assert [line.level for line in checks.gpu()] == ["OK", "FAIL"]
    answering(monkeypatch, cupy="14.0", nvrtc="13.0", ran=1, runtime=13000)
    assert [line.level for line in checks.gpu()] == ["OK", "OK"]


def test_links_between_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, Any] = {"version": "2.13", "cuda": "13.0", "names": ["H200"] * 2, "threads": 1}
    answering(monkeypatch, **found, peers=[], nccl=[2, 27, 3])
    lines = list(checks.torch_build())
    assert [line.level for line in lines] == ["OK"] * 5
    assert [(line.name, line.text) for line in lines[3:]] == [
        ("peer access", "between all 2 GPUs"),
        ("nccl", "2.27.3"),
    ]
    answering(monkeypatch, **found, peers=[[0, 1], [1, 0]], nccl=[])
    peers, nccl = list(checks.torch_build())[3:]
    assert (peers.level, peers.text) == ("WARN", "not between GPUs 0-1, 1-0")
    assert nccl.level == "WARN"
    assert nccl.advice.endswith("--tensor-parallel-backend gloo works without, much slower")
    answering(monkeypatch, **found | {"names": ["H200"]}, peers=[], nccl=[])
    assert len(list(checks.torch_build())) == 2, "one GPU is alone"


@pytest.mark.parametrize(
    ("nodes", "threads", "cpu_max", "text"),
    [
        (
            [4, 4],
            2,
            None,
            "2 NUMA nodes; workers of -tp 2 get 0: 4 threads on CPUs 0-3 of node 0; 1: 4 threads on CPUs 4-7 of node 1",
        ),
        ([2], 1, None, "1 NUMA node; workers of -tp 2 get 0: 1 thread on CPUs 0; 1: 1 thread on CPUs 1"),
        ([1], 1, None, "1 NUMA node; workers of -tp 2 get 1 thread, not bound: too few cores"),
        (
            [8],
            1,
            "400000 100000",
            "1 NUMA node; workers of -tp 2 get 2 threads, not bound: the container may use 4 CPUs",
        ),
    ],
)
def test_nodes_and_the_workers_shares_of_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nodes: list[int], threads: int, cpu_max: str | None, text: str
) -> None:
    topology = read_topology(make_sys(tmp_path, nodes, threads, cpu_max), range(sum(nodes) * threads))
    monkeypatch.setattr(cpu_binding, "read_topology", lambda: topology)
    (line,) = checks.cores()
    assert (line.level, line.text) == ("OK", text)


def test_memory_that_ranks_share(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(64 << 20))
    assert [line.level for line in checks.shared_memory()] == ["OK"], "nothing needs /dev/shm"
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H200", 141 * 2**30, "580.1")] * 2)
    (line,) = checks.shared_memory()
    assert (line.level, line.advice) == ("WARN", "give a container --shm-size 1g, or --ipc host")

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    *_, line = checks.shared_memory()
    assert (line.level, line.text) == ("WARN", "workers cannot share memory (memfd_create: Operation not permitted)")


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        (line,) = checks.ports(port)
        assert line.level == "WARN"
        assert f"{port} cannot be listened on" in line.text
    (line,) = checks.ports(0)
    assert line.level == "OK"


def test_limits_that_are_low(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 1024))
    (line,) = checks.open_files()
    assert (line.level, line.text) == ("WARN", "up to 1024")
    assert line.advice.startswith("ulimit -Hn 65536 ")
    usage = namedtuple("usage", "free")  # noqa: PYI024
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1 << 20))
    assert [line.level for line in checks.temporary_files()] == ["WARN"]
    monkeypatch.setattr(machine, "memory_limit_bytes", lambda: 1 << 30)
    assert [line.level for line in checks.memory()] == ["WARN"]
    monkeypatch.setattr(machine, "num_physical_cores", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    (line,) = checks.cpu()
    assert "OMP_NUM_THREADS is 2" in line.text
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    (line,) = checks.temporary_files()
    assert (line.level, line.advice) == ("FAIL", "set TMPDIR to a shorter folder")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    assert [line.level for line in lines_of(checks.temporary_files)] == ["FAIL"]


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LITE_MAX_MODEL_LENS", "5")
    monkeypatch.setenv("VLLM_LITE_DTYPE", "float8")
    typo, wrong = checks.settings()
    assert (typo.level, typo.text) == (
        "WARN",
        "VLLM_LITE_MAX_MODEL_LENS is not read; did you mean VLLM_LITE_MAX_MODEL_LEN?",
    )
    assert wrong.level == "FAIL"
    assert wrong.text.startswith("dtype: must be one of auto, float32")


def test_a_model_is_asked_for_its_template_and_formats(tmp_path: Path) -> None:
    demo = Path(demo_folder())
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    (line, *others, _, ends, defaults) = chats(str(tmp_path))
    assert (ends.level, ends.name) == ("OK", "end tokens")
    assert (defaults.name, defaults.text) == ("sampling defaults", "none (vllm)")
    assert (line.level, line.name) == ("WARN", "chat template")
    assert ["no format is known" in other.text for other in others] == [True, True]
    template = "{{ messages }}<think></think><tool_call>{{ 1 }}</tool_call>"
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    (line, calls, reasoning, why, _, defaults) = chats(str(tmp_path))
    assert defaults.text == f"temperature 0.6 ({tmp_path / 'generation_config.json'})"
    assert line.text == str(tmp_path / "chat_template.jinja")
    assert (calls.text, reasoning.text) == ("hermes", "qwen3")
    assert why.text == "calls: the chat template has its literals; reasoning: the chat template has its literals"
    (tmp_path / "tokenizer.json").write_text("{")
    assert [line.level for line in chats(str(tmp_path))] == ["FAIL"]
    assert not list(chats(str(tmp_path / "x"))), "another line says that it is not there"


@pytest.mark.parametrize(
    ("architecture", "made"), [("BertModel", "vectors"), ("BertForSequenceClassification", "scores")]
)
def test_an_encoder_is_not_asked_for_a_template(tmp_path: Path, architecture: str, made: str) -> None:
    config = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config |= {"intermediate_size": 64, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [architecture], "model_type": "bert", **config}))
    (line,) = chats(str(tmp_path))
    assert (line.level, line.name, line.text) == ("OK", "chats", f"none: the model makes {made}, and no text")


def test_the_implementation_of_a_model_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def line() -> tuple[str, str]:
        (found,) = implementation(str(tmp_path))
        assert found.name == "model"
        return found.level, found.text

    path = tmp_path / "config.json"
    path.write_bytes(Path(demo_folder(), "config.json").read_bytes())
    assert line() == ("OK", "LlamaForCausalLM: native, 2.8M parameters")
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm"}))
    asked: list[Path] = []

    def examined(error: VllmLiteError | None) -> None:
        def check(_: object, folder: Path) -> None:
            asked.append(folder)
            if error is not None:
                raise error

        monkeypatch.setattr(plan_checkpoint, "check_implementation", check)

    examined(None)
    assert line() == ("OK", "StableLmForCausalLM: transformers, 2.8M parameters")
    examined(ConfigError("this model needs transformers 5"))
    assert line() == ("FAIL", "StableLmForCausalLM: this model needs transformers 5")
    examined(ModelError("layer 0 attends 2 times in a step"))
    assert line() == ("FAIL", "StableLmForCausalLM: layer 0 attends 2 times in a step")
    assert asked == [tmp_path] * 3
    path.write_text("{}")
    level, text = line()
    assert (level, "architectures None" in text) == ("FAIL", True)
    path.unlink()
    tmp_path.rmdir()
    assert line() == ("FAIL", f"{tmp_path}: no such folder; a checkpoint folder with a config.json is expected")
