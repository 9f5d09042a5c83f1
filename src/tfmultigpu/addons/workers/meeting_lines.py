"""The lines that workers exchange when they meet: writing, signing and checking them.

A worker calls another on the address that is listed for it. Each line ends in a newline::

    called  {"protocol": ..., "nonce": A}                       a greeting: A is fresh
    caller  SIGNATURE {"kind": "ready", ..., "nonce": B}        B is fresh
    called  SIGNATURE {"kind": "card", ...}
    called  SIGNATURE {"kind": "go", ...}                       once all have come

The first worker calls the others with ``card``, and hears their card. They call it with ``ready``,
and the connection stays: on it they hear ``go``. A worker whose time is over before that calls with
``late``. ``problem`` replaces any kind if the speaker cannot start.

With a secret, SIGNATURE is the HMAC-SHA256 of the direction, the nonce of the other side and the
JSON text. The direction is ``call`` or ``answer``. The JSON text has the job, the number and the
card of the speaker. A line of another job has another key. A line that was recorded has another
nonce, so it cannot be used again, neither for another connection nor in the other direction.
Without a secret SIGNATURE is ``-``. Nothing is encrypted: lines hold no secret.

Anybody may connect and say anything. Lines have a largest length. Each field is checked before it
is used, and a wrong one raises a ``StrangeLineError``.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tfmultigpu.addons.workers.jobs import Job

__all__ = ["LONGEST_PROBLEM", "PROTOCOL", "Message", "Pen", "StrangeLineError", "readable"]

_FAMILY = "tfmultigpu rendezvous "
PROTOCOL = f"{_FAMILY}3"
_KINDS = ("card", "problem", "ready", "late", "go")
_MOST_WORKERS = 1 << 20
_MOST_FIELDS = 64
LONGEST_PROBLEM = 20_000  # In characters.
_TOKEN = re.compile(r"[0-9a-f]{16,64}")
_OLD = re.compile(rb'"protocol": ?"(tfmultigpu rendezvous [0-9]{1,6})"')


class StrangeLineError(ValueError):
    """A line was not written by a worker of this job.

    Attributes:
        kind: ``"foreign"`` (another program), ``"version"`` (another version of this library),
            ``"unsigned"`` (no signature, or one with another secret), ``"signed"`` (signed, and
            this worker has no secret) or ``"refused"`` (no line: the other side hung up).
        claims: The number of the worker that the speaker claims to be; None if it claims none.
        protocol: The protocol of another version.
    """

    def __init__(self, kind: str, claims: int | None = None, protocol: str | None = None) -> None:
        """Takes the attributes."""
        super().__init__(kind)
        self.kind, self.claims, self.protocol = kind, claims, protocol


@dataclass(frozen=True)
class Message:
    """A line of a worker, with every field checked.

    Attributes:
        kind: ``"card"``, ``"problem"``, ``"ready"``, ``"late"`` or ``"go"``.
        sender: The number of the worker that speaks.
        process: A random name of its process.
        job: The id of its job; None if it knows none.
        card: The facts on which all workers must agree.
        problem: Why it cannot start; None if it can.
        nonce: A fresh random number of a caller; empty in an answer.
    """

    kind: str
    sender: int
    process: str
    job: str | None
    card: Mapping[str, str]
    problem: str | None
    nonce: str = ""


class Pen:
    """Writes and reads the lines of one worker of a job."""

    def __init__(self, job: Job, sender: int, card: Mapping[str, str]) -> None:
        """Takes the fields that are the same in all lines."""
        self.job, self.sender, self.card = job, sender, dict(card)
        self.process = secrets.token_hex(8)

    def greeting(self) -> tuple[bytes, str]:
        """Returns the first line of the worker that is called, and its nonce."""
        nonce = secrets.token_hex(16)
        return json.dumps({"protocol": PROTOCOL, "nonce": nonce}).encode() + b"\n", nonce

    def read_greeting(self, line: bytes) -> str:
        """Returns the nonce of a greeting.

        Raises:
            StrangeLineError: The line is not a greeting.
        """
        fields = _fields(line)
        return _token(fields.get("nonce"))

    def call(self, kind: str, problem: str | None, greeting: str) -> tuple[bytes, str]:
        """Returns the line of a caller, and its nonce.

        Args:
            kind: See ``Message``.
            problem: See ``Message``.
            greeting: The nonce of the greeting.
        """
        nonce = secrets.token_hex(16)
        return self._line(kind, problem, nonce, "call", greeting), nonce

    def answer(self, kind: str, problem: str | None, asked: str) -> bytes:
        """Returns the line of the worker that was called.

        Args:
            kind: See ``Message``.
            problem: See ``Message``.
            asked: The nonce of the caller.
        """
        return self._line(kind, problem, "", "answer", asked)

    def read_call(self, line: bytes, greeting: str) -> Message:
        """Returns the message of a caller.

        Raises:
            StrangeLineError: The caller is not a worker of this job.
        """
        message = self._read(line, "call", greeting)
        _token(message.nonce)
        return message

    def read_answer(self, line: bytes, asked: str) -> Message:
        """Returns the message of a worker that was called.

        Raises:
            StrangeLineError: It is not a worker of this job.
        """
        return self._read(line, "answer", asked)

    def _line(self, kind: str, problem: str | None, own: str, direction: str, other: str) -> bytes:
        fields = {
            "protocol": PROTOCOL,
            "kind": kind,
            "from": self.sender,
            "process": self.process,
            "job": self.job.id,
            "card": self.card,
            "problem": None if problem is None else problem[:LONGEST_PROBLEM],
            "nonce": own,
        }
        body = json.dumps(fields).encode()
        return (self._sign(body, direction, other) or b"-") + b" " + body + b"\n"

    def _sign(self, body: bytes, direction: str, nonce: str) -> bytes | None:
        if self.job.secret is None:
            return None
        signed = b"\n".join([PROTOCOL.encode(), direction.encode(), nonce.encode(), body])
        return hmac.new(self.job.secret, signed, hashlib.sha256).hexdigest().encode()

    def _read(self, line: bytes, direction: str, nonce: str) -> Message:
        signature, _, body = line.rstrip(b"\r\n").partition(b" ")
        if line[:1] == b"{":
            signature, body = b"-", line
        message = _message(_fields(body))
        expected = self._sign(body, direction, nonce)
        if expected is None and signature != b"-":
            raise StrangeLineError("signed", message.sender)
        if expected is not None and not hmac.compare_digest(expected, signature):
            raise StrangeLineError("unsigned", message.sender)
        return message


def readable(text: str, most: int = 2000) -> str:
    """Returns text of somebody else for an error: without control characters, and shortened.

    Example:
        >>> readable("1 GPU" + chr(27) + "[2J", most=40)
        '1 GPU?[2J'
    """
    short = text if len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() or one == "\n" else "?" for one in short)


def _fields(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):  # Nested too deeply, or a number of too many digits.
        fields = None
    if isinstance(fields, dict) and fields.get("protocol") == PROTOCOL:
        return fields
    old = _OLD.search(body[:200])
    if old is not None and old[1] != PROTOCOL.encode():
        raise StrangeLineError("version", protocol=old[1].decode())
    raise StrangeLineError("foreign")


def _message(fields: Mapping[str, Any]) -> Message:
    sender, card = fields.get("from"), fields.get("card")
    if type(sender) is not int or not 0 <= sender < _MOST_WORKERS:
        raise StrangeLineError("foreign")
    if not isinstance(card, dict) or len(card) > _MOST_FIELDS:
        raise StrangeLineError("foreign", sender)
    kind, job, problem = fields.get("kind"), fields.get("job"), fields.get("problem")
    texts = [*card.values(), fields.get("nonce"), job or "", problem or ""]
    if kind not in _KINDS or not all(isinstance(one, str) for one in texts):
        raise StrangeLineError("foreign", sender)
    if (kind == "problem") != (problem is not None):
        raise StrangeLineError("foreign", sender)
    return Message(kind, sender, _token(fields.get("process")), job, card, problem, fields["nonce"])


def _token(value: object) -> str:
    if not isinstance(value, str) or _TOKEN.fullmatch(value) is None:
        raise StrangeLineError("foreign")
    return value
