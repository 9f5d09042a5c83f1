"""What each operation of a traced step waits for. It is never run, so it may name any devices."""

from __future__ import annotations

import re
from typing import Any

import tensorflow as tf

DECISION = "#decision"  # Behind the name of a branch: what both of its sides wait for.


class Dependencies:
    """What each operation of a graph waits for, with the bodies of called functions in place.

    Attributes:
        inputs: For each operation, by path, what it reads or is ordered after.
        kinds: The type of each operation.
        sizes: The bytes that it returns first.
        devices: The device that it names; "" for none.
    """

    def __init__(self, graph: Any) -> None:
        definition = graph.as_graph_def(add_shapes=True)
        self.inputs: dict[str, list[str]] = {}
        self.kinds: dict[str, str] = {}
        self.sizes: dict[str, int] = {}
        self.devices: dict[str, str] = {}
        self._bodies = {one.signature.name: one for one in definition.library.function}
        self._add(definition.node, "", {}, [])

    def _add(self, nodes: Any, path: str, arguments: dict[str, str], after: list[str]) -> None:
        """Adds operations, which come ``after`` the decisions that lead to their branch.

        ``arguments`` of their function are operations outside of it.
        """
        nodes = list(nodes)
        calls = {node.name for node in nodes if self._called(node)}

        def place(tensor: str) -> str:
            name, *rest = tensor.removeprefix("^").split(":")
            if name in arguments:
                return arguments[name]
            output = f"#{rest[-1] if rest else 0}" if name in calls and tensor[0] != "^" else ""
            return path + name + output

        for node in nodes:
            name, inputs = path + node.name, [place(one) for one in node.input]
            self.inputs[name], self.kinds[name] = [*inputs, *after], node.op
            self.devices[name] = node.device
            if node.attr["_output_shapes"].list.shape:
                shape = tf.TensorShape(node.attr["_output_shapes"].list.shape[0])
                dtype = tf.as_dtype(node.attr["T"].type or tf.float32)
                self.sizes[name] = (shape.num_elements() or 0) * dtype.size
            values = [place(one) for one in node.input if one[0] != "^"]
            decided = after
            if node.op.endswith("If"):
                decided = [*after, f"{name}{DECISION}"]
                self.inputs[decided[-1]], self.kinds[decided[-1]] = [values[0], *after], node.op
            for body in self._called(node):
                names = [argument.name for argument in body.signature.input_arg]
                # A branch is not given the condition, which comes first.
                outer = dict(zip(names, values[len(values) - len(names) :], strict=True))
                self._add(body.node_def, f"{name}/", outer, decided)
                self._connect(body, name, outer, decided)

    def _connect(self, body: Any, name: str, arguments: dict[str, str], decided: list[str]) -> None:
        """Makes what a call returns wait for what its body computes for it."""
        nested = {node.name for node in body.node_def if self._called(node)}
        for index, output in enumerate(body.signature.output_arg):
            inner, *rest = body.ret[output.name].split(":")
            suffix = f"#{rest[-1]}" if inner in nested else ""
            source = arguments.get(inner, f"{name}/{inner}{suffix}")
            self.inputs.setdefault(f"{name}#{index}", []).extend([source, *decided])
        # What is ordered after the call waits for all of it.
        self.inputs[name] += [f"{name}/{node.name}" for node in body.node_def]

    def _called(self, node: Any) -> list[Any]:
        functions = [value.func.name for value in node.attr.values() if value.HasField("func")]
        return [self._bodies[name] for name in functions if name in self._bodies]

    def of_kind(self, pattern: str | re.Pattern[str]) -> list[str]:
        return [name for name, kind in self.kinds.items() if re.search(pattern, kind)]

    def before(self, name: str, without: str = "^$") -> set[str]:
        """Returns all that an operation waits for; but not what kinds ``without`` wait for."""
        seen, left = set(), [name]
        while left:
            last = left.pop()
            if re.search(without, self.kinds.get(last, "?")):
                continue
            for one in self.inputs.get(last, ()):
                if one not in seen:
                    seen.add(one)
                    left.append(one)
        return seen
