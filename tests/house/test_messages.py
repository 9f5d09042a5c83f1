"""Each message of the library has an example whose line is run, or a reason why a CPU cannot."""

from __future__ import annotations

import ast
import re

from lines.messages import VALUE, Message, made, matching, messages, own_errors, registered
from lines.without_line import WITHOUT


def without_example() -> list[Message]:
    known = {m for words in [*registered(), *WITHOUT] for m in matching(words)}
    return [message for message in messages() if message not in known]


# Fails if a message is new, or changed its first words, and no example runs its line.
def test_each_message_has_an_example() -> None:
    missing = without_example()
    assert not missing, "write an example in tests/lines:\n" + "\n".join(map(str, missing))


# Fails if an example or a reason is of a message that is gone, or of several.
def test_each_example_has_one_message() -> None:
    texts = {words: {m.text for m in matching(words)} for words in [*registered(), *WITHOUT]}
    wrong = {words: sorted(found) for words, found in texts.items() if len(found) != 1}
    assert not wrong, "none or several messages have these words"
    assert not registered().keys() & WITHOUT.keys()


# Fails if two examples have one name, by which processes find them.
def test_each_example_has_a_name_of_its_own() -> None:
    names = [node.name for node in registered().values()]
    assert len(set(names)) == len(names)


# Fails if an example makes the mistake and does not run the line.
def test_each_example_ends_with_the_line() -> None:
    bare = [
        key for key, node in registered().items() if isinstance(node.body[-1], ast.With)
        and "told(" in ast.unparse(node.body[-1].items[0])
    ]  # fmt: skip
    assert not bare


# Fails if an error does not say what happened in whole sentences, ends the values received with a
# period, which its text adds, or has them in the field of what happened.
def test_each_error_has_the_form_of_its_fields() -> None:
    own = {name for name in own_errors() if re.fullmatch("[A-Z].*Error", name)} | {"GraphMessage"}
    errors = [place for place in made() if place.kind in own]
    wrong = []
    for error in errors:
        whats, *rest = error.fields
        sentences = all(what.endswith((".", VALUE)) for what in whats)
        apart = not any("Received:" in what for what in whats)
        values = rest[0] if rest else ()
        bare = not any(value.endswith((".", " ")) for value in values)
        if not (sentences and apart and bare):
            wrong.append(error)
    assert len(errors) > 170
    assert not wrong


# Fails if messages are not read from the source: what an f-string, a sum, a variable says.
def test_messages_are_read() -> None:
    texts = [message.text for message in messages()]
    assert len(texts) > 200
    assert any(text.startswith("add is for each replica") for text in texts)
    assert any(f"must be {VALUE}. Received: {VALUE}={VALUE}." in text for text in texts)
    assert Message("x.py", 1, f"a{VALUE}b.").says("Error: a[1]b.")
    assert not Message("x.py", 1, f"a{VALUE}b.").says("a1c.")
