"""Messages of the errors of workers that meet."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfmultigpu.addons.workers.jobs import JOB_ID, JOB_SECRET
from tfmultigpu.addons.workers.meeting_lines import PROTOCOL, Message, StrangeLineError, readable
from tfmultigpu.addons.workers.spec import ClusterSource

__all__ = ["ANSWERS", "Words"]

_MOST_NAMED = 20

# Notes about a worker at whose address somebody else answers.
ANSWERS = {
    "foreign": "another program answers there",
    "version": "another version of tfmultigpu answers there",
    "unsigned": f"what answers there does not sign with the {JOB_SECRET} of this job",
    "refused": f"it hangs up on this worker; it may have another {JOB_SECRET}",
    "signed": f"what answers there signs with a {JOB_SECRET}, and this worker has none",
}


class Words:
    """Writes what one worker says when a meeting fails."""

    def __init__(
        self,
        addresses: Sequence[str],
        index: int,
        source: ClusterSource,
        cures: Mapping[str, str],
    ) -> None:
        """Takes the facts that the messages name."""
        self._addresses, self._index, self._source = addresses, index, source
        self._cures = cures

    def name(self, peer: int) -> str:
        """Returns a worker in words."""
        known = peer in range(len(self._addresses))
        return f"worker {peer} at {self._addresses[peer]}" if known else f"worker {peer}"

    def names(self, peers: Collection[int], notes: Mapping[int, str]) -> str:
        """Returns workers in words, with the notes about each."""
        named = sorted(peers)[:_MOST_NAMED]
        said = [f"{self.name(peer)} ({notes.get(peer, 'no answer')})" for peer in named]
        more = len(peers) - len(named)
        return ", ".join(said) + (f" and {more} more" if more else "")

    def silence(self, peer: int) -> str:
        """Returns what a worker that answers has not done."""
        return "has not said go" if peer == 0 else f"has not called {self.name(0)}"

    def missing(
        self,
        peers: Collection[int],
        notes: Mapping[int, str],
        strangers: Collection[str],
        when: str,
    ) -> str:
        """Returns the message for workers that did not come in time."""
        ignored = f" Ignored: {'; '.join(strangers)}." if strangers else ""
        return (
            f"{len(peers)} of {len(self._addresses)} workers did not come {when}: "
            f"{self.names(peers, notes)}. This is {self.name(self._index)}.{ignored} Start the "
            "same program on every worker, and check its log there and that the ports are open. Or "
            "wait longer: create_strategy(startup_timeout=...)."
        )

    def disagreement(self, message: Message, place: str, field: str, mine: str) -> str:
        """Returns the message for two workers that disagree, with both values."""
        theirs = message.card.get(field)
        other = self.name(message.sender)
        if message.sender == self._index:
            other = f"another worker {self._index}, which spoke from {place},"
        value = "no such field" if theirs is None else readable(theirs)
        said = sorted([(self._index, self.name(self._index), mine), (message.sender, other, value)])
        (_, first, one), (_, second, two) = said
        return (
            f"The workers disagree about {field}: {first} has {one}, {second} has {two}. "
            "TensorFlow would wait for ever. "
            + self._cures.get(field, f"Give every worker the same {field}.")
        )

    def two_jobs(self, job: str, whose: str, message: Message, place: str) -> str:
        """Returns the message for workers of two jobs."""
        return (
            f"Workers of two jobs met. {whose} belongs to the job {job!r}. "
            f"Worker {message.sender} of the job {readable(str(message.job), 200)!r} spoke from "
            f"{place}. They would train one model together. Stop one of the jobs, or give each "
            f"different addresses in {self._source}. If they are one job, set {JOB_ID} to the same "
            "name on every worker."
        )

    def listed_for_another(self, listed: int, who: str) -> str:
        """Returns the message for an address at which somebody else answers."""
        return (
            f"{self._addresses[listed]} is listed for worker {listed}, but {who} answers there. "
            f"Give every worker another address in {self._source}."
        )

    def same_index(self, message: Message, place: str) -> str:
        """Returns the message for two processes with one number."""
        return (
            f"Two processes say they are worker {message.sender} of {len(self._addresses)}; one "
            f"spoke from {place}. Give every process another index in {self._source}."
        )

    def strange(self, error: StrangeLineError, place: str) -> str:
        """Returns the note about a line that was ignored."""
        claims = "" if error.claims is None else f" claiming to be worker {error.claims}"
        if error.kind == "version":
            return f"a line of another version of tfmultigpu came from {place}"
        line = "an unauthenticated line" if error.kind == "unsigned" else "a malformed line"
        return f"{line} came from {place}{claims}"

    def not_alike(self, error: StrangeLineError, place: str) -> str | None:
        """Returns the message for a worker that this one will never meet; None if it may still."""
        if error.kind == "version":
            return (
                f"The workers run different versions of tfmultigpu: {self.name(self._index)} "
                f"speaks {PROTOCOL!r}, and {error.protocol!r} came from {place}. Install the same "
                "version on every worker."
            )
        if error.kind == "signed":
            return (
                f"Worker {error.claims} signs its lines, which came from {place}, but "
                f"{self.name(self._index)} has no {JOB_SECRET}. Give every worker of the job the "
                "same one, or none."
            )
        return None
