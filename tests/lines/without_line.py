"""Messages whose line a test on CPUs of one machine cannot run, with the reason."""

from __future__ import annotations

WITHOUT: dict[str, str] = {}
