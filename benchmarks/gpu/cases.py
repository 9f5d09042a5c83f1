"""What is measured, the most telling first: what there is no time for is at the end."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from gpu.networks import PRECISIONS, network

__all__ = ["CASES", "Case", "measure"]

ROUNDS = 3
PLANNED_WITHIN = 0.05  # Of the peak at eight times the rows of the probe.
SECONDS_OF_A_TURN = 2.5
# Of the loss of the first step, relative: the same weights on the same batch.
SAME_LOSS = {"float32": 1e-3, "tf32": 5e-3, "float16": 2e-2, "bfloat16": 5e-2}


@dataclasses.dataclass(frozen=True)
class Case:
    """One process of measuring.

    Attributes:
        kind: ``"peak"``, ``"speed"``, ``"profile"``, ``"memory"``, ``"plan"``, ``"parts"``,
            ``"replicas"`` or ``"bits"``.
        network: A key of ``NETWORKS``.
        precision: A key of ``PRECISIONS``.
        rows: Of a batch.
        xla: Whether forward and backward are compiled by XLA.
        contenders: Keys of ``CONTENDERS``.
        parts: Of how many parts of one GPU.
    """

    kind: str
    network: str = "transformer"
    precision: str = "bfloat16"
    rows: int = 32
    xla: bool = False
    contenders: tuple[str, ...] = ("plain", "ours")
    parts: int = 1

    @property
    def name(self) -> str:
        """What ``--only`` takes."""
        if self.kind == "peak":
            return "peak"
        if self.kind == "replicas":
            return f"{self.parts}-parts-{self.network}"
        if self.kind == "bits":
            return f"bits-{self.network}"
        parts = [self.network, self.precision, str(self.rows), *(["xla"] if self.xla else [])]
        return "-".join(parts if self.kind == "speed" else [self.kind, *parts])


def _cases() -> Iterator[Case]:
    all_three = ("plain", "ours", "fit")
    yield Case("peak")
    yield Case("speed", contenders=all_three)
    yield Case("speed", "resnet", rows=256, contenders=all_three)
    yield Case("memory")
    yield Case("parts")
    for precision in ("tf32", "float16", "float32"):
        yield Case("speed", "resnet", precision, 256)
        yield Case("speed", "transformer", precision)
    for name, rows in (("transformer", 32), ("resnet", 256)):
        yield Case("speed", name, rows=rows, xla=True, contenders=all_three)
        yield Case("profile", name, rows=rows)
    for name, rows in (("transformer", 32), ("resnet", 256)):
        yield Case("plan", name, rows=rows)
    for parts in (2, 4):
        yield Case("replicas", rows=16, parts=parts, contenders=("by_hand", "ours"))
        yield Case("replicas", "resnet", rows=64, parts=parts, contenders=("by_hand", "ours"))
    for name in ("transformer", "resnet"):
        yield Case("bits", name, "tf32", rows=16, parts=4, contenders=("1", "2", "4"))
    yield Case("speed", "remat", rows=32, contenders=all_three)
    yield Case("speed", "embedding", "float32", rows=256, contenders=all_three)
    yield Case("speed", "bert", rows=32, contenders=all_three)
    yield Case("speed", "gemma", rows=8, contenders=all_three)
    for precision in ("tf32", "float16", "float32"):
        yield Case("speed", "resnet", precision, 256, xla=True)
        yield Case("speed", "transformer", precision, xla=True)
    for rows in (64, 128):
        yield Case("speed", "resnet", "bfloat16", rows)
        yield Case("speed", "resnet", "tf32", rows)


Note = Callable[[str, dict[str, Any]], None]
CASES = {case.name: case for case in _cases()}


def measure(
    case: Case, *, rehearse: bool, write: Callable[[dict[str, Any]], None] = lambda one: None
) -> dict[str, Any]:
    """Measures one case; call it in a process that has not started TensorFlow.

    Args:
        case: What.
        rehearse: On the CPU, with tiny networks.
        write: Called with what has begun, and with the record so far: a process that does not come
            to its end has said how far it came.

    Returns:
        A record with ``"status"``, ``"passed"``, ``"failed"`` or ``"not run"``; where it failed or
        was not run, ``"error"``.
    """
    import tfmultigpu as tmg

    record: dict[str, Any] = {"name": case.name, **dataclasses.asdict(case), "status": "passed"}
    try:
        report = tmg.doctor()
        record["machine"] = {"title": report.title, **report.facts}
        write({"begun": "its start"})
        so_far = dict(record)

        def note(begun: str, known: dict[str, Any]) -> None:
            write({"so_far": so_far | known})
            write({"begun": begun})

        record |= _KINDS[case.kind](case, rehearse, note)
    except Exception:  # Whatever it is, it is what the report says of the case.
        record |= {"status": "failed", "error": traceback.format_exc(limit=-6)}
    return record


def _peak(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """The fastest bfloat16 product of this card."""
    import tensorflow as tf

    size, times = (64 if rehearse else 8192), 20

    @tf.function
    def multiply(x: Any, y: Any) -> Any:
        for _ in tf.range(times):
            x = tf.matmul(x, y)
        return tf.reduce_sum(tf.cast(x, tf.float32))

    # Random numbers of size one throughout: zeros, and numbers so small that they become zeros,
    # take less power and so multiply faster than any training does.
    x = tf.cast(tf.random.stateless_normal([size, size], [3, 4]), tf.bfloat16)
    y = tf.cast(tf.random.stateless_normal([size, size], [1, 2]) / size**0.5, tf.bfloat16)
    float(multiply(x, y))
    seconds = []
    for _ in range(10):
        began = time.perf_counter()
        float(multiply(x, y))
        seconds.append(time.perf_counter() - began)
    return {"flops_per_second": 2 * size**3 * times / min(seconds)}


def _speed(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    import tensorflow as tf

    import tfmultigpu as tmg
    from gpu.loops import CONTENDERS

    if not rehearse:
        tmg.enable_memory_growth()
    tf.config.experimental.enable_tensor_float_32_execution(PRECISIONS[case.precision][1])
    try:
        of = network(case.network, tiny=rehearse)
    except ImportError as error:
        return {"status": "not run", "error": f"{error}: pip install --no-deps keras-hub"}
    rows = 4 if rehearse else case.rows
    makers = [
        (name, lambda name=name: CONTENDERS[name](of, case.precision, rows, case.xla))
        for name in case.contenders
    ]
    return _timed(makers, case, of, rows, rehearse, note)


def _replicas(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """Equal parts of one GPU: the first step, which is checked, a step, and the peak of a part."""
    import tensorflow as tf

    import tfmultigpu as tmg
    from gpu.loops import by_hand, ours

    kind, memory = ("CPU", None) if rehearse else ("GPU", None)
    if not rehearse:
        free = tmg.list_devices("GPU")[0].memory_free
        if free is None:
            needs = "needs the driver's memory of the GPU: pip install 'tfmultigpu[nvml]'"
            return {"status": "not run", "error": needs}
        memory = [int(0.9 * free / case.parts)] * case.parts
    names = tmg.split_device(f"{kind}:0", parts=case.parts, memory=memory)
    # NCCL refuses to use one card twice.
    plain = tf.distribute.MirroredStrategy(list(names), tf.distribute.ReductionToOneDevice())
    strategy = tmg.create_strategy("mirrored", devices=list(names), fallback=False)
    of = network(case.network, tiny=rehearse)
    rows = 8 if rehearse else case.rows * case.parts
    peaks: dict[str, int] = {}

    def noting_peak(name: str, make: Any) -> Any:
        def made() -> Any:
            if not rehearse:
                tf.config.experimental.reset_memory_stats(names[-1])
            found = make()
            if not rehearse:
                # It counts from the start of the process: the second has the first beside it.
                peaks[name] = tf.config.experimental.get_memory_info(names[-1])["peak"]
            return found

        return name, made

    makers = [
        noting_peak("plain", lambda: by_hand(of, case.precision, rows, plain)),
        noting_peak("ours", lambda: ours(of, case.precision, rows, False, strategy)),
    ]
    return {"peaks": peaks, **_timed(makers, case, of, rows, rehearse, note)}


def _bits(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """Four logical replicas on one, two and four equal parts of one GPU: the same bits on each."""
    import tensorflow as tf

    import tfmultigpu as tmg
    from gpu.loops import ours

    kind, memory = ("CPU", None) if rehearse else ("GPU", None)
    if not rehearse:
        tf.config.experimental.enable_op_determinism()
        free = tmg.list_devices("GPU")[0].memory_free
        memory = None if free is None else [int(0.9 * free / case.parts)] * case.parts
    names = tmg.split_device(f"{kind}:0", parts=case.parts, memory=memory)
    of = network(case.network, tiny=rehearse)
    hashes: dict[str, str] = {}
    for count in case.contenders:
        note(f"{count} parts, until they train", {"hashes": hashes})
        devices = list(names[: int(count)])
        strategy = tmg.create_strategy(devices=devices, fallback=False)
        rows = 8 if rehearse else case.rows * case.parts
        options = {"logical_replicas": case.parts}
        contender, _ = ours(of, case.precision, rows, False, strategy, **options)
        contender.train(4)
        weights = b"".join(weight.tobytes() for weight in contender.model.get_weights())
        hashes[count] = hashlib.sha256(weights).hexdigest()[:12]
    found = {"title": of.title, "hashes": hashes}
    if len(set(hashes.values())) > 1:
        return {"status": "failed", "error": f"other bits: {hashes}", **found}
    return found


def _profile(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """What the GPU and the host do in some steps of each: TensorFlow's profiler says it."""
    import tfmultigpu as tmg
    from gpu.loops import CONTENDERS
    from gpu.profiles import profiled

    if not rehearse:
        tmg.enable_memory_growth()
    of = network(case.network, tiny=rehearse)
    rows = 4 if rehearse else case.rows
    found: dict[str, Any] = {}
    for name in case.contenders:
        note(f"{name}, until it trains", {"profiles": found})
        contender, _ = CONTENDERS[name](of, case.precision, rows, case.xla)
        contender.train(4)
        found[name] = profiled(lambda contender=contender: contender.train(4), case.name, name)
    return {"title": of.title, "profiles": found}


def _parts(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """Two parts of one GPU, of which one computes three rows for each of the other's."""
    import tfmultigpu as tmg
    from gpu.loops import ours, plain

    device = "CPU:0"
    memory = None
    if not rehearse:
        device = "GPU:0"
        free = tmg.list_devices("GPU")[0].memory_free
        if free is None:
            needs = "needs the driver's memory of the GPU: pip install 'tfmultigpu[nvml]'"
            return {"status": "not run", "error": needs}
        memory = [int(0.66 * free), int(0.22 * free)]
    names = tmg.split_device(device, parts=2, memory=memory)
    strategy = tmg.create_strategy("mirrored", devices=list(names), fallback=False)
    of = network(case.network, tiny=rehearse)
    rows = 4 if rehearse else case.rows
    makers = [
        ("plain", lambda: plain(of, case.precision, rows, False)),
        ("ours", lambda: ours(of, case.precision, rows, False, strategy, shares=(3, 1))),
    ]
    return {"shares": (3, 1), **_timed(makers, case, of, rows, rehearse, note)}


def _timed(
    makers: Any, case: Case, of: Any, rows: int, rehearse: bool, note: Note
) -> dict[str, Any]:
    contenders, first, errors, warm_up = {}, {}, {}, {}
    known: dict[str, Any] = {"first_loss": first, "seconds_to_warm_up": warm_up, "errors": errors}
    for name, make in makers:
        note(f"{name}, until it trains", known)
        began = time.perf_counter()
        try:
            contenders[name], loss = make()
            contenders[name].train(4)
        except Exception as error:  # It is what the report says of this contender.
            contenders.pop(name, None)
            errors[name] = f"{type(error).__name__}: {str(error)[:400]}"
            continue
        warm_up[name] = round(time.perf_counter() - began, 1)
        if loss is not None:
            first[name] = loss
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    steps = {}
    for one in contenders.values():
        # A function is prepared once more after others were traced, which can take seconds.
        one.train(1)
    for name, one in contenders.items():
        steps[name] = 2 if rehearse else max(4, min(200, int(SECONDS_OF_A_TURN / one.train(4))))
    for turn in range(2 if rehearse else ROUNDS):
        for name, one in contenders.items():
            note(f"{name}, turn {turn}", known | _speeds(of, rows, seconds))
            seconds[name].append(one.train(steps[name]))
    record = known | _speeds(of, rows, seconds)
    problems = [f"{name} did not train: {error}" for name, error in errors.items()]
    if {"plain", "ours"} <= set(first):
        gap = abs(first["ours"] / first["plain"] - 1)
        if not gap <= SAME_LOSS[case.precision]:
            problems.append(f"the first losses differ: {first}")
    if problems:
        record |= {"status": "failed", "error": "; ".join(problems)}
    return record


def _speeds(of: Any, rows: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """What is known after some turns."""
    medians = {name: statistics.median(taken) for name, taken in seconds.items() if taken}
    pairs = {
        name: [a / b for a, b in zip(seconds.get("plain", ()), taken, strict=False)]
        for name, taken in seconds.items()
        if name != "plain"
    }
    return {
        "title": of.title,
        "unit": of.unit,
        "rows": rows,
        "seconds_per_step": seconds,
        "per_second": {name: rows * of.units_per_row / one for name, one in medians.items()},
        "flops_per_unit": of.flops_per_row / of.units_per_row,
        "ratios": {name: statistics.median(each) for name, each in pairs.items() if each},
    }


# What a rehearsal says of a part that measures memory.
_NO_MEMORY = {
    "status": "not run",
    "error": "needs a GPU that TensorFlow can see: it counts the memory of GPUs only",
}


def _trains(of: Any, case: Case, strategy: Any, **options: Any) -> Any:
    """Returns a train step of a new model."""
    import keras

    import tfmultigpu as tmg
    from gpu.loops import loss_of

    with strategy.scope():
        model, optimizer = of.model(case.precision), keras.optimizers.Adam(1e-4)
    return tmg.make_train_step(model, optimizer, loss_of(), strategy, **options)


def _memory(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """The peak of a step, whole and in eight micro-batches."""
    if rehearse:
        return _NO_MEMORY
    import tensorflow as tf

    import tfmultigpu as tmg

    tmg.enable_memory_growth()
    of = network(case.network)
    strategy = tmg.create_strategy("one_device")
    peaks = {}
    for count in (1, 8):
        step = _trains(of, case, strategy, micro_batches=count)
        for rows in (1, 2 * case.rows):
            note(f"micro_batches={count}, {rows} rows", {"peaks": dict(peaks)})
            batch = of.batch(rows)
            step(batch)
            tf.config.experimental.reset_memory_stats("GPU:0")
            begun = tf.config.experimental.get_memory_info("GPU:0")["current"]
            float(step(batch)["loss"])
            peak = tf.config.experimental.get_memory_info("GPU:0")["peak"]
            # Beside what stays: weights, optimizer state and what the other step keeps.
            peaks[f"{count}, {rows}"] = int(peak - begun)
    few, many = 1, 2 * case.rows
    whole = peaks[f"1, {many}"] - peaks[f"1, {few}"]
    left = peaks[f"8, {many}"] - peaks[f"8, {few}"]
    return {"peaks": peaks, "rows": many, "share_of_activations": left / whole}


def _plan(case: Case, rehearse: bool, note: Note) -> dict[str, Any]:
    """The peak of a step, expected by ``plan_memory`` from 1/8 of its rows, and measured."""
    if rehearse:
        return _NO_MEMORY
    import tensorflow as tf

    import tfmultigpu as tmg

    tmg.enable_memory_growth()
    of = network(case.network)
    step = _trains(of, case, tmg.create_strategy("one_device"), verify=False)
    batch = of.batch(case.rows)
    note("the probe", {})
    plan = tmg.plan_memory(step, batch, probe=True)
    assert plan.peak is not None
    expected, bound = plan.peak.of(plan.rows_at_once), plan.devices[0].at_least
    known = {"expected": expected, "bound": bound, "fits": plan.peak.fits}
    note("a step of all rows", known)
    step(batch)
    tf.config.experimental.reset_memory_stats("GPU:0")
    float(step(batch)["loss"])
    measured = int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    known |= {"measured": measured, "off": expected / measured - 1, "share": bound / measured}
    problems = []
    if abs(known["off"]) > PLANNED_WITHIN:
        problems.append(f"the peak is {-known['off']:.1%} off what the probe expects")
    if bound > measured:
        problems.append(f"the bound of {bound} bytes is above the peak of {measured}")
    return known | ({"status": "failed", "error": "; ".join(problems)} if problems else {})


_KINDS = {
    "peak": _peak,
    "speed": _speed,
    "profile": _profile,
    "parts": _parts,
    "replicas": _replicas,
    "bits": _bits,
    "memory": _memory,
    "plan": _plan,
}
