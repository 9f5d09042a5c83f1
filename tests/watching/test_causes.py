"""Each cause of a wait in one process is named, by the log, the file and the doctor."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from one_device import strategy_of
from problems import network
from watching.hangs import LIMIT, SECONDS, hearing, report_in, when_heard

import tfmultigpu as tmg
from tfmultigpu.__main__ import main
from tfmultigpu.addons.watching.causes import clue_of
from tfmultigpu.addons.watching.watcher import watcher
from tfmultigpu.errors import CheckpointError
from tfmultigpu.recorder import MOST, noting, recorder

BATCH = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")


@pytest.fixture(scope="module")
def trained() -> Any:
    """A compiled model on two replicas, and a step of it that is traced."""
    strategy = strategy_of(2)
    with strategy.scope():
        model = network(2, keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    step = tmg.make_train_step(model, model.optimizer, "mse", strategy, verify=False)
    data = tmg.distribute_dataset(tf.data.Dataset.from_tensors(BATCH).repeat(3), strategy)
    for batch in data:
        step(batch)
    return model, strategy, step, data


@pytest.fixture(autouse=True)
def no_watch_is_left() -> Iterator[None]:
    yield
    assert watcher.watches == []
    assert not recorder.is_on


def waiting(wait: Callable[[], None], at: int = 2) -> Callable[[], Iterator[Any]]:
    """Returns data of three batches, one of which waits."""

    def batches() -> Iterator[Any]:
        for number in range(3):
            if number == at:
                wait()
            yield BATCH

    return batches


# Fails if a generator that blocks is not named, or its batch, or if the training does not continue.
def test_a_generator_that_blocks(trained: Any, tmp_path: Path, capsys: Any) -> None:
    _, strategy, step, _ = trained
    words = "The generator of the data has not yielded, at hangs.py"
    with hearing(words) as said:
        data = tmg.distribute_dataset(waiting(said.wait), strategy)
        with tmg.watch(SECONDS, tmp_path):
            steps = [float(step(batch)["loss"]) for batch in data]
    assert len(steps) == 3
    assert "The process waits for batch 3 of the pass for" in said.said()
    assert f"doctor --watch {tmp_path}" in said.said()
    report = report_in(tmp_path)
    assert (report["phase"], report["number"]) == ("next batch", 3)
    assert report["done"] == {"what": "TrainStep", "number": step.runner._done - 1}
    assert 3 < len(report["calls"]) <= MOST
    assert report["calls"][-2]["shapes"] == ["(2, 2)", "(2, 1)"]
    assert report["calls"][-2]["took"] > 0
    named = [frame["function"] for thread in report["threads"] for frame in thread["frames"]]
    assert {"wait", "batches", "test_a_generator_that_blocks"} <= set(named)
    assert main(["doctor", "--watch", str(tmp_path)]) == 0
    assert words in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("loop", ["tmg", "Keras"])
# Fails if a watch as a callback does not see what fit waits for, or does not end with it.
def test_in_fit(trained: Any, tmp_path: Path, loop: str) -> None:
    model = trained[0]
    if loop == "Keras":
        model = network(2, keras.layers.Dense(1))
        model.compile(keras.optimizers.SGD(0.01), "mse")
    with hearing("The generator of the data has not yielded") as said:
        watch = tmg.watch(SECONDS, tmp_path)
        if loop == "tmg":
            history = tmg.fit(model, waiting(said.wait), callbacks=[watch], verbose=0)
        else:
            spec = (tf.TensorSpec([4, 2]), tf.TensorSpec([4, 1]))
            data = tf.data.Dataset.from_generator(waiting(said.wait), output_signature=spec)
            history = model.fit(data, callbacks=[watch], shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 1
    assert report_in(tmp_path)["clue"][0] == "generator"
    assert not recorder.innermost


class Data(keras.utils.PyDataset):  # type: ignore[misc]
    """Batches of which one hangs, in a thread of Keras."""

    def __init__(self, wait: Callable[[], None], workers: int) -> None:
        super().__init__(workers=workers)
        self.wait = wait

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> Any:
        if number == 2:
            self.wait()
        return BATCH


# Fails if a PyDataset that blocks is not named, in threads of its own or in that of tf.data.
@pytest.mark.parametrize("workers", [1, 2])
def test_a_py_dataset_that_blocks(trained: Any, tmp_path: Path, workers: int) -> None:
    words = "__getitem__ of the PyDataset has not returned, at hangs.py"
    with hearing(words) as said:
        watch = tmg.watch(SECONDS, tmp_path)
        tmg.fit(trained[0], Data(said.wait, workers), callbacks=[watch], verbose=0)
    assert "in wait" in said.said()


# Fails if a worker process of a PyDataset is not named, whose stack nobody sees.
def test_a_process_of_a_py_dataset() -> None:
    waits = {"file": "/keras/src/trainers/data_adapters/py_dataset_adapter.py", "own": False}
    frames = [{**waits, "function": "get", "code": "value.get()", "line": 9}]
    main = [{**frames[0], "file": "/data/ops/iterator_ops.py", "function": "__next__"}]
    threads = [{"id": 1, "frames": main}, {"id": 2, "frames": frames}]
    state = {"phase": "next batch", "thread": 1, "first": False, "last": None, "what": ""}
    kind, text = clue_of(state, [{"name": "", "main": False, **each} for each in threads])
    assert kind == "generator"
    assert "a worker process of the PyDataset" in text


# Fails if what a disk holds up is not named, with the file and the room on the disk.
def test_a_save_that_blocks(trained: Any, tmp_path: Path) -> None:
    model, *_ = trained
    folder, pipe = tmp_path / "run", tmp_path / "run" / ".half-written.npz"
    folder.mkdir()
    os.mkfifo(pipe)  # To open it waits for a reader, as a disk that does not answer.
    checkpoints = tmg.Checkpoints(folder, model, model.optimizer)
    with hearing("The save of ") as said:
        thread = when_heard(said, pipe.read_bytes)
        # What has been read by another program is not on the disk.
        with tmg.watch(SECONDS, tmp_path), pytest.raises(CheckpointError):
            checkpoints.save()
    thread.join(LIMIT)
    assert f"The save of {folder}/step-000" in said.said()
    assert "bytes free" in said.said()
    disk = report_in(tmp_path)["disk"]
    assert 0 <= disk["free"] <= disk["total"]


# Fails if two threads that wait for each other are not named, or not both.
def test_a_deadlock_of_two_threads(trained: Any, tmp_path: Path) -> None:
    *_, step, data = trained
    first, second = threading.Lock(), threading.Lock()
    both = threading.Barrier(2)

    def in_the_other_order() -> None:
        with suppress(RuntimeError), second:  # The test has released it.
            both.wait(LIMIT)
            with first:
                pass

    other = threading.Thread(target=in_the_other_order, name="loader")
    other.start()
    with hearing("a deadlock") as said, tmg.watch(SECONDS, tmp_path):
        when_heard(said, second.release)
        for batch in data:
            with first:
                step(batch)
                if not said.heard.is_set():
                    both.wait(LIMIT)
                    with second:
                        pass
    other.join(LIMIT)
    text = said.said().lower()
    assert "thread 'mainthread' at test_causes.py" in text
    assert "thread 'loader' at test_causes.py" in text
    assert "`with first:` in in_the_other_order" in text


# Fails if a function of Python inside of TensorFlow is not named, with its line.
def test_a_py_function_that_does_not_return(trained: Any, tmp_path: Path) -> None:
    _, strategy, step, _ = trained
    with hearing("A tf.py_function has not returned, at hangs.py") as said:

        def slow(x: Any) -> Any:
            said.wait()
            return x

        def of_python(x: Any, y: Any) -> Any:
            return tf.ensure_shape(tf.py_function(slow, [x], tf.float32), [4, 2]), y

        data = tf.data.Dataset.from_tensors(BATCH).map(of_python)
        with tmg.watch(SECONDS, tmp_path):
            for batch in tmg.distribute_dataset(data, strategy):
                step(batch)
    assert said.heard.is_set()


# Fails if a first step that is traced and compiled is called a hang.
def test_a_first_step_that_only_compiles(trained: Any, tmp_path: Path) -> None:
    model, strategy, _, data = trained
    with hearing("This is not a hang. The first step of its kind is traced") as said:

        def forward(model: Any, batch: Any, training: bool) -> Any:
            said.wait()
            x, y = batch
            return tmg.loss_sum(keras.losses.MeanSquaredError(), y, model(x, training=training))

        step = tmg.make_train_step(
            model, model.optimizer, None, strategy, forward=forward, verify=False
        )
        with tmg.watch(SECONDS, tmp_path):
            for batch in data:
                step(batch)
    assert report_in(tmp_path)["first"]


# Fails if a full disk for the report itself is an error in the training, or not said.
def test_a_full_disk_for_the_report(tmp_path: Path) -> None:
    (tmp_path / f".watch-{os.getpid()}.json").symlink_to("/dev/full")
    with hearing("No space left on device") as said, tmg.watch(SECONDS, tmp_path):
        said.wait()
    assert "It is in your own code, at hangs.py" in said.said()
    assert list(tmp_path.iterdir()) == []


# Fails if of two watches another than the last one counts, or if one ends the other.
def test_watches_inside_one_another(tmp_path: Path) -> None:
    outer = tmg.watch(SECONDS, tmp_path / "outer")
    with outer, tmg.watch(SECONDS, tmp_path / "inner"):
        with hearing("Nothing has ended") as said:
            said.wait()
        assert report_in(tmp_path / "inner")["report"] == 1
        assert not (tmp_path / "outer").exists()
        with outer, hearing(f"--watch {tmp_path / 'outer'}") as said:
            said.wait()
        assert len(watcher.watches) == 2


# Fails if a wait is reported once only, at each look, or if its end is not reported.
def test_a_wait_is_reported_again(tmp_path: Path) -> None:
    with tmg.watch(SECONDS, tmp_path):
        with hearing("Nothing has ended") as said:
            while len(said.texts) < 3:
                assert not said.heard.wait(0.0) or len(said.texts) < 3
                threading.Event().wait(0.01)
        assert report_in(tmp_path)["report"] == 3
        with hearing("What was waited for has ended, after") as said:
            with noting("call"):
                pass
            said.wait()


# Fails if a watch of a fit that has failed goes on to watch what is no training.
def test_a_fit_that_fails_ends_its_watch(trained: Any, tmp_path: Path) -> None:
    def fails() -> Iterator[Any]:
        yield from [BATCH] * 3
        raise ValueError("my own")

    with pytest.raises(Exception, match="my own"):
        tmg.fit(trained[0], fails, callbacks=[tmg.watch(SECONDS, tmp_path)], verbose=0)
    for _ in range(int(LIMIT * 100)):
        if not watcher.watches:
            break
        threading.Event().wait(0.01)
    assert not list(tmp_path.iterdir())


# Fails if what the launcher asks for is not begun once, or not by the first strategy.
def test_the_launcher_asks_for_a_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMULTIGPU_WATCH", "250")
    tmg.create_strategy(prefer="one_device")
    assert [watch.seconds for watch in watcher.watches] == [250.0]
    assert "TFMULTIGPU_WATCH" not in os.environ
    watcher.end(watcher.watches[0])


# Fails if a watch that is left open keeps the process from its end.
def test_no_thread_of_a_watch_keeps_the_process(tmp_path: Path) -> None:
    with tmg.watch(300, tmp_path):
        names = {t.name: t.daemon for t in threading.enumerate() if "tfmultigpu-watch" in t.name}
    assert names == {"tfmultigpu-watch": True}


def test_seconds_are_positive() -> None:
    with pytest.raises(ValueError, match=r"Write tmg.watch\(seconds=300\)"):
        tmg.watch(0)


# Fails if code of the user in a callback is taken for a wait of TensorFlow.
@pytest.mark.parametrize("is_callback", [True, False])
def test_code_in_a_callback_is_named(is_callback: bool) -> None:
    script = {"file": "train.py", "line": 9, "function": "<module>", "code": "fit()", "own": True}
    calls = {"file": "/keras/src/callbacks/callback_list.py", "function": "on_epoch_end"}
    frames = [script, {**script, **calls, "own": False}]
    if is_callback:
        frames.append({**script, "function": "on_epoch_end", "code": "time.sleep(600)"})
    state = {"phase": "callback", "thread": 1, "first": False, "last": None, "what": ""}
    clue = clue_of(state, [{"id": 1, "name": "main", "main": True, "frames": frames}])
    if is_callback:
        place = "train.py:9 `time.sleep(600)` in on_epoch_end"
        assert clue == ["code", f"it is in your own code, at {place}"]
    else:
        assert clue is None
