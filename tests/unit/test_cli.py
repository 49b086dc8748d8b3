"""The command line, in processes of its own: what the script sees, what is refused, and how it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from megacp import __version__
from megacp.cli import check_sizes
from megacp.errors import ConfigError

Run = Callable[..., "subprocess.CompletedProcess[str]"]

REPOSITORY = Path(__file__).resolve().parents[2]

# Stands in for the two modules that put the hooks and the CPU runtime in place, so that these tests need no
# Megatron and no torch: the command line is what is tested.
STAND_INS = """
    import sys, types

    hosts = types.ModuleType("megacp.hosts")
    hosts.install = lambda config: print("hosts:", config.layout, config.documents, flush=True)
    cpu = types.ModuleType("megacp.testing.cpu")
    cpu.install = lambda: print("cpu runtime", flush=True)
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(is_available=lambda: {gpu})
    sys.modules.update({{"megacp.hosts": hosts, "megacp.testing.cpu": cpu, "torch": torch}})
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run ``python -m megacp WORDS`` in an empty folder; give the finished process."""

    def run(
        *words: str, gpu: bool = False, program: tuple[str, ...] = ("-m", "megacp"), **env: str
    ) -> subprocess.CompletedProcess[str]:
        site = tmp_path / "site"
        site.mkdir(exist_ok=True)
        (site / "sitecustomize.py").write_text(textwrap.dedent(STAND_INS).format(gpu=gpu))
        clean = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        return subprocess.run(
            [sys.executable, *program, *words],
            cwd=tmp_path,
            env={**clean, "PYTHONPATH": os.pathsep.join([str(site), str(REPOSITORY)]), **env},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Write a script into a folder of its own, with a module beside it; give its path."""

    def script(text: str) -> str:
        folder = tmp_path / "work"
        folder.mkdir()
        (folder / "beside.py").write_text("")
        (folder / "train.py").write_text(textwrap.dedent(text))
        return "work/train.py"

    return script


TELL = """
    import sys, beside, pickle

    class Local: ...

    assert pickle.loads(pickle.dumps(Local)) is Local
    print(__name__, sys.argv, sys.path[0].rsplit("/", 1)[1], __file__)
"""


@pytest.mark.parametrize("words", [[], ["run"]], ids=["short form", "run"])
def test_a_script_runs_as_main_with_its_own_arguments_and_folder(
    run: Run, script: Callable[[str], str], words: list[str]
) -> None:
    path = script(TELL)
    done = run(*words, "--megacp-layout", "zigzag", path, "--lr", "1", "--megacp-documents=eod", "-x")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "cpu runtime",
        "hosts: zigzag eod",
        "__main__ ['work/train.py', '--lr', '1', '-x'] work work/train.py",
    ]


def test_a_module_runs_with_dash_m(run: Run, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text("import sys\nprint(__name__, __package__, sys.argv[1:])\n")
    done = run("-m", "package.train", "--lr", "1", "--megacp-report=off")
    assert done.stdout.splitlines()[-1] == "__main__ package ['--lr', '1']", done.stderr


def test_the_cpu_is_used_where_there_is_no_gpu_and_rank_0_says_so(
    run: Run, script: Callable[[str], str]
) -> None:
    path = script("")
    done = run(path, RANK="0")
    assert "cpu runtime" in done.stdout
    assert done.stderr == (
        "megacp: no CUDA device is available, so this run uses the CPU (gloo), with megacp.testing.cpu.\n"
    )
    assert run(path, RANK="1").stderr == ""
    done = run(path, gpu=True)
    assert "cpu runtime" not in done.stdout
    assert done.stderr == ""


def test_the_exit_status_of_the_script_is_ours(run: Run, script: Callable[[str], str]) -> None:
    done = run(script("raise SystemExit(7)"))
    assert (done.returncode, done.stdout.splitlines()[-1]) == (7, "hosts: auto off")


@pytest.mark.parametrize(
    ("backend", "end", "taken_down"),
    [("gloo", "", True), ("gloo", "sys.exit(0)", True), ("gloo", "sys.exit(3)", False), ("nccl", "", False)],
)
def test_process_groups_that_the_script_left_are_taken_down(
    run: Run, script: Callable[[str], str], backend: str, end: str, taken_down: bool
) -> None:
    done = run(
        script(f"""
            import sys, types

            groups = types.ModuleType("torch.distributed")
            groups.is_available = groups.is_initialized = lambda: True
            groups.get_backend = lambda: "{backend}"
            groups.destroy_process_group = lambda: print("taken down")
            sys.modules["torch.distributed"] = groups
            {end}
        """)
    )
    assert ("taken down" in done.stdout) == taken_down, done.stdout + done.stderr


def test_an_error_of_the_script_keeps_its_traceback(run: Run, script: Callable[[str], str]) -> None:
    done = run(script("def step():\n    return 1 / 0\nstep()\n"))
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert 'train.py", line 2, in step' in done.stderr


REFUSE = "from megacp.errors import UnsupportedError\nraise UnsupportedError('megacp: no.\\nDo that.')\n"


def test_a_refusal_is_one_message_without_traceback(run: Run, script: Callable[[str], str]) -> None:
    done = run(script(REFUSE), gpu=True, RANK="3")
    assert done.returncode == 1
    assert done.stderr == "megacp [rank 3]: no.\nDo that.\n"


def test_the_traceback_of_a_refusal_is_shown_on_request(run: Run, script: Callable[[str], str]) -> None:
    done = run(script(REFUSE), gpu=True, MEGACP_TRACEBACK="1")
    assert 'train.py", line 2' in done.stderr
    assert done.stderr.endswith("megacp [rank 0]: no.\nDo that.\n")


def test_a_refusal_ends_the_process_although_a_thread_still_runs(
    run: Run, script: Callable[[str], str]
) -> None:
    thread = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\n"
    done = run(script(thread + "print('buffered')\n" + REFUSE), gpu=True)
    assert done.returncode == 1
    assert "buffered" in done.stdout
    assert done.stderr.startswith("megacp [rank 0]: no.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gone.py", "--lr", "1"], "the script 'gone.py' does not exist"),
        (["run", "gone.py"], "the script 'gone.py' does not exist"),
        (["run"], "no script is given"),
        (["-m"], "-m needs the name of a module"),
        (["--lr", "1", "train.py"], "--lr stands before the script"),
        (["train"], "'train' is neither a command nor a script"),
        (["--megacp-kernl=x", "train.py"], "Did you mean --megacp-kernel?"),
        (["--megacp-layout=ring", "train.py"], "--megacp-layout is 'ring'"),
    ],
)
def test_a_faulty_command_line_is_refused_in_one_message(run: Run, words: list[str], message: str) -> None:
    done = run(*words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("megacp [rank 0]: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_are_refused_before_anything_is_hooked(run: Run, script: Callable[[str], str]) -> None:
    path = script("print('ran')")
    done = run(path, "--context-parallel-size", "3", WORLD_SIZE="4")
    assert (done.returncode, done.stdout) == (1, "")
    assert "--context-parallel-size is 3, and the world has 4 ranks" in done.stderr
    assert run(path, "--context-parallel-size=2", WORLD_SIZE="4").stdout.endswith("ran\n")


@pytest.mark.parametrize("value", ["0", "-2", "two", "1.5", ""])
def test_a_context_parallel_size_that_is_no_positive_integer_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=f"--context-parallel-size is '{value}'.*integer, 1 or more"):
        check_sizes([f"--context-parallel-size={value}"], None)


def test_ranks_that_cannot_be_divided_are_refused_with_the_sizes_that_fit() -> None:
    words = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size=2"]
    words += ["--context-parallel-size", "4"]
    check_sizes(words, "16")
    check_sizes(words, None)
    with pytest.raises(ConfigError) as caught:
        check_sizes(words, "24")
    text = str(caught.value)
    assert (
        "--tensor-model-parallel-size 2 x --pipeline-model-parallel-size 2 x --context-parallel-size 4"
        in text
    )
    assert "= 16" in text
    assert "With 24 ranks and these other sizes, --context-parallel-size can be 1, 2, 3, 6." in text
    with pytest.raises(ConfigError, match="no --context-parallel-size fits 6 ranks"):
        check_sizes(words, "6")


def test_sizes_that_only_the_host_can_judge_are_left_to_it() -> None:
    check_sizes(["--tensor-model-parallel-size", "3"], "4")  # no context parallelism asked for
    check_sizes(["--context-parallel-size", "2", "--tensor-model-parallel-size", "x"], "4")


def test_help_names_the_commands_and_the_flags(run: Run) -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "run a training script with context parallelism" in done.stdout
    assert run().stdout == done.stdout
    flags = run("run", "--help")
    assert "--megacp-documents {off,eod,positions,cu_seqlens}" in flags.stdout
    assert "--cp-comm-type" in flags.stdout
    assert "hosts:" not in flags.stdout


def test_help_behind_the_script_is_the_scripts_own(run: Run, script: Callable[[str], str]) -> None:
    assert "['work/train.py', '--help']" in run(script(TELL), "--help").stdout


def test_version_is_printed(run: Run) -> None:
    assert run("--version").stdout == f"megacp {__version__}\n"
