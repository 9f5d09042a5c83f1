"""Launching workers: numbered output, the first failure named, restarts, signals, no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfmultigpu import __main__ as command_line
from tfmultigpu.addons.workers import launcher as launch_module
from tfmultigpu.addons.workers.launcher import launch

Write = Callable[[str], str]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a script that knows its worker as `me`, and returns its path."""

    def write(body: str) -> str:
        script = tmp_path / "train.py"
        start = (
            "import json, os, signal, socket, sys, time\n"
            "config = json.loads(os.environ.get('TF_CONFIG', '{}'))\n"
            "me = config.get('task', {}).get('index', 0)\n"
            "def join(): open(os.environ['TFMULTIGPU_JOINED'], 'w').close()  # As when joined.\n"
            "def serve():  # Listens for the others, as TensorFlow's own strategy does.\n"
            "    host, port = config['cluster']['worker'][me].split(':')\n"
            "    with socket.create_server((host, int(port))): time.sleep(1)\n"
            "def ready():\n"
            "    with open(sys.argv[1], 'a') as file: file.write(f'{os.getpid()}\\n')\n"
        )
        script.write_text(start + textwrap.dedent(body))
        return str(script)

    return write


@pytest.fixture
def run(write: Write, capfd: pytest.CaptureFixture[str]) -> Run:
    """Launches a script; returns the exit code, its output, and what the launcher says."""

    def run(body: str, *arguments: Any, **options: Any) -> Any:
        code = launch(write(body), [*map(str, arguments)], **options)
        return (code, *capfd.readouterr())

    return run


def test_workers_get_a_cluster_and_their_output_a_number(run: Run) -> None:
    script = """
        print(json.dumps(config), *sys.argv[1:])
        print("to stderr", file=sys.stderr)
        serve()
        print("no end of line", end="")
        """
    code, out, err = run(script, "--rate", "0.1", workers=3)
    assert (code, err) == (0, "")
    clusters = set()
    for worker in range(3):
        own = [line[4:] for line in out.splitlines() if line.startswith(f"[{worker}] ")]
        assert own[1:] == ["to stderr", "no end of line"]
        config, _, arguments = own[0].rpartition("} ")
        assert arguments == "--rate 0.1"
        config = json.loads(config + "}")
        assert config["task"] == {"type": "worker", "index": worker}
        clusters.add(json.dumps(config["cluster"]))
    (cluster,) = clusters
    assert len(set(json.loads(cluster)["worker"])) == 3
    assert cluster.count("127.0.0.1:") == 3


def test_a_module_and_a_single_worker(
    write: Write, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(write("print(__name__, config, os.environ['TFMULTIGPU_ATTEMPT'])")).parent
    monkeypatch.chdir(folder)
    # Whatever cluster the launcher itself is in, its workers are not.
    monkeypatch.setenv("TF_CONFIG", "old")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    assert command_line.main(["launch", "--workers", "1", "-m", "train"]) == 0
    assert capfd.readouterr().out == "[0] __main__ {} 0\n"


def test_the_first_to_fail_is_named_and_gives_the_exit_code(run: Run) -> None:
    script = """
        if me == 1:
            for line in range(30): print("line", line)
            sys.exit(7)
        time.sleep(600)
        """
    code, _, err = run(script, grace=0.5, workers=2)
    assert code == 7
    assert err.startswith(
        "[launch] Worker 1 of 2 ended with code 7, the first to fail; all others were stopped. Its "
        "output ends with:\n  line 25\n"
    )
    assert err.endswith("\n  line 29\n")


def test_a_worker_that_had_ended_is_not_said_to_be_stopped(run: Run) -> None:
    code, _, err = run("sys.exit(3 * me)", workers=2)
    assert code == 3
    assert "the first to fail; worker 0 had nothing left to do and ended with code 0." in err


def test_all_are_started_again_on_new_ports(run: Run, tmp_path: Path) -> None:
    script = """
        attempt = int(os.environ["TFMULTIGPU_ATTEMPT"])
        print("attempt", attempt, config["cluster"]["worker"][0], flush=True)
        open(f"{sys.argv[1]}/{attempt}-{me}", "w").close()
        other = f"{sys.argv[1]}/{attempt}-{1 - me}"
        if attempt < 2 and me == attempt:
            while not os.path.exists(other): time.sleep(0.01)
            sys.exit(3)
        if attempt < 2: time.sleep(600)
        join()
        """
    code, out, err = run(script, tmp_path, grace=0.1, workers=2, restarts=5)
    assert code == 0
    first = [line.split() for line in out.splitlines() if line.startswith("[0]")]
    assert [words[2] for words in first] == ["0", "1", "2"]
    assert len({words[3] for words in first}) == 3
    said = [
        "Worker 0 of 2 ended with code 3",
        "Starting all workers again: restart 1 of 5.",
        "Worker 1 of 2 ended with code 3",
        "restart 2 of 5",
    ]
    assert sorted(said, key=err.find) == said
    assert all(text in err for text in said)
    assert "restart 3" not in err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"workers": 0}, r"workers must be a whole number, at least 1\. Received: workers=0"),
        ({"restarts": -1}, r"restarts must be a whole number, at least 0\. Received: restarts=-1"),
    ],
    ids=str,
)
def test_arguments_that_make_no_sense(write: Write, arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        launch(**{"script": write(""), **arguments})


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes an `nvidia-smi` that lists so many GPUs, one of them in parts."""

    def make(gpus: int) -> None:
        lines = [f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})" for i in range(gpus)]
        lines.append("  MIG 1g.10gb Device 0: (UUID: MIG-1)")
        program = tmp_path / "nvidia-smi"
        program.write_text("#!/bin/sh\necho '" + "\n".join(lines) + "'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return make


@pytest.mark.parametrize(
    ("gpus", "shown", "expected"),
    [
        (0, None, [None, None]),
        (5, None, ["0,1", "2,3"]),
        (8, "5,3", ["5", "3"]),
        (8, "GPU-8f,GPU-9a,-1,7", ["GPU-8f", "GPU-9a"]),
        (8, "", [None, None]),
        (8, "-1", [None, None]),
    ],
    ids=str,
)
def test_no_two_workers_see_the_same_gpu(
    monkeypatch: pytest.MonkeyPatch,
    nvidia_smi: Callable[[int], None],
    gpus: int,
    shown: str | None,
    expected: list[str | None],
) -> None:
    nvidia_smi(gpus)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    own = launch_module._gpus_of_workers(2)
    assert [one.get("CUDA_VISIBLE_DEVICES") for one in own] == expected


def when(path: Path, lines: int, then: Callable[[], None]) -> threading.Thread:
    """Does something once a file has so many lines."""

    def wait() -> None:
        deadline = time.monotonic() + 300
        while not path.exists() or len(path.read_text().split()) < lines:
            if time.monotonic() > deadline:
                break
            time.sleep(0.02)
        then()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_signals_are_passed_on_and_nothing_is_restarted(
    run: Run, tmp_path: Path, number: signal.Signals
) -> None:
    expected = 0 if number == signal.SIGUSR1 else 128 + number
    before = signal.getsignal(number)
    place = tmp_path / "ready"
    thread = when(place, 2, lambda: os.kill(os.getpid(), number))
    script = f"""
        def stop(received, frame):
            print("got", signal.Signals(received).name)
            sys.exit({expected})
        signal.signal({number}, stop)
        ready()
        time.sleep(600)
        """
    code, out, err = run(script, place, workers=2, restarts=3)
    thread.join()
    assert signal.getsignal(number) is before
    assert code == expected
    assert sorted(out.split("\n")) == ["", f"[0] got {number.name}", f"[1] got {number.name}"]
    assert err == f"[launch] Interrupted: {number.name} was passed on to all workers.\n"


def test_workers_end_when_nobody_reads_what_they_print(write: Write) -> None:
    script = write("while True: print('x' * 1000)")
    command = [sys.executable, "-m", "tfmultigpu", "launch", "--restarts", "3", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert launcher.stdout.readline().startswith(b"[")
        launcher.stdout.close()
        said = launcher.stderr.read().decode()
        assert launcher.wait(300) == 128 + signal.SIGTERM
    assert (
        "The output of the workers cannot be passed on ([Errno 32] Broken pipe): all must end."
        in said
    )
    assert "restart" not in said


def test_a_line_without_an_end_is_passed_on_in_pieces(run: Run) -> None:
    code, out, err = run("sys.stdout.write('x' * 1_000_000); sys.exit(3)", workers=1)
    assert code == 3
    pieces = [line.removeprefix("[0] ") for line in out.splitlines()]
    assert [len(piece) for piece in pieces[:-1]] == [1 << 16] * (len(pieces) - 1)
    assert "".join(pieces) == "x" * 1_000_000
    assert "ended with code 3, the first to fail" in err


def test_workers_that_do_not_listen_to_a_signal_are_stopped(run: Run, tmp_path: Path) -> None:
    place = tmp_path / "ready"
    thread = when(place, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    script = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready(); time.sleep(600)"
    code, _, err = run(script, place, workers=2, signal_grace=0.3)
    thread.join()
    assert code == 128 + signal.SIGTERM
    assert "; stopped by force: worker 0, 1." in err
    assert not any(Path(f"/proc/{pid}").exists() for pid in place.read_text().split())


def state_of(pid: str) -> str:
    """Returns the state of a process in /proc; Z, that of one that has ended, if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_no_worker_and_no_child_of_one_is_left(run: Run, tmp_path: Path) -> None:
    script = """
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        with open(sys.argv[1], "a") as file: file.write(f"{os.getpid()}\\n{child.pid}\\n")
        while me == 0 or len(open(sys.argv[1]).read().split()) < 4: time.sleep(0.05)
        sys.exit(1)
        """
    place = tmp_path / "ready"
    code, _, _ = run(script, place, grace=0.1, workers=2)
    assert code == 1
    deadline = time.monotonic() + 60
    pids = place.read_text().split()
    while any(state_of(pid) != "Z" for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_launcher_itself_needs_no_tensorflow(write: Write) -> None:
    script = write("")
    code = (
        "import sys; from tfmultigpu.__main__ import main; "
        f"assert main(['launch', '--workers', '1', {script!r}]) == 0; "
        "assert 'tensorflow' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
