"""The errors of workers that meet, in words."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tfmultigpu.clusters.jobs import JOB_ID, JOB_SECRET
from tfmultigpu.clusters.meeting_lines import PROTOCOL, Message, StrangeLineError, readable

__all__ = ["ANSWERS", "Words"]

# What is noted of a worker at whose address somebody else answers.
ANSWERS = {
    "foreign": "another program answers there",
    "version": "another version of tfmultigpu answers there",
    "unsigned": f"what answers there does not sign with the {JOB_SECRET} of this job",
    "refused": f"it hangs up on this worker; has it another {JOB_SECRET}?",
    "signed": f"what answers there signs with a {JOB_SECRET}, and this worker has none",
}


class Words:
    """What one worker says when a meeting fails."""

    def __init__(
        self, addresses: Sequence[str], index: int, source: str, cures: Mapping[str, str]
    ) -> None:
        """Takes what the texts name."""
        self._addresses, self._index, self._source = addresses, index, source
        self._cures = cures

    def name(self, peer: int) -> str:
        """Returns which worker that is."""
        known = peer in range(len(self._addresses))
        return f"worker {peer} at {self._addresses[peer]}" if known else f"worker {peer}"

    def names(self, peers: Collection[int], notes: Mapping[int, str]) -> str:
        """Returns which workers those are, with what was noted of each."""
        said = {peer: f" ({notes[peer]})" if peer in notes else "" for peer in peers}
        return ", ".join(self.name(peer) + said[peer] for peer in sorted(peers))

    def missing(
        self,
        peers: Collection[int],
        notes: Mapping[int, str],
        strangers: Collection[str],
        timeout: float,
    ) -> str:
        """Returns who did not come in time, and who spoke in their place."""
        ignored = f" Ignored: {'; '.join(strangers)}." if strangers else ""
        return (
            f"{len(peers)} of {len(self._addresses)} workers did not come within {timeout:g} s: "
            f"{self.names(peers, notes)}. This is {self.name(self._index)}.{ignored} Start the "
            "same program on every worker, check its log there and that the ports are open, or "
            "wait longer: create_strategy(startup_timeout=...)."
        )

    def disagreement(self, message: Message, place: str, field: str, mine: str) -> str:
        """Returns what two workers disagree about, with both values."""
        theirs = message.card.get(field)
        other = self.name(message.sender)
        if message.sender == self._index:
            other = f"another worker {self._index}, which spoke from {place},"
        value = "nothing of the kind" if theirs is None else readable(theirs)
        said = sorted([(self._index, self.name(self._index), mine), (message.sender, other, value)])
        (_, first, one), (_, second, two) = said
        return (
            f"The workers disagree about {field}: {first} has {one}, {second} has {two}. "
            "TensorFlow would wait for ever. "
            + self._cures.get(field, f"Give every worker the same {field}.")
        )

    def two_jobs(self, job: str, message: Message, place: str) -> str:
        """Returns which jobs met, and who spoke for the other one."""
        return (
            f"Workers of two jobs met. {self.name(self._index)} belongs to the job {job!r}. "
            f"From {place} worker {message.sender} of the job {readable(str(message.job), 200)!r} "
            "spoke. They would train one model together. Stop one of the jobs, or give each its "
            f"own addresses in {self._source}; if they are one job, set {JOB_ID} to the same name "
            "on every worker."
        )

    def listed_for_another(self, listed: int, who: str) -> str:
        """Returns at whose address somebody else answers."""
        return (
            f"{self._addresses[listed]} is listed for worker {listed}, but {who} answers there. "
            f"Give every worker an address of its own in {self._source}."
        )

    def same_index(self, message: Message, place: str) -> str:
        """Returns which number two processes have."""
        return (
            f"Two processes say they are worker {message.sender} of {len(self._addresses)}; one "
            f"spoke from {place}. Give every process an index of its own in {self._source}."
        )

    def strange(self, error: StrangeLineError, place: str) -> str:
        """Returns who spoke and was not heard."""
        claims = "" if error.claims is None else f" claiming to be worker {error.claims}"
        if error.kind == "version":
            return f"a line of another version of tfmultigpu came from {place}"
        line = "an unauthenticated line" if error.kind == "unsigned" else "a malformed line"
        return f"{line} came from {place}{claims}"

    def not_alike(self, error: StrangeLineError, place: str) -> str | None:
        """Returns what a worker without a secret cannot ignore: it will never meet that one."""
        if error.kind == "version":
            return (
                f"The workers run different versions of tfmultigpu: {self.name(self._index)} "
                f"speaks {PROTOCOL!r}, and {error.protocol!r} came from {place}. Install the same "
                "version on every worker."
            )
        if error.kind == "signed":
            return (
                f"Worker {error.claims} signs what it says, which came from {place}, and "
                f"{self.name(self._index)} has no {JOB_SECRET}. Give every worker of the job the "
                "same one, or none."
            )
        return None
